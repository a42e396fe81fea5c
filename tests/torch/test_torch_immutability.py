"""What happens when the state changes while it is being copied, the fence taken away.

Each case begins a snapshot, stops the copy in the middle, changes the state, and lets the copy finish; once for each
witness alone, once for all together, once for the audit alone. The truth is taken from the slot: its bytes are, or are
not, those that the tensors held at the boundary. Run with -s to see the table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from baft_client.shard_writer import ALL_WITNESSES
from baft_torch._hooks import UpdateHooks
from baft_torch._models import ModelTree
from baft_torch._state import TrainingState
from tests.support.torch_slot import Bench, Verdict
from tests.support.torch_zoo import Variant, variants

JUDGES: dict[str, tuple[frozenset[str], bool]] = {
    "updates": (frozenset({"updates"}), False),
    "identity": (frozenset({"identity"}), False),
    "canary": (frozenset({"canary"}), False),
    "audit": (frozenset(), True),
    "all three": (ALL_WITNESSES, False),
}
ROWS, DIM = 64, 32
_table: list[tuple[str, dict[str, Verdict]]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Prints, under -s, which witness caught what."""
    yield
    if not _table:
        return
    width = max(len(title) for title, _ in _table)
    print(f"\n\n{'change while the copy is under way':{width}}  {'content':8} " + " ".join(f"{j:>9}" for j in JUDGES))
    for title, verdicts in _table:
        wrong = any(verdict.wrong for verdict in verdicts.values())
        cells = [("caught" if v.caught else "WRONG" if v.wrong else "-").rjust(9) for v in verdicts.values()]
        print(f"{title:{width}}  {'wrong' if wrong else 'right':8} " + " ".join(cells))


class Bed:
    """A few parameters with gradients that need no model to compute them."""

    def __init__(self, variant: Variant, *, sharded: bool = False) -> None:
        torch.manual_seed(0)
        self.variant = variant
        shapes = [(ROWS, DIM), (DIM, DIM), (DIM, 2 * DIM)] + ([] if variant.matrices_only else [(DIM,), (4, 2, 2)])
        self.model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        if sharded:
            self.model = nn.ParameterList([nn.Parameter(_shard(p.detach())) for p in self.model])
        self.optimizer = variant.make(list(self.model.parameters()))
        self.step: Callable[..., Any] = self.optimizer.step

    def update(self) -> None:
        """One update with new gradients."""
        for p in self.model:
            p.grad = torch.randn_like(p)
            if self.variant.sparse:
                p.grad = p.grad.to_sparse(1)
        if self.variant.closure:
            self.step(lambda: sum((p.detach() ** 2).sum() for p in self.model))
        else:
            self.step()

    def settle(self) -> None:
        """The updates after which all state exists and no lazily made value appears."""
        for _ in range(5):
            self.update()


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Pretends to be rank 0 of 2: collectives do nothing, so what an optimizer reduces is wrong; no test minds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def judge(title: str, bed: Bed, change: Callable[[], None], *, at: float = 0.5) -> dict[str, Verdict]:
    """The case under each set of witnesses; checks what must hold for any change."""
    state = TrainingState(ModelTree(bed.model), [bed.optimizer])
    hooks = UpdateHooks([bed.optimizer], lambda: None)  # the fence is taken away, the counting stays
    verdicts: dict[str, Verdict] = {}
    try:
        with Bench(state) as bench:
            for name, (witnesses, audit) in JUDGES.items():
                verdicts[name] = bench.torn_by(
                    change, witnesses=witnesses, audit=audit, updates=lambda: hooks.updates, at=at
                )
    finally:
        hooks.remove()
    _table.append((title, verdicts))
    missed = verdicts["audit"].wrong and not verdicts["audit"].caught
    assert not missed, f"{title}: the audit let a wrong snapshot pass ({verdicts['audit'].name})"
    return verdicts


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_an_update_in_the_middle_of_the_copy(variant: Variant) -> None:
    bed = Bed(variant)
    bed.settle()
    verdicts = judge(f"{variant} step", bed, bed.update)
    assert verdicts["updates"].caught == "updates"
    assert verdicts["all three"].caught
    assert verdicts["audit"].wrong


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("variant", [v for v in variants() if not v.sparse], ids=str)
def test_an_update_of_dtensors_in_the_middle_of_the_copy(variant: Variant) -> None:
    bed = Bed(variant, sharded=True)
    try:
        bed.settle()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as problem:
        pytest.skip(f"torch {torch.__version__} has no {variant} on DTensor: {str(problem).splitlines()[0][:90]}")
    verdicts = judge(f"{variant} step, DTensor", bed, bed.update)
    assert verdicts["updates"].caught == "updates"
    assert verdicts["all three"].caught


ALWAYS = (
    "AdamW-forloop", "AdamW-foreach", "AdamW-fused", "SGD-foreach+momentum", "SGD-fused+momentum", "RMSprop-foreach",
)  # fmt: skip
"""Compiled in every run; compiling takes seconds each, so the rest is for --full."""


def _compilable() -> list[Any]:
    able = [v for v in variants() if not v.closure and not v.sparse]
    return [pytest.param(v, id=str(v), marks=[] if v.name in ALWAYS else [pytest.mark.full]) for v in able]


def _compiled(variant: Variant, backend: str) -> None:
    from torch._inductor import config

    bed = Bed(variant)
    torch.compiler.reset()
    bed.step = torch.compile(bed.optimizer.step, backend=backend)
    with config.patch(compile_threads=1):  # in this process: a pool of compilers would outlive the test
        bed.settle()
    verdicts = judge(f"{variant} step, compiled ({backend})", bed, bed.update)
    assert verdicts["updates"].caught == "updates"
    assert verdicts["all three"].caught
    assert verdicts["audit"].wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", _compilable())
def test_a_compiled_update_in_the_middle_of_the_copy(variant: Variant) -> None:
    _compiled(variant, "eager")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.leaks("torch keeps the files of its compiled code open")
@pytest.mark.parametrize("variant", [v for v in variants() if v.name in ("AdamW-foreach", "AdamW-fused")], ids=str)
def test_an_update_compiled_to_machine_code_in_the_middle_of_the_copy(variant: Variant) -> None:
    _compiled(variant, "inductor")


# ---------------------------------------------------------------- writes that are no update


UNSEEN = slice(1, 3)


def _row(bed: Bed) -> torch.Tensor:
    """Rows of the first parameter that the canary does not sample: it takes 16 elements of 2,048, evenly spaced."""
    return bed.model[0].detach()[UNSEEN]


def _write_by_pointer(tensor: torch.Tensor) -> None:
    other = torch.randn_like(tensor)
    ctypes.memmove(tensor.data_ptr(), other.data_ptr(), tensor.numel() * tensor.element_size())


def _no_grad(write: Callable[[nn.Parameter], Any]) -> Callable[[Bed], None]:
    def change(bed: Bed) -> None:
        with torch.no_grad():
            write(bed.model[0])

    return change


def _inference(bed: Bed) -> None:
    with torch.inference_mode():
        bed.model[0].add_(1)


def _preserved(bed: Bed) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(bed.model[0]):
        bed.model[0].add_(1)


def _swap(bed: Bed) -> None:
    bed.model[0].data = torch.randn(ROWS, DIM)


def _swap_and_free(bed: Bed) -> None:
    for p in bed.model:
        p.data = torch.randn_like(p)
    torch.zeros(1 << 20).fill_(7.0)  # whoever asks for memory now would get theirs


def _averaged(bed: Bed) -> None:
    for p in bed.model:
        p.data.mul_(0.5)


def _resize(bed: Bed) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        bed.model[0].untyped_storage().resize_(0)


WRITES: dict[str, tuple[Callable[[Bed], Any], bool]] = {
    # change -> (how, whether the three witnesses must see it)
    "p.add_ under no_grad": (_no_grad(lambda p: p.add_(1)), True),
    "p.add_ in inference mode": (_inference, True),
    "p.add_, version counter preserved": (_preserved, True),
    "torch._foreach_add_": (_no_grad(lambda p: torch._foreach_add_([p], 1.0)), True),
    "p.data.add_": (lambda bed: bed.model[0].data.add_(1), True),
    "p.data.mul_, every parameter (averaging)": (_averaged, True),
    "p.data.copy_": (lambda bed: bed.model[0].data.copy_(torch.randn(ROWS, DIM)), True),
    "numpy": (lambda bed: bed.model[0].detach().numpy().__iadd__(3), True),
    "dlpack": (lambda bed: torch.from_dlpack(bed.model[0].detach()).add_(1), True),
    "pointer": (lambda bed: _write_by_pointer(bed.model[0]), True),
    "storage.copy_": (
        lambda bed: bed.model[0].untyped_storage().copy_(torch.randn(ROWS, DIM).untyped_storage()), True,
    ),
    "p.data = other": (_swap, True),
    "p.data = other, every parameter, memory used again": (_swap_and_free, True),
    "p.set_(other)": (_no_grad(lambda p: p.set_(torch.randn(ROWS, DIM))), True),
    "storage.resize_(0)": (_resize, False),
    "a few rows under no_grad": (_no_grad(lambda p: p[UNSEEN].add_(7)), True),
    "a few rows of .data": (lambda bed: bed.model[0].data[UNSEEN].add_(7), False),
    "a few rows by numpy": (lambda bed: _row(bed).numpy().__iadd__(1), False),
    "a few rows by pointer": (lambda bed: _write_by_pointer(_row(bed)), False),
}  # fmt: skip


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0], ids=["before", "middle", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_past_the_optimizer(write: str, at: float) -> None:
    how, seen = WRITES[write]
    bed = Bed(next(v for v in variants() if v.name == "AdamW-foreach"))
    bed.settle()
    moment = {0.0: "before", 0.5: "in the middle", 1.0: "after the copy"}[at]
    verdicts = judge(f"{write}, {moment}", bed, lambda: how(bed), at=at)
    assert not verdicts["updates"].caught  # it is no update
    if seen:
        assert verdicts["all three"].caught
    elif write.startswith("a few rows") and at == 0.0:
        assert verdicts["all three"].wrong  # the hole of the three, for which there is the audit
        assert not verdicts["all three"].caught


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_no_change_is_no_reason_to_drop_a_snapshot(at: float) -> None:
    bed = Bed(variants()[0])
    bed.settle()
    verdicts = judge("nothing", bed, lambda: None, at=at)
    assert all(not v.caught and not v.wrong for v in verdicts.values())
