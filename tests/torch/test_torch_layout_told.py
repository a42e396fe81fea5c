"""What a job says of its own layout: degrees with Megatron's attributes, names, a declaration by hand; DDP and ZeRO."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from baft_torch._layout import base_name
from baftd.checkpoint.layout import Layout
from baftd.checkpoint.mesh import ParallelDescription
from baftd.errors import LayoutError, UsageError
from tests.support.torch_fake import become, entries_of, fake_ranks, fill, holder, numbered, saved_of, state_of

ALL = ((0, 4), (0, 6))


@pytest.fixture
def ranks() -> Iterator[Callable[[int, int], None]]:
    with fake_ranks() as be:
        yield be


def ranges(state: Any) -> dict[str, Any]:
    return {entry.name: entry.ranges for entry in entries_of(state)}


def megatron(whole: torch.Tensor, dim: int, stride: int, tp: int, mine: int, **more: Any) -> nn.Parameter:
    """A parameter as Megatron-LM's `_initialize_affine_weight_cpu` cuts it and marks it."""
    pieces = torch.split(whole, whole.shape[dim] // tp // stride, dim)
    made = nn.Parameter(torch.cat(pieces[mine::tp], dim).contiguous())
    marks = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride, **more}
    for name, value in marks.items():
        setattr(made, name, value)
    return made


def plain(whole: torch.Tensor, **marks: Any) -> nn.Parameter:
    """A parameter that every tensor parallel rank holds whole."""
    made = nn.Parameter(whole.clone())
    for name, value in {"tensor_model_parallel": False, **marks}.items():
        setattr(made, name, value)
    return made


# ---------------------------------------------------------------- degrees and attributes


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_megatrons_attributes_give_each_rank_its_ranges(data: st.DataObject) -> None:
    tp, dp, pp = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    dim, stride = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([1, 1, 2]))
    order = data.draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-dp-pp", "dp-tp-pp"]))
    text = f"tp={tp},dp={dp},pp={pp},order={order}"
    world = tp * dp * pp
    degrees = ParallelDescription.parse(text, world)
    shape = [3, 3]
    shape[dim] = tp * stride * 2
    whole = numbered(*shape)
    entries = {}
    seen = {stage: np.full(shape, np.nan, np.float32) for stage in range(pp)}
    for rank in range(world):
        place = degrees.coordinates(rank)
        model = holder(w=megatron(whole, dim, stride, tp, place["tp"]), norm=plain(numbered(5)))
        state = state_of(model, rank=rank, world=world, parallel=text)
        assert state.data_parallel == dp
        assert state.models.coordinates() == place
        saved = saved_of(state)
        entries[rank] = [entry for entry, _ in saved]
        prefix = f"model.stage{place['pp']}." if pp > 1 else "model."
        assert {entry.name for entry in entries[rank]} == {f"{prefix}w", f"{prefix}norm"}
        interleaved = dim == 1 and stride > 1 and tp > 1
        for entry, bytes_ in saved:
            if entry.name.endswith("w") and interleaved:
                assert entry.ranges is None
            elif entry.name.endswith("w"):
                fill(seen[place["pp"]], entry, bytes_)
    layout = Layout.of_entries(entries)
    for tensor in layout.tensors:
        if tensor.owner is None:
            holders = {len(cell.holders) for cell in tensor.cells()}
            assert holders == {dp if tensor.name.endswith("w") else dp * tp}
            assert tensor.name.endswith("norm") or np.array_equal(seen[_stage(tensor.name)], whole.numpy())


def _stage(name: str) -> int:
    found = re.search(r"stage(\d+)", name)
    return int(found[1]) if found else 0


def test_optimizer_state_lies_where_its_parameter_does() -> None:
    model = holder(w=megatron(numbered(4, 6), 0, 1, 2, 1), norm=plain(numbered(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = state_of(model, [optimizer], rank=1, world=4, parallel="tp=2,dp=2")
    found = ranges(state)
    assert found["optim.0.w.exp_avg"] == found["model.w"] == ((2, 4), (0, 6))
    assert found["optim.0.norm.exp_avg"] == ((0, 6),)
    assert found["optim.0.norm.step"] == ()
    # Of a tensor that ranks hold in part, a lone number is each rank's own, and known to be whole.
    assert found["optim.0.w.step"] is None
    held = state.held_of_state(model.w, (4, 6))
    assert (held.shape, held.box) == ((4, 6), ((2, 4), (0, 6)))
    assert state.held_of_state(model.w, ()).problem == ""
    assert "shape [4, 1]" in state.held_of_state(model.w, (4, 1)).problem
    assert state.held_of_state(model.norm, (1,)).box == ((0, 1),)


def test_state_of_another_shape_than_its_cut_parameter_cannot_be_taken_over() -> None:
    model = holder(w=megatron(numbered(4, 6), 0, 1, 2, 1))
    optimizer = torch.optim.Adafactor(model.parameters())
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    state = state_of(model, [optimizer], rank=1, world=2, parallel="tp=2")
    bound = state.small()["not_transferable"]
    assert set(bound) == {"optim.0.w.row_var", "optim.0.w.col_var"}
    assert "how it is cut is not known" in bound["optim.0.w.row_var"]


def test_plain_parameters_without_attributes_are_no_replicas_under_tensor_parallel() -> None:
    model = holder(w=nn.Parameter(numbered(4, 6)))
    assert ranges(state_of(model, world=4, parallel="tp=2,dp=2")) == {"model.w": None}
    assert ranges(state_of(model, world=4, parallel="dp=4")) == {"model.w": ALL}
    assert ranges(state_of(model, world=4, parallel="dp=4,zero=3")) == {"model.w": None}
    assert ranges(state_of(model, world=4)) == {"model.w": None}
    assert ranges(state_of(holder(w=numbered(4, 6)), world=4, parallel="dp=4")) == {"model.w": None}  # a buffer


def test_attributes_that_do_not_fit_are_named() -> None:
    wrong = plain(numbered(4, 6), tensor_model_parallel=True, partition_dim=2)
    with pytest.raises(LayoutError, match=r"'model\.w'.*partition_dim 2") as caught:
        state_of(holder(w=wrong), rank=3, world=4, parallel="tp=2,dp=2")
    assert (caught.value.tensor, caught.value.rank) == ("model.w", 3)


def test_model_chunks_of_a_rank_get_the_stages_of_the_interleaved_order() -> None:
    chunks = [holder(w=plain(numbered(2))), holder(w=plain(numbered(2)))]
    state = state_of(chunks, rank=1, world=2, parallel="pp=2,vpp=2")
    assert [entry.name for entry in entries_of(state)] == ["model.stage1.w", "model.stage3.w"]
    assert (state.stages, state.stage_count) == ((1, 3), 4)
    with pytest.raises(UsageError, match=r"holds 2 stages.*1 modules were given"):
        state_of(chunks[0], rank=1, world=2, parallel="pp=2,vpp=2")


def test_degrees_that_disagree_with_ranks_or_schedule_are_refused() -> None:
    model = holder(w=plain(numbered(2)))
    with pytest.raises(UsageError, match="8 ranks"):
        state_of(model, world=8, parallel="tp=2,dp=2")

    class Stage:
        submod, stage_index, group_rank, group_size, num_stages = model, 1, 1, 2, 2

    schedule = type("Schedule", (), {"_stage": Stage()})()
    with pytest.raises(UsageError, match=r"number 1 of them.*says pp 2 and number 0"):
        state_of(model, rank=0, world=2, schedule=schedule, parallel="pp=2")
    assert state_of(model, rank=1, world=2, schedule=schedule, parallel="pp=2").stages == (1,)


# ---------------------------------------------------------------- experts


def test_experts_under_one_local_name_are_never_replicas_and_shared_parts_are() -> None:
    text = "dp=4,ep=2"
    degrees = ParallelDescription.parse(text, 4)
    entries = {}
    for rank in range(4):
        ep = degrees.coordinates(rank)["ep"]
        model = holder(router=plain(numbered(3)), expert=plain(numbered(4, 6) + 100 * ep, allreduce=False))
        entries[rank] = entries_of(state_of(model, rank=rank, world=4, parallel=text))
    layout = Layout.of_entries(entries)
    assert {len(cell.holders) for cell in layout.tensor("model.router").cells()} == {4}
    for ep in range(2):
        tensor = layout.tensor(f"model.ep{ep}of2.expert")
        holders = {cell.holders for cell in tensor.cells()}
        assert holders == {tuple(rank for rank in range(4) if degrees.coordinates(rank)["ep"] == ep)}


def test_names_make_experts_job_wide() -> None:
    text, entries = "dp=4,ep=2", {}
    degrees = ParallelDescription.parse(text, 4)
    for rank in range(4):
        ep = degrees.coordinates(rank)["ep"]
        experts = nn.ModuleList(holder(w=plain(numbered(2), allreduce=False)) for _ in range(3))
        model = nn.ModuleDict({"experts": experts})

        def wide(name: str, ep: int = ep) -> str:
            return re.sub(r"experts\.(\d+)", lambda found: f"experts.{3 * ep + int(found[1])}", name)

        entries[rank] = entries_of(state_of(model, rank=rank, world=4, parallel=text, names=wide))
    layout = Layout.of_entries(entries)
    assert {tensor.name for tensor in layout.tensors} == {f"model.experts.{i}.w" for i in range(6)}
    assert {len(cell.holders) for tensor in layout.tensors for cell in tensor.cells()} == {2}


def test_experts_are_no_replicas_under_ddp(ranks: Any) -> None:
    become(0, 2)
    model = holder(expert=plain(numbered(2), allreduce=False), shared=plain(numbered(2)))
    found = ranges(state_of(DistributedDataParallel(model), world=2))
    assert found == {"model.expert": None, "model.shared": ((0, 2),)}
    ignoring = holder(expert=plain(numbered(2)), shared=plain(numbered(2)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["expert"])
    assert ranges(state_of(DistributedDataParallel(ignoring), world=2)) == found


def test_experts_as_dtensors_on_a_mesh_of_their_own(ranks: Any) -> None:
    """A mesh over all ranks says itself who holds what; one over the expert axis alone does not."""
    text = "dp=4,ep=2"
    degrees = ParallelDescription.parse(text, 4)
    for rank in range(4):
        become(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        ep = degrees.coordinates(rank)["ep"]
        assert ep == (mesh.get_coordinate() or (0, 0))[1]
        full = distribute_tensor(numbered(4, 2), mesh, [Shard(1), Shard(0)], src_data_rank=None)
        part = distribute_tensor(numbered(4, 2), mesh["edp"], [Shard(0)], src_data_rank=None)
        for each in (full, part):
            each.allreduce = False  # type: ignore[attr-defined]
        found = ranges(state_of(holder(full=full, part=part), rank=rank, world=4, parallel=text))
        assert set(found) == {"model.full", f"model.ep{ep}of2.part"}
        assert None not in found.values()


# ---------------------------------------------------------------- names


def test_names_give_layers_of_stages_one_number_each() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()

    def wide(name: str) -> str:
        found = re.fullmatch(r"model\.stage(\d+)\.layers\.(\d+)\.(.*)", name)
        assert found is not None, name
        return f"model.layers.{2 * int(found[1]) + int(found[2])}.{found[3]}"

    state = state_of(model, [optimizer], rank=1, world=2, parallel="pp=2", names=wide)
    assert list(ranges(state)) == [
        "model.layers.2.weight", "model.layers.3.weight",
        "optim.0.layers.2.weight.momentum_buffer", "optim.0.layers.3.weight.momentum_buffer",
    ]  # fmt: skip
    assert state.stages == ()  # none that stands in a name
    assert "stages" not in state.small()
    assert state.models.stages == (1,)


@pytest.mark.parametrize("bad", [lambda name: "layers.0", lambda name: 3, lambda name: "model."])
def test_names_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match=r"names=\) made .* of 'model\.w'"):
        state_of(holder(w=numbered(2)), names=bad)


def test_names_that_two_tensors_share_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'model\.b'.*'model\.a'.*one name"):
        state_of(holder(a=numbered(2), b=numbered(2)), names=lambda name: "model.x")


def test_a_base_name_loses_only_what_the_adapter_put_there() -> None:
    assert base_name("model.stage1.3.weight", (1,)) == "model.3.weight"
    assert base_name("optim.12.stage1.3.weight.step", (0, 1)) == "optim.12.3.weight.step"
    assert base_name("stage1.3.weight", (1,)) == "3.weight"
    assert base_name("model.stage2.stage1.conv", (2,)) == "model.stage1.conv"
    for name in ("model.stage1.conv", "model.g.stage1.conv", "model.stage12.conv"):
        assert base_name(name, (2,)) == name
        assert base_name(name, ()) == name


# ---------------------------------------------------------------- by hand


def test_a_declaration_by_hand_goes_before_all_others() -> None:
    model = holder(a=numbered(2, 3), b=numbered(2, 3), c=numbered(2, 3), flat=numbered(5), d=numbered(2, 3))
    said = {
        "model.a": ((8, 3), [(2, 4), (0, 3)]),
        "model.b": ((8, 3), [[(2, 3), (0, 3)], [(7, 8), (0, 3)]]),
        "*.c": "replicated",
        "model.flat": ((4, 3), [(4, 9)]),
        "model.*": "own",
    }
    state = state_of(model, layout=said)
    found = [(entry.name, entry.shape, entry.global_shape, entry.ranges) for entry in entries_of(state)]
    assert found == [
        ("model.a", (2, 3), (8, 3), ((2, 4), (0, 3))),
        ("model.b", (1, 3), (8, 3), ((2, 3), (0, 3))),
        ("model.b", (1, 3), (8, 3), ((7, 8), (0, 3))),
        ("model.c", (2, 3), (2, 3), ((0, 2), (0, 3))),
        ("model.flat", (5,), (4, 3), ((4, 9),)),
        ("model.d", (2, 3), None, None),
    ]
    held = state.by_name()["model.flat"].held
    whole = numbered(4, 3)
    local = whole.reshape(-1)[4:9]
    for part in held.parts:
        index = tuple(slice(*each) for each in part.box)
        assert torch.equal(local[part.where].view(part.shape), whole[index])
    asked = state_of(model, layout=lambda name, tensor: "replicated" if name.endswith("flat") else None)
    assert [name for name, each in ranges(asked).items() if each is not None] == ["model.flat"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (((8, 3), [(7, 9), (0, 3)]), "outside of the shape"),
        (((8, 3), [(0, 3), (0, 3)]), r"not what a tensor of shape \[2, 3\] holds"),
        (((8, 3), [[(0, 1), (0, 3)], [(1, 2), (0, 2)]]), "not what a tensor"),
        (((2, 12), [[(0, 2), (0, 1)], [(0, 2), (2, 4)]]), "not what a tensor"),
        (((8, 3), [(0, 7)]), "flattened"),
        ("everywhere", "not understood"),
        ((8, 3), "not understood"),
        (((8, 3), [(0, 1, 2)]), "not understood"),
    ],
)
def test_a_declaration_that_does_not_fit_names_tensor_rank_and_range(said: Any, why: str) -> None:
    with pytest.raises(LayoutError, match=why) as caught:
        state_of(holder(w=numbered(2, 3)), rank=1, world=2, layout={"model.w": said})
    assert (caught.value.tensor, caught.value.rank) == ("model.w", 1)


def test_patterns_that_match_nothing_and_sources_that_are_none_are_refused() -> None:
    model = holder(w=numbered(2))
    with pytest.raises(UsageError, match=r"'model\.v'.*matches no tensor"):
        state_of(model, layout={"model.v": "own"})
    with pytest.raises(UsageError, match="neither a dict nor a function"):
        state_of(model, layout=["model.w"])
    with pytest.raises(UsageError, match="not a function"):
        state_of(model, names={"a": "b"})  # type: ignore[arg-type]


# ---------------------------------------------------------------- DDP and ZeRO


def test_ddp_over_a_part_of_the_ranks_makes_no_replicas_unless_the_stages_are_known(ranks: Any) -> None:
    become(2, 4)
    half = torch.distributed.new_group([2, 3])
    model = DistributedDataParallel(holder(w=plain(numbered(4, 6))), process_group=half)
    assert ranges(state_of(model, rank=2, world=4)) == {"model.w": None}
    assert ranges(state_of(model, rank=2, world=4, parallel="pp=2,dp=2")) == {"model.stage1.w": ALL}
    # Names are the same for both halves of a tensor parallel layer: that they are job-wide makes no replicas of them.
    assert ranges(state_of(model, rank=2, world=4, names=str)) == {"model.w": None}
    del model.module.w.tensor_model_parallel  # type: ignore[union-attr]
    assert ranges(state_of(model, rank=2, world=4, parallel="tp=2,dp=2,order=dp-tp")) == {"model.w": None}


def test_buffers_that_ddp_broadcasts_are_named(ranks: Any) -> None:
    become(0, 2)

    def net() -> Any:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    state = state_of(DistributedDataParallel(net()), world=2)
    assert state.small()["broadcast_buffers"] == [
        "model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked",
    ]  # fmt: skip
    assert state.data_parallel == 2
    assert "broadcast_buffers" not in state_of(DistributedDataParallel(net(), broadcast_buffers=False), world=2).small()
    assert state_of(net(), world=2).data_parallel is None
    assert state_of(net(), world=1).small()["data_parallel"] == 1


def test_a_zero_redundancy_optimizer_has_its_state_on_one_rank_each(ranks: Any) -> None:
    entries, owners = {}, []
    for rank in range(2):
        become(rank, 2)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        state = state_of(model, [optimizer], rank=rank, world=2)
        entries[rank] = entries_of(state)
        (tree,) = state.optimizers
        owners.append({name for name, param in tree.params if tree.owns(param)})
        assert {f"optim.0.{name}.exp_avg" for name in owners[rank]} == {
            entry.name for entry in entries[rank] if entry.name.endswith("exp_avg")
        }
        assert not tree.changed()
        optimizer.step()
        assert not tree.changed()
    assert owners[0] | owners[1] == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not owners[0] & owners[1]
    layout = Layout.of_entries(entries)
    for tensor in layout.tensors:
        assert tensor.owner is None
        assert {len(cell.holders) for cell in tensor.cells()} == {1 if tensor.name.startswith("optim") else 2}


def test_a_zero_redundancy_optimizer_that_updates_in_backward_is_refused(ranks: Any) -> None:
    become(0, 2)
    model = DistributedDataParallel(nn.Linear(2, 3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(UsageError, match="overlap_with_ddp"):
        state_of(model, [optimizer], world=2)
