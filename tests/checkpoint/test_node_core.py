"""A node's core against the real coordinator's: events in any order, messages lost, late and repeated, any restart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings

from baftd.checkpoint.facts import Writer
from baftd.checkpoint.slots import SlotState
from baftd.errors import RankError
from tests.checkpoint.node_machine import NodeMachine

TestNode = NodeMachine.TestCase
TestNode.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # with Phase.shrink a failure is shorter, minutes later
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_rank_is_claimed_once() -> None:
    machine = NodeMachine()
    machine.begin_job(3)
    rival = replace(machine.processes[0], writer=Writer(7, 7))
    with pytest.raises(RankError, match="rank 0 of job job is claimed by pid 7 and by pid 100"):
        machine.declare(rival)
    machine.process_dies(0)
    machine.processes.append(rival)
    machine.declare(rival)
    assert rival.grant is not None


def test_a_late_message_does_not_fit_a_slot_that_was_made_anew() -> None:
    """It named slot 0 under a generation that the new file began again with."""
    machine = NodeMachine()
    machine.begin_job(3)
    machine.steps_everywhere(1)
    process = machine.processes[0]
    for slots in ((3, 4, 5), (0, 1, 2)):
        process.slots, process.grant = slots, None
        machine.declare(process)
        machine.steps_everywhere(1)
    machine.restart()
    seal = next(sent for sent in machine.sent if sent[0] == "seal")
    before = machine.journal[:]
    machine.do(seal[0], 0, seal[1], *seal[2], actor=seal[1], **seal[3])
    assert machine.journal == before


def test_slots_of_a_layout_that_is_left_make_room() -> None:
    """All but those in which something is wanted, and those that the next layout has a use for."""
    machine = NodeMachine()
    machine.begin_job(4)
    machine.steps_everywhere(2)
    table, process = machine.core.tables[0], machine.processes[0]
    committed = [slot.index for slot in table.contents()]
    free = [slot.index for slot in table if slot.state is SlotState.FREE]
    assert (len(committed), len(free), process.grant is not None) == (1, 2, True)
    process.grant = None
    machine.do("shed", 0, process.writer, free[:1], actor=process.writer)
    assert sorted(machine.headers) == sorted(committed + free[:1])
    process.slots = (*free[:1], 5)
    machine.declare(process)
    machine.steps_everywhere(1)
    assert sorted(machine.headers) == sorted(process.slots)
