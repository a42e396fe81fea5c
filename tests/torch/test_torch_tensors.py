"""From tensors to bytes: types, memory orders, what is refused, and the place of a shard in its whole."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from baft_torch._dtypes import dtype_of, tag_of
from baft_torch._models import ModelTree
from baft_torch._placements import parts_of, runs_of
from baft_torch._restore import load
from baft_torch._state import TrainingState
from baft_torch._tensors import Extent, freeze_storage, is_dense, plain, reduced
from baftd.checkpoint.shard import NATIVE_DTYPES
from baftd.errors import UnsupportedTensor, UsageError
from tests.support.torch_image import snapshot

DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype) and tag_of(v) is not None}, key=str
)  # fmt: skip


class Shard(NamedTuple):
    """The one rectangle of a whole tensor that a rank holds."""

    global_shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """What the adapter reads off a DTensor; None if it is no part of anything, or not one rectangle."""
    found = runs_of(tensor)
    if isinstance(found, str):
        return None
    parts = parts_of(found[0])
    return Shard(tuple(tensor.shape), parts[0].box) if len(parts) == 1 else None


def holder(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("t", tensor)
    return module


def through(tensor: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """`tensor` saved as a buffer and restored into a module whose buffer is `into`."""
    image = snapshot(TrainingState(ModelTree(holder(tensor)), []))
    module = holder(into)
    load(image, TrainingState(ModelTree(module), []), image.small)
    return module.t


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.arange(6 * size) * 37 % (2 if dtype is torch.bool else 251)
    tensor = bits.to(torch.uint8).view(dtype).reshape(2, 3)
    found = through(tensor, torch.zeros(6 * size, dtype=torch.uint8).view(dtype).reshape(2, 3))
    assert raw(found) == raw(tensor)
    assert found.dtype is dtype
    assert dtype_of(tag_of(dtype) or "") is dtype


def test_native_tags_have_the_sizes_that_safetensors_gives_them() -> None:
    for tag, size in NATIVE_DTYPES.items():
        dtype = dtype_of(tag)
        assert dtype is not None
        assert torch.empty((), dtype=dtype).element_size() == size


def _strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    room = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.arange(float(room)).as_strided(shape, stride)


LAYOUTS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "row major": (lambda: torch.randn(3, 4), False),
    "0-dim": (lambda: torch.tensor(3.5), False),
    "empty": (lambda: torch.empty(0, 4), False),
    "transposed": (lambda: torch.randn(3, 4).t(), False),
    "channels last": (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
    "size one": (lambda: torch.randn(4, 1, 3).transpose(0, 1), False),
    "rows of a larger one": (lambda: torch.randn(10, 4)[3:6], False),
    "columns of a larger one": (lambda: torch.randn(10, 4)[:, 1:3], True),
    "every other": (lambda: torch.randn(12)[::2], True),
    "padded rows": (lambda: _strided((3, 4), (6, 1)), True),
    "conjugated": (lambda: torch.randn(3, dtype=torch.complex64).conj(), True),
    "negated": (lambda: torch.randn(3, dtype=torch.complex64).conj().imag, True),
    "expanded": (lambda: torch.randn(1, 4).expand(5, 4), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_order_comes_back(layout: str) -> None:
    make, staged = LAYOUTS[layout]
    tensor = make()
    assert Extent.of(plain(tensor, "t"), "t").staged is staged
    into = make()
    before = (into.data_ptr(), into.stride())
    found = through(tensor, into)
    assert torch.equal(found, tensor)
    assert (found.data_ptr(), found.stride()) == before


@pytest.mark.parametrize("pair", list(itertools.permutations(["row major", "transposed", "columns"], 2)), ids="-".join)
def test_elements_come_back_into_another_order(pair: tuple[str, str]) -> None:
    makers = {
        "row major": lambda: torch.randn(4, 3),
        "transposed": lambda: torch.randn(3, 4).t(),
        "columns": lambda: torch.randn(4, 9)[:, 2:5],
    }
    tensor = makers[pair[0]]()
    assert torch.equal(through(tensor, makers[pair[1]]()), tensor)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.qint8), "quantised"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "nested": (lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged), "jagged"),
    "overlapping": (lambda: torch.randn(8).as_strided((3, 4), (1, 1)), "overlap"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_elements_in_memory_is_refused_by_name(kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(UnsupportedTensor, match=f"tensor 'model.t'.*{why}"):
        TrainingState(ModelTree(holder(make())), [])


def test_a_storage_resized_to_nothing_is_refused_by_name() -> None:
    tensor = torch.randn(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensor, match=r"tensor 'model.t'.*FSDP1"):
        TrainingState(ModelTree(holder(tensor)), [])


def test_a_lazy_module_is_refused_by_name_until_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedTensor, match=r"tensor 'model\.0\.weight'.*lazy"):
        TrainingState(ModelTree(model), [])
    model(torch.ones(1, 2))
    assert len(TrainingState(ModelTree(model), []).refresh()) == 2


def test_tensors_made_in_inference_mode_have_no_version_and_are_saved() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    state = TrainingState(ModelTree(model), [])
    assert snapshot(state).data["model.weight"] == raw(model.weight)
    assert [identity[2] for identity in state.identities()] == [0, 0]


def test_storages_that_are_read_by_pointer_cannot_be_resized_under_the_copy() -> None:
    model = nn.Linear(4, 4)
    TrainingState(ModelTree(model), [torch.optim.SGD(model.parameters(), lr=1.0)])
    with pytest.raises(RuntimeError, match="not resizable"):
        model.weight.untyped_storage().resize_(0)
    freeze_storage(torch.randn(3, dtype=torch.bfloat16))


def test_tied_tensors_are_saved_once_under_all_their_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["c"].weight.data = model["a"].weight.data  # tied by memory alone
    state = TrainingState(ModelTree(model), [])
    entries = {source.entry.name: source.entry for source in state.refresh()}
    assert entries["model.a.weight"].aliases == ("model.b.weight", "model.c.weight")
    assert "model.b.weight" not in entries
    model["c"].weight.data = model["c"].weight.data.clone()  # no longer
    entries = {source.entry.name: source.entry for source in state.refresh()}
    assert entries["model.a.weight"].aliases == ("model.b.weight",)
    assert "model.c.weight" in entries


def test_views_of_one_buffer_are_saved_each_by_itself() -> None:
    flat = torch.arange(10.0)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    image = snapshot(TrainingState(ModelTree(model), []))
    assert image.data["model.0"] == raw(flat[:4])
    assert image.data["model.1"] == raw(flat[4:])


def test_buffers_are_volatile_unless_a_pattern_says_otherwise() -> None:
    model = nn.BatchNorm1d(4)
    model.register_buffer("cache", torch.ones(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kinds = {s.entry.name: s.entry.kind for s in TrainingState(ModelTree(model), [optimizer]).refresh()}
    assert kinds == {
        "model.weight": "stable",
        "model.bias": "stable",
        "model.running_mean": "volatile",
        "model.running_var": "volatile",
        "model.num_batches_tracked": "volatile",
    }
    moved = TrainingState(ModelTree(model), [optimizer], ["*.running_*"])
    assert {s.entry.name for s in moved.refresh() if s.entry.kind == "volatile"} == {"model.num_batches_tracked"}
    with pytest.raises(UsageError, match="matches no buffer"):
        TrainingState(ModelTree(model), [optimizer], ["*.weight"])


def test_large_buffers_are_named() -> None:
    module = holder(torch.zeros((16 << 20) + 1, dtype=torch.uint8))
    assert TrainingState(ModelTree(module), []).large_buffers() == [("model.t", (16 << 20) + 1)]


def test_an_unchanged_tree_keeps_its_entries_and_a_changed_one_keeps_the_rest() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(ModelTree(model), [optimizer])
    before = [s.entry for s in state.refresh()]
    assert [s.entry for s in state.refresh()] == before
    model[0](torch.ones(1, 3)).sum().backward()  # the second layer gets no gradient: its state stays unmade
    optimizer.step()
    after = [s.entry for s in state.refresh()]
    assert {id(e) for e in before} <= {id(e) for e in after}
    assert {e.name for e in after} - {e.name for e in before} == {
        f"optim.0.0.{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_addresses_follow_data_that_was_swapped_and_buffers_that_were_replaced() -> None:
    model = nn.BatchNorm1d(4)
    state = TrainingState(ModelTree(model), [])
    state.refresh()
    model.weight.data = torch.full((4,), 7.0)
    model.running_mean = torch.full((4,), 9.0)
    image = snapshot(state)
    assert image.data["model.weight"] == raw(torch.full((4,), 7.0))
    assert image.data["model.running_mean"] == raw(torch.full((4,), 9.0))
    model.weight.data = model.weight.data[:2]  # the same pointer, fewer elements
    assert {s.entry.name: s.entry.shape for s in state.refresh()}["model.weight"] == (2,)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 3), (12, 0)])
@pytest.mark.parametrize("stride", [(6, 1), (1, 4), (1, 6), (7, 1), (0, 1)])
def test_dense_means_that_every_byte_between_first_and_last_is_an_element(
    shape: tuple[int, int], stride: tuple[int, int]
) -> None:
    tensor = torch.empty(64).as_strided(shape, stride)
    places = {i * stride[0] + j * stride[1] for i in range(shape[0]) for j in range(shape[1])}
    assert is_dense(tensor) == (len(places) == tensor.numel() and places == set(range(tensor.numel())))


def test_expanded_dimensions_are_cut_to_one() -> None:
    assert reduced(torch.ones(1, 3).expand(4, 3), "t").shape == (1, 3)
    with pytest.raises(UnsupportedTensor, match="overlap"):
        reduced(torch.ones(8).as_strided((3, 4), (2, 1)), "t")


# ---------------------------------------------------------------- DTensor


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int, int], None]]:
    """Pretends to be one rank of many: collectives do nothing."""
    dist = torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def _mine(whole: torch.Tensor, local: torch.Tensor, ranges: Any) -> bool:
    return torch.equal(whole[tuple(slice(start, stop) for start, stop in ranges)], local)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 2)])
def test_ranges_of_a_shard_say_which_elements_it_holds(
    sizes: tuple[int, ...], fake_ranks: Callable[[int, int], None]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    world = torch.tensor(sizes).prod().item()
    for rank in range(int(world)):
        fake_ranks(rank, int(world))
        mesh = init_device_mesh("cpu", sizes)
        for shape in [(8, 6), (5, 7), (1, 2), (2,), (13,)]:
            whole = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
            kinds = [Replicate(), *(Shard(d) for d in range(len(shape)))]
            for placements in itertools.product(kinds, repeat=len(sizes)):
                tensor = distribute_tensor(whole, mesh, list(placements), src_data_rank=None)
                assert isinstance(tensor, DTensor)
                shard = shard_of(tensor)
                assert shard is not None
                local = tensor.to_local()
                assert shard.global_shape == shape
                assert tuple(stop - start for start, stop in shard.ranges) == tuple(local.shape)
                assert _mine(whole, local, shard.ranges)
                _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                if local.numel():
                    assert tuple(start for start, _ in shard.ranges) == tuple(offset)


def test_strided_shards_and_partial_sums(fake_ranks: Callable[[int, int], None]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    starts = []
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        local = torch.zeros(2, 3)
        # fully_shard after tensor parallel: every rank still holds consecutive rows
        made = DTensor.from_local(
            local, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False, shape=(8, 3), stride=(3, 1)
        )
        shard = shard_of(made)
        assert shard is not None
        starts.append(shard.ranges[0])
        gaps = [Shard(0), _StridedShard(0, split_factor=2)]
        assert shard_of(DTensor.from_local(local, mesh, gaps, run_check=False, shape=(8, 3), stride=(3, 1))) is None
        assert shard_of(DTensor.from_local(local, mesh, [Partial(), Shard(0)], run_check=False)) is None
    assert sorted(starts) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_replicas_are_declared_only_where_a_name_means_one_tensor(fake_ranks: Callable[[int, int], None]) -> None:
    fake_ranks(1, 4)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    entry = TrainingState(ModelTree(model, world=4), []).refresh()[0].entry
    assert (entry.name, entry.global_shape, entry.ranges) == ("model.weight", (2, 3), ((0, 2), (0, 3)))
    # The group is half of the job: two stages may both have a layer called "weight".
    half = torch.distributed.new_group([0, 1])
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=half)
    assert TrainingState(ModelTree(model, world=8), []).refresh()[0].entry.ranges is None
    # With a schedule the stage is part of the name.
    schedule = type("Schedule", (), {"_stage": type("Stage", (), {"submod": model, "stage_index": 3})()})()
    entry = TrainingState(ModelTree(model, schedule, world=8), []).refresh()[0].entry
    assert (entry.name, entry.ranges) == ("model.stage3.weight", ((0, 2), (0, 3)))
