"""Dividing replicated ranges among the ranks of a job (`redundancy = "none"`): what they hold is gathered here.

Nobody waits for long in the training loop: a rank that declares before all others have is asked to try again at its
next boundary. When one of them declares another tree all are asked to declare anew: from then on it is as at the start.
So it is after a restart of the daemon: what it knew is gone, and until somebody declares anew nothing of it is needed,
for every image says under which plan it was saved. Steps whose ranks had not all come to the newer plan are dead
(`commit_memory.py`).

The first division takes all ranks for equal. When it is measured how much each can copy in its windows, and what some
rank saves does not fit into them, the job is divided anew if that makes the fullest rank less full by a tenth or more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from baftd.checkpoint.identity import Token
from baftd.checkpoint.recovery import name_ranks
from baftd.checkpoint.shard import TensorEntry, check_entries
from baftd.daemon.clients import Client
from baftd.daemon.context import Context
from baftd.daemon.job import JobOnNode
from baftd.errors import BaftError, TryAgain
from baftd.wire.messages import ErrorReply

if TYPE_CHECKING:
    from baftd.checkpoint.division import Division

__all__ = ["Divisions", "fullest"]

BETTER = 0.9
"""The fullest rank must be this much less full for the ranks to lay out anew."""
MEASURED = 64
"""Steps of a division before it is compared with what the ranks can copy."""
RECONSIDER = 60.0
"""Seconds from one comparison to the next."""
FIRST_WAIT = 1.0
"""Seconds that a rank's first declaration of a tree waits for the other ranks': they pass the same boundary."""


@dataclass
class _Round:
    """Declarations of one start that make one plan together."""

    token: Token
    world: int
    declared: dict[int, tuple[list[TensorEntry], tuple[int, ...]]] = field(default_factory=dict)
    """Rank -> what it holds, and places of entries that must not be cut."""
    work: asyncio.Future[Division | None] = field(default_factory=asyncio.Future)
    """What comes of it, when all have declared."""
    since: int = -1
    """Newest step of the job when it was made."""
    looked_at: float = float("-inf")
    """When it was last compared with what ranks can copy."""
    looking: bool = False

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.declared]


class Divisions:
    """The divisions of all jobs. Belongs to the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rounds: WeakKeyDictionary[JobOnNode, _Round] = WeakKeyDictionary()
        self._newest: WeakKeyDictionary[JobOnNode, tuple[Token, bytes]] = WeakKeyDictionary()
        """The plan under which a rank has declared last."""

    async def agree(
        self, job: JobOnNode, client: Client, token: Token, held: list[TensorEntry], uncut: Sequence[int]
    ) -> Division | None:
        """Which part of `held` each rank saves; None: every rank saves all it holds.

        Raises TryAgain while it is not known what other ranks hold, UsageError for an entry that makes no sense.
        """
        context, world = self._context, client.world
        if context.settings.redundancy != "none" or world == 1 or context.coordinator.several_nodes:
            return None
        await context.workers.urgent(check_entries, held)  # one rank's mistake is no other's
        said = (held, tuple(uncut))
        known = self._rounds.get(job)
        if known is None or known.token != token:
            known = self._rounds[job] = _Round(token, world)
        news = known.declared.get(client.rank) != said
        if news and not known.missing:
            known = self._rounds[job] = _Round(token, world)  # another tree: all declare anew
        known.declared[client.rank] = said
        if news and not known.missing:
            context.tasks.start(self._divide(job, known), f"division of {job.name}")
        if known.missing:
            self._ask(job, token, known.missing)
        if news or not known.missing:
            with contextlib.suppress(asyncio.TimeoutError):
                wait = None if not known.missing else FIRST_WAIT
                await asyncio.wait_for(asyncio.shield(known.work), wait)
        if self._rounds.get(job) is not known:
            raise TryAgain(f"job {job.name}: another rank has declared another tree meanwhile.")
        if not known.work.done():
            missing = known.missing
            are = "has" if len(missing) == 1 else "have"
            raise TryAgain(
                f"job {job.name}: {name_ranks(missing)} {are} not declared their tensors yet, so it is not known what "
                f"rank {client.rank} is to save."
            )
        return known.work.result()

    def tell(self, job: JobOnNode, token: Token, plan: bytes) -> None:
        """A rank saves under `plan` from now on (empty: all it holds). Those that do under another come to it."""
        self._newest[job] = (token, plan)
        others = [rank for rank, record in job.layouts.items() if record.get("plan", b"") != plan]
        self._ask(job, token, others)

    def outdated(self, job: JobOnNode, client: Client) -> bool:
        """Whether a rank that had declared, and comes back, was to declare anew in the meantime."""
        known, newest = self._rounds.get(job), self._newest.get(job)
        if known is not None and known.token == client.token and client.rank in known.missing:
            return True
        plan = job.layouts[client.rank].get("plan", b"")
        return newest is not None and newest[0] == client.token and newest[1] != plan

    def reconsider(self, job: JobOnNode) -> None:
        """Compare the division in force with what the ranks have been measured to copy; cheap, called at every step."""
        known = self._rounds.get(job)
        if known is None or known.looking or not known.work.done() or known.missing or known.token != job.token:
            return
        now, division, newest = self._context.clock(), known.work.result(), job.pacing.newest
        if newest < known.since:
            known.since = newest  # another start counts its steps anew
        if division is None or newest - known.since < MEASURED or now - known.looked_at < RECONSIDER:
            return
        known.looked_at = now
        capacity = job.pacing.capacities(range(known.world))
        if capacity is None or fullest(division.nbytes, capacity) <= 1:
            return  # not measured yet; or all fits
        known.looking = True
        self._context.tasks.start(self._divide_better(job, known, division, capacity), f"division of {job.name}")

    async def _divide_better(
        self, job: JobOnNode, known: _Round, division: Division, capacity: Mapping[int, int]
    ) -> None:
        """Divide by what ranks can copy; where that is better by a tenth, have all of them declare anew."""
        try:
            made = await self._context.workers.urgent(self._work, known, capacity)
        except BaftError as error:
            job.log.warning("not_divided", why=str(error), note="the division stays as it is")
            return
        finally:
            known.looking = False
        before, after = fullest(division.nbytes, capacity), fullest(made.nbytes, capacity)
        if self._rounds.get(job) is not known or made.plan == division.plan or after > BETTER * before:
            return
        known.work = asyncio.get_running_loop().create_future()
        known.work.set_result(made)
        known.since = job.pacing.newest
        job.log.info(
            "divided", plan=made.plan.hex()[:8], bytes=sum(made.nbytes), most=max(made.nbytes),
            why=f"the fullest rank fills {after:.0%} of its windows, {before:.0%} before",
        )  # fmt: skip
        job.counters.add("divided_anew")
        self._ask(job, known.token, range(known.world))

    def _ask(self, job: JobOnNode, token: Token, ranks: Collection[int]) -> None:
        """Have ranks declare anew, as far as they have declared before."""
        for client in job.clients.of_job(job.name):
            if client.rank in ranks and client.token == token and client.alive and job.declared(client.rank):
                text = "what the ranks hold is divided anew."
                self._context.server.send(client.peer, ErrorReply(code="try_again", message=text, field="declare"))

    async def _divide(self, job: JobOnNode, known: _Round) -> None:
        made: Division | None = None
        try:
            made = await self._context.workers.urgent(self._work, known, None)
            job.log.info("divided", plan=made.plan.hex()[:8], bytes=sum(made.nbytes), most=max(made.nbytes))
        except BaftError as error:
            job.log.warning("not_divided", why=str(error), note="every rank saves all it holds")
        finally:
            known.since = job.pacing.newest
            known.work.set_result(made)

    @staticmethod
    def _work(known: _Round, capacity: Mapping[int, int] | None) -> Division:
        from baftd.checkpoint.division import divide_declared  # numpy: not for a daemon that divides nothing

        declared = {rank: entries for rank, (entries, _) in known.declared.items()}
        uncut = {rank: places for rank, (_, places) in known.declared.items()}
        return divide_declared(declared, uncut, capacity)


def fullest(nbytes: Sequence[int], capacity: Mapping[int, int]) -> float:
    """Bytes to save over bytes that can be copied in the windows of a step, of the fullest rank."""
    return max(
        (
            (nbytes[rank] / can if can else math.inf if nbytes[rank] else 0.0)
            for rank, can in capacity.items()
        ),
        default=0.0,
    )
