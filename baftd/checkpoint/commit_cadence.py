"""How a job's coordinator makes one cadence of what nodes propose.

The longest interval counts, because a step is complete only when every rank holds it. A change holds from a step on
that no rank has reached when it is heard of: some steps ahead, and, where steps are short, as many as pass in the time
that the message may take. It is published with what holds until then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from baftd.checkpoint.cadence import Cadence, CadenceProposal
from baftd.checkpoint.facts import Record
from baftd.errors import FormatError, UsageError

__all__ = ["CADENCE_MARGIN", "CADENCE_SECONDS", "CadenceAgreement"]

CADENCE_MARGIN = 8
"""Steps between the newest step seen and the first one of a new cadence, so that every rank hears of it in time."""
CADENCE_SECONDS = 2.0
"""The same in seconds: storing the decision and telling it may take that long on a busy disk."""
_MOST_MARGIN = 16384
"""Steps; where they take microseconds nobody waits for two seconds of them."""
_MOST_PENDING = 4
"""Changes that are published and not yet in force; a further one waits until one of them is."""


class CadenceAgreement:
    """The cadence of one job, and who proposed it. Changed by the coordinator's core only."""

    def __init__(self, every: int, *, fixed: bool) -> None:
        """`every`: steps, until something else is agreed. `fixed`: nothing else ever is, whatever nodes propose."""
        self._first = every
        self.fixed = fixed
        self.cadence = Cadence(0, every)
        self._by: CadenceProposal | None = None
        self.waits = False
        """Whether a change waits for others to come into force: `settle` again when ranks have gone on."""
        self._epoch = 0
        self._proposals: dict[str, tuple[str, CadenceProposal]] = {}

    @property
    def by(self) -> CadenceProposal | None:
        """The proposal that decides; None: none has, the cadence is what the coordinator was set to."""
        return None if self.fixed else self._by

    @property
    def proposals(self) -> Mapping[str, CadenceProposal]:
        """What the live nodes propose, by node."""
        return {node: proposal for node, (_, proposal) in self._proposals.items()}

    def begin(self, epoch: int) -> None:
        """A new start of the job: no rank of it has made a step, so what was agreed holds from the first one on.

        What nodes had proposed stood on ranks that are no more."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.cadence = replace(self.cadence, from_step=0, earlier=())
            self._proposals.clear()

    # ------------------------------------------------------------ nodes

    def propose(self, incarnation: str, proposal: CadenceProposal) -> bool:
        """Take a node's word; the one before it is forgotten. Whether `settle` may have something to do."""
        if proposal.every < 1 or proposal.probe < 0 or proposal.probe == 1:
            raise UsageError(
                f"node {proposal.node} proposes a cadence of {proposal.every} steps with a probe in {proposal.probe}: "
                "at least 1 step, and 0 (no probes) or 2 and more, make sense."
            )
        if self.fixed or self._proposals.get(proposal.node) == (incarnation, proposal):
            return False
        self._proposals[proposal.node] = (incarnation, proposal)
        return True

    def leave(self, node: str, incarnation: str) -> bool:
        """The node is gone, or its memory is: what it proposed counts no more. Whether it had proposed anything."""
        if self._proposals.get(node, ("",))[0] != incarnation:
            return False
        del self._proposals[node]
        return True

    # ------------------------------------------------------------ deciding

    def settle(self, passed: int | None, highest: int) -> tuple[tuple[Record, ...], bool]:
        """What follows from the proposals: records to store, and whether the view has changed.

        `passed`: the newest step that a rank of this start is known to have passed; None: none has spoken. `highest`:
        the highest step ever seen, for want of anything better. Without any proposal all stays as it is.
        """
        proposals = [proposal for _, proposal in self._proposals.values()]
        if self.fixed or not proposals:
            return (), False
        longest = max(proposals, key=lambda one: (one.every, one.node))
        probe = 0 if any(one.probe == 0 for one in proposals) else max(one.probe for one in proposals)
        before, self._by = self._by, longest
        records = self.change(longest.every, probe, passed, highest)
        return records, bool(records) or _said(before) != _said(longest)

    def change(self, every: int, probe: int, passed: int | None, highest: int) -> tuple[Record, ...]:
        """Another cadence, from a step on that no rank has reached. Arguments as of `settle`."""
        if every < 1:
            raise UsageError(f"a cadence of {every} steps makes no sense; it must be at least 1.")
        now = self.cadence
        self.waits = False
        if (every, probe) == (now.every, now.probe):
            return ()
        newest, margin = self._newest(passed, highest), self._margin()
        published = (*now.earlier, replace(now, earlier=()))
        if sum(one.from_step > newest for one in published) >= _MOST_PENDING:
            self.waits = True
            return ()
        begins = max(newest + margin, now.from_step)
        # What the slowest rank may still go by, and all that comes after it.
        first = max((n for n, one in enumerate(published) if one.from_step <= (passed or 0) - margin), default=0)
        earlier = [one for one in published[first:] if one.from_step < begins]
        self.cadence = Cadence(begins, every, probe, tuple(earlier[-_MOST_PENDING - 2 :]))
        return (self.record(),)

    def _newest(self, passed: int | None, highest: int) -> int:
        """The newest step that any rank can be at, as far as anyone here knows."""
        said = max((proposal.step for _, proposal in self._proposals.values()), default=0)
        if said:
            return max(said, passed or 0)
        # Nobody says where the ranks are; they speak only of steps that are due.
        return (highest if passed is None else passed) + self.cadence.at(passed or 0).every - 1

    def _margin(self) -> int:
        seconds = min((one.step_seconds for _, one in self._proposals.values() if one.step_seconds > 0), default=0.0)
        ahead = math.ceil(min(CADENCE_SECONDS / seconds, _MOST_MARGIN)) if seconds > 0 else 0
        return max(CADENCE_MARGIN, ahead)

    # ------------------------------------------------------------ records

    def record(self) -> Record:
        """All that must survive."""
        now, by = self.cadence, self.by
        record: Record = {"k": "cadence", "epoch": self._epoch, "from": now.from_step, "every": now.every}
        if now.probe:
            record["probe"] = now.probe
        if now.earlier:
            record["earlier"] = [[one.from_step, one.every, one.probe] for one in now.earlier]
        if by is not None:
            record["by"] = [by.node, by.every, by.rank, by.why]
        return record

    def apply(self, record: Record) -> None:
        """Take a record in; one of an earlier start than the present one says what holds from the first step on.

        Raises `FormatError` for a cadence that makes no sense, and what a record without its fields leads to."""
        earlier = tuple(Cadence(int(a), int(b), int(c)) for a, b, c in record.get("earlier", ()))
        cadence = Cadence(int(record["from"]), int(record["every"]), int(record.get("probe", 0)), earlier)
        if any(one.every < 1 for one in (cadence, *earlier)):
            raise FormatError(f"a cadence record speaks of {record['every']} steps.")
        self.cadence = cadence
        if int(record.get("epoch", self._epoch)) != self._epoch:
            self.cadence = replace(self.cadence, from_step=0, earlier=())
        by = record.get("by")
        self._by = None if by is None else CadenceProposal(str(by[0]), int(by[1]), rank=int(by[2]), why=str(by[3]))


def _said(proposal: CadenceProposal | None) -> tuple[str, int, int, str] | None:
    """What people are told of a proposal."""
    return None if proposal is None else (proposal.node, proposal.every, proposal.rank, proposal.why)
