"""Steps that ranks say they are at, bounded before they count: a wrong number must not move a job away from its ranks.

The rule is that of timings (`pacing.JUMP`): a step far ahead of all that is known is refused, and one that a later
message confirms is believed, so that a job which begins where this daemon does not know of is refused one message.
"""

from __future__ import annotations

from baftd.daemon.clients import Client
from baftd.daemon.job import JobOnNode
from baftd.daemon.pacing import JUMP, MOST_STEPS_AHEAD
from baftd.errors import FormatError

__all__ = ["check_step", "is_near"]


def _known(job: JobOnNode, client: Client) -> int:
    """The newest step that the rank or its job can be at, as far as is known here."""
    return max(client.step, job.pacing.newest, job.core.history.highest_step)


def is_near(job: JobOnNode, client: Client, step: int) -> bool:
    """Whether a step needs nothing to be believed."""
    return step <= _known(job, client) + JUMP


def check_step(job: JobOnNode, client: Client, step: int, what: str) -> None:
    """Raise FormatError for a step that is far ahead of the job, unless the rank's message before was as far.

    Counted; the first of a process is logged as a warning."""
    known, before, client.jumped = _known(job, client), client.jumped, -1
    if step <= known + JUMP:
        return
    near_it = step <= known + MOST_STEPS_AHEAD
    if near_it and 0 <= before < step <= before + JUMP:
        return
    client.jumped = step
    job.counters.add("steps_refused")
    then = "it counts once a later step confirms it" if near_it else "it does not count"
    problem = f"rank {client.rank} speaks of step {step} ({what}), but job {job.name} was at step {known} last: {then}."
    say = job.log.debug if client.lied else job.log.warning
    say("step_refused", rank=client.rank, why=problem)
    client.lied = True
    raise FormatError(problem)
