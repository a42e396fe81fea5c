"""The orders of `baftd.pipeline` against those that torch itself makes, operation for operation."""

from __future__ import annotations

from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import PipelineStage

from baftd.errors import UsageError
from baftd.pipeline import links
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import Operation
from baftd.pipeline.schedules import build

_KINDS = {
    "F": EventKind.FORWARD,
    "B": EventKind.BACKWARD,
    "I": EventKind.INPUT_GRAD,
    "W": EventKind.WEIGHT_GRAD,
    "REDUCE_GRAD": EventKind.REDUCE,
}
_ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
_LOOPS = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
_THERE_AND_BACK = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_CASES = [(name, 1) for name in _ONE_STAGE]
_CASES += [(name, chunks) for name in _LOOPS for chunks in (2, 3)]
_CASES += [(name, 2) for name in _THERE_AND_BACK]
_SIZES = [(1, 1), (1, 3), (2, 2), (2, 3), (2, 4), (2, 7), (3, 3), (3, 4), (3, 9), (4, 2), (4, 4), (4, 8), (4, 10)]
_SIZES += [(4, 13), (5, 5), (5, 11), (8, 16)]


def _stages(ranks: int, chunks: int) -> list[mock.Mock]:
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * chunks, None
    return [stage] * chunks


def _flat(actions: list[torch_schedules._Action | None]) -> list[Operation]:
    found = []
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            found += _flat(list(action.sub_actions))
        elif action.computation_type.value in _KINDS:
            micro = -1 if action.microbatch_index is None else action.microbatch_index
            found.append(Operation(_KINDS[action.computation_type.value], action.stage_index, micro))
    return found


def _of_torch(name: str, ranks: int, micro: int, chunks: int) -> dict[int, list[Operation]] | None:
    """What torch carries out; None where it refuses these numbers."""
    kind = getattr(torch_schedules, name)
    stages = _stages(ranks, chunks)
    try:
        made = kind(stages[0] if name in _ONE_STAGE else stages, micro)
    except ValueError:
        return None
    orders = made._get_pipeline_order() if name in _ONE_STAGE else made.pipeline_order_with_comms
    found = {rank: _flat(actions) for rank, actions in orders.items()}
    if name == "Schedule1F1B":  # the table of 2.13 counts the last rank's forwards from 1; what is run, from 0
        found = {rank: _counted_from_zero(order) for rank, order in found.items()}
    return found


def _counted_from_zero(order: list[Operation]) -> list[Operation]:
    least = min(micro for kind, _, micro in order if kind is EventKind.FORWARD)
    return [one._replace(micro=one.micro - least) if one.kind is EventKind.FORWARD else one for one in order]


@pytest.mark.parametrize(("name", "chunks"), _CASES)
def test_orders_are_those_of_torch(name: str, chunks: int) -> None:
    compared = 0
    for ranks, micro in _SIZES:
        theirs = _of_torch(name, ranks, micro, chunks)
        if theirs is None:
            with pytest.raises(UsageError, match="micro-batch"):
                build(name, ranks, micro, chunks)
            continue
        ours = build(name, ranks, micro, chunks)
        assert {rank: list(order) for rank, order in enumerate(ours.order)} == theirs, (ranks, micro)
        assert ours.links.last, "torch's order cannot deadlock"
        compared += 1
    assert compared >= 7


@pytest.mark.parametrize("name", [*_LOOPS, *_THERE_AND_BACK])
def test_stages_lie_on_the_ranks_where_torch_has_them(name: str) -> None:
    made = getattr(torch_schedules, name)(_stages(4, 2), 8)
    ours = build(name, 4, 8, 2)
    assert dict(enumerate(ours.stage_rank)) == made.stage_index_to_group_rank


# ---------------------------------------------------------------- who waits for what


class _Stage:
    """A stage that computes nothing and notes what it is asked for."""

    def __init__(self, rank: int, ranks: int, said: list[str]) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = rank, ranks, rank, ranks
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self._said = said

    def get_fwd_recv_ops(self, micro: int) -> list[str]:
        return [] if self.is_first else [f"receive F{micro}"]

    def get_fwd_send_ops(self, micro: int) -> list[str]:
        return [] if self.is_last else [f"send F{micro}"]

    def get_bwd_recv_ops(self, micro: int) -> list[str]:
        return [] if self.is_last else [f"receive B{micro}"]

    def get_bwd_send_ops(self, micro: int) -> list[str]:
        return [] if self.is_first else [f"send B{micro}"]

    def forward_one_chunk(self, micro: int, *_: object, **__: object) -> None:
        self._said.append(f"run F{micro}")

    def backward_one_chunk(self, micro: int, **_: object) -> None:
        self._said.append(f"run B{micro}")

    def perform_reduce_grad(self, _: int) -> None:
        self._said.append("reduce")


def _ours(name: str, rank: int, ranks: int, micro: int) -> list[str]:
    said = []
    for action in links._Linker(build(name, ranks, micro))._actions(rank):
        if isinstance(action, links._Run):
            if action.needs is not None:
                said.append(f"over receive {_letter(action.needs)}")
            kind, _, number = action.operation
            said.append("reduce" if kind is EventKind.REDUCE else f"run {kind.name[0]}{number}")
        else:
            word = {links._Send: "fire send", links._Ask: "fire receive", links._Over: "over send"}[type(action)]
            said.append(f"{word} {_letter(action.message)}")
    return said


def _letter(message: links._Message) -> str:
    return f"{'B' if message.backward else 'F'}{message.micro}"


@pytest.mark.parametrize("name", _ONE_STAGE)
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 2), (2, 5), (4, 4), (4, 5), (4, 8)])
def test_every_send_receive_and_wait_comes_where_torch_has_it(
    name: str, ranks: int, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fire(operations: list[str], desc: str | None = None) -> list[str]:
        said.extend(f"fire {one}" for one in operations)
        return operations

    monkeypatch.setattr(torch_schedules, "_batch_p2p", fire)
    monkeypatch.setattr(
        torch_schedules, "_sorted_batch_p2p", lambda operations, desc=None: {0: fire(operations)} if operations else {}
    )
    monkeypatch.setattr(torch_schedules, "_wait_batch_p2p", lambda work: said.extend(f"over {one}" for one in work))
    kind = getattr(torch_schedules, name)
    for method in ("_check_inputs", "_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(kind, method, mock.Mock(return_value=([()] * micro, [{}] * micro)))
    for rank in range(ranks):
        said.clear()
        kind(_Stage(rank, ranks, said), micro)._step_microbatches()
        assert said == _ours(name, rank, ranks, micro), rank
