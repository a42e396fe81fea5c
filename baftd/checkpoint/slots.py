"""The life of one rank's slots on one node.

    FREE ──grant──▶ FILLING ──seal──▶ SEALED ──digest──▶ VERIFIED
      ▲               │ skip, writer dead  │ digest wrong     │ fate says so, and no pin
      └───────────────┴────────────────────┴──────────────────┘

A slot is granted to one writer, once, under a generation. From then on its old content counts for nothing, and only
that writer's seal, skip or death ends the grant: a stale process may go on writing for as long as it lives.

What may happen to a verified slot is its *fate* (`SlotTable.fate`), judged from what the coordinator last said. This
is invariants 1 and 5: nothing is freed because there are newer slots; only because a newer step is committed, or this
one is dead, quarantined or abandoned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol

from baftd.checkpoint.facts import JobView, Record, ShardFacts, Writer, token_from, token_record
from baftd.checkpoint.identity import Token
from baftd.errors import FormatError

__all__ = [
    "DAEMON",
    "Fate",
    "HeaderFacts",
    "Reason",
    "Slot",
    "SlotState",
    "SlotTable",
    "rebuild_table",
    "slot_record",
    "table_records",
]

DAEMON = Writer(0, 0)
"""The writer of a slot that the daemon itself fills (a fetch for a restore)."""


class SlotState(IntEnum):
    """As in the slot's header."""

    FREE = 0
    FILLING = 1
    SEALED = 2
    VERIFIED = 3


@dataclass(frozen=True)
class HeaderFacts:
    """What a slot's header says, read by the shell: state, generation and, unless FREE, content and writer."""

    state: SlotState
    generation: int
    shard: ShardFacts | None = None
    writer: Writer | None = None


class Fate(Enum):
    """What may become of a slot's content."""

    KEEP = "keep"
    """Newest committed, pinned, or of unknown fate: must not be touched."""
    ROTATE = "rotate"
    """Known to nobody else (the coordinator is away) or abandoned: may be overwritten when no slot is free."""
    FREE = "free"
    """Nobody can want it any more."""


class Reason(Enum):
    """Why a slot has the fate it has: the fate, and words for a log line."""

    EMPTY = Fate.FREE, "free"
    GRANTED = Fate.KEEP, "granted"
    DIGESTING = Fate.KEEP, "being digested"
    PERSIST = Fate.KEEP, "pinned (persist)"
    SEND = Fate.KEEP, "pinned (send)"
    RESTORE = Fate.KEEP, "pinned (restore)"
    COMMITTED = Fate.KEEP, "newest committed"
    UNHEARD = Fate.KEEP, "the coordinator has not been heard yet"
    AHEAD = Fate.KEEP, "of an epoch that the coordinator does not know yet"
    WAITING = Fate.KEEP, "waiting for the other ranks"
    UNREPORTED = Fate.ROTATE, "not reported yet"
    LEFT = Fate.ROTATE, "abandoned"
    ABANDONED = Fate.FREE, "abandoned"
    QUARANTINED = Fate.FREE, "quarantined"
    SUPERSEDED = Fate.FREE, "a newer step is committed"
    DEAD = Fate.FREE, "dead: some rank has no snapshot of it"

    def __init__(self, fate: Fate, words: str) -> None:
        self.fate = fate
        self.words = words


class Line(Protocol):
    """The part of `History` that fates are judged by."""

    @property
    def epoch(self) -> int: ...

    def on_line(self, token: Token, step: int) -> bool: ...


@dataclass
class Slot:
    """One slot. Fields below `state` describe the grant (FILLING) or the content (SEALED, VERIFIED)."""

    index: int
    generation: int = 0
    state: SlotState = SlotState.FREE
    writer: Writer | None = None
    token: Token | None = None
    step: int | None = None
    shard: ShardFacts | None = None
    reported: bool = False
    """A memory report has been handed to the network: the coordinator may know of this content."""
    answered: bool = False
    """The coordinator has answered that report."""
    dead: bool = False
    """The coordinator has said that this step is dead or superseded. It stays so, whatever a pin makes of it."""
    persisting: bool = False
    """A durable write reads the slot, or its report is not answered yet."""
    sending: int = 0
    """Transfers to other nodes that read the slot."""
    retired: bool = False
    """Of an older layout: is granted no more, and removed when it is free."""

    def clear(self) -> None:
        """Forget grant and content; the generation stays."""
        self.state, self.writer, self.token, self.step, self.shard = SlotState.FREE, None, None, None, None
        self.reported = self.answered = self.dead = self.persisting = False
        self.sending = 0


@dataclass
class SlotTable:
    """All slots of one rank on one node. Pure bookkeeping: `NodeJob` turns it into instructions."""

    rank: int
    slots: dict[int, Slot] = field(default_factory=dict)
    removed: dict[int, int] = field(default_factory=dict)
    """Generations of slots that are gone: one made anew goes on from there, or a late message would fit it."""
    gone: bool = False
    """The rank is none of the running start's, its slots are removed, and the daemon was told so."""

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    # ------------------------------------------------------------ layout

    def lay(self, indices: Iterable[int]) -> list[Slot]:
        """Use exactly the slots `indices` from now on: new ones are made, others retire. Returns those retired now."""
        wanted = set(indices)
        self.gone = False
        for index in sorted(wanted - set(self.slots)):
            self.slots[index] = Slot(index, self.removed.pop(index, 0))
        retired = []
        for slot in self:
            if slot.index not in wanted and not slot.retired:
                slot.retired = True
                retired.append(slot)
            elif slot.index in wanted:
                slot.retired = False
        return retired

    def remove(self, index: int) -> None:
        """The slot's file goes, or is gone."""
        self.removed[index] = self.slots.pop(index).generation

    # ------------------------------------------------------------ asking

    def filling(self, writer: Writer) -> Slot | None:
        """The slot granted to this writer, if there is one."""
        return next((s for s in self if s.state is SlotState.FILLING and s.writer == writer), None)

    def content(self, token: Token, step: int) -> Slot | None:
        """The verified slot that holds state(step) of `token`."""
        return next((s for s in self.contents() if s.shard and s.shard.token == token and s.shard.step == step), None)

    def contents(self) -> Iterator[Slot]:
        """Verified slots."""
        return (s for s in self if s.state is SlotState.VERIFIED and s.shard is not None)

    def held(self, token: Token) -> tuple[int, ...]:
        """Steps of `token` that this rank holds sealed, verified or not, and that may still be committed.

        A step known to be dead or superseded counts as gone, though a pin may keep it for a while.
        """
        found = [
            slot.shard.step
            for slot in self.slots.values()
            if slot.shard is not None and not slot.dead and slot.state >= SlotState.SEALED and slot.shard.token == token
        ]
        return tuple(sorted(found))

    # ------------------------------------------------------------ what may become of a slot

    def judge(self, shard: ShardFacts, slot: Slot, line: Line, view: JobView) -> Reason:
        """What the coordinator's last word makes of a verified shard, local pins aside."""
        on_line = line.on_line(shard.token, shard.step)
        checkpoint = shard.checkpoint
        if on_line:
            if checkpoint == view.restored:
                return Reason.RESTORE
            if checkpoint == view.committed:
                return Reason.COMMITTED
        if checkpoint in view.quarantined:
            return Reason.QUARANTINED
        if not on_line:
            if shard.token.epoch > line.epoch:
                return Reason.AHEAD
            return Reason.ABANDONED if view.begun else Reason.LEFT
        if view.committed is not None and shard.step < view.committed.step:
            return Reason.SUPERSEDED
        if shard.token == view.token:
            if slot.dead or shard.step in view.dead:
                return Reason.DEAD
            if not slot.reported:
                return Reason.UNREPORTED
        return Reason.WAITING

    def reason(self, slot: Slot, line: Line, view: JobView | None) -> Reason:
        """Why the slot's content must be kept or may go. `view`: the coordinator's last word, None: nothing yet."""
        state, shard = slot.state, slot.shard
        if state is SlotState.FREE:
            return Reason.EMPTY
        if state is SlotState.FILLING:
            return Reason.GRANTED
        if state is SlotState.SEALED or shard is None:
            return Reason.DIGESTING
        if slot.persisting:
            return Reason.PERSIST
        if slot.sending:
            return Reason.SEND
        if view is None:
            return Reason.UNHEARD
        found = self.judge(shard, slot, line, view)
        if found.fate is not Fate.KEEP and shard.step in view.persist and shard.token == view.token:
            return Reason.PERSIST
        return found

    def fate(self, slot: Slot, line: Line, view: JobView | None) -> Fate:
        """What may become of the slot."""
        return self.reason(slot, line, view).fate

    def why(self, slot: Slot, line: Line, view: JobView | None) -> str:
        """The slot in words: content, and the reason why it is kept."""
        reason = self.reason(slot, line, view)
        if reason is Reason.EMPTY:
            return reason.words
        if reason is Reason.GRANTED:
            return f"granted to {slot.writer} for {'its next step' if slot.step is None else f'step {slot.step}'}"
        if slot.shard is None:
            return reason.words
        return f"step {slot.shard.step} of epoch {slot.shard.token.epoch}: {reason.words}"

    def choose(self, line: Line, view: JobView | None, fitting: Collection[int] | None = None) -> Slot | None:
        """The slot to grant next: a free one, else abandoned content, else the oldest unreported step; None: none.

        Retired slots are never chosen; with `fitting` only those slots are.
        """
        usable = [s for s in self if not s.retired and (fitting is None or s.index in fitting)]
        free = [s for s in usable if s.state is SlotState.FREE]
        if free:
            return min(free, key=lambda s: (s.generation, s.index))
        rotating = [s for s in usable if self.fate(s, line, view) is not Fate.KEEP]
        if not rotating:
            return None

        def order(s: Slot) -> tuple[bool, int, int]:
            assert s.shard is not None
            return (line.on_line(s.shard.token, s.shard.step), s.shard.token.epoch, s.shard.step)

        return min(rotating, key=order)

    def describe(self, line: Line, view: JobView | None) -> list[str]:
        """One line a slot, for `baftd status`."""
        return [
            f"slot {slot.index}: {slot.state.name} {self.why(slot, line, view)}"
            for slot in sorted(self, key=lambda s: s.index)
        ]


# ---------------------------------------------------------------- journal


def slot_record(kind: str, rank: int, slot: Slot) -> Record:
    """The journal record of what was just done to a slot: `grant`, `verified` or `free`."""
    record: Record = {"k": kind, "rank": rank, "slot": slot.index, "gen": slot.generation}
    if kind == "grant":
        assert slot.writer is not None
        assert slot.token is not None
        record["writer"] = [slot.writer.pid, slot.writer.start]
        record["token"] = token_record(slot.token)
    elif kind == "verified":
        assert slot.shard is not None
        record["shard"] = slot.shard.to_record()
    return record


def table_records(table: SlotTable) -> list[Record]:
    """The table in as few records as possible, to rewrite a journal. Sealed slots are left to their headers."""
    kinds = {SlotState.FREE: "free", SlotState.FILLING: "grant", SlotState.VERIFIED: "verified"}
    gone = [Slot(index, generation) for index, generation in table.removed.items()]
    return [slot_record(kinds[slot.state], table.rank, slot) for slot in (*gone, *table) if slot.state in kinds]


def rebuild_table(
    table: SlotTable, records: Iterable[Record], headers: Mapping[int, HeaderFacts | None]
) -> list[Record]:
    """Fill an empty table from the journal and from what the headers say happened since. Returns new records.

    The journal has the last word on who may write a slot; a header counts only under the generation that the journal
    granted. A slot the journal does not know, or whose header has a generation that it never granted (records were
    lost), is judged by its header alone, and its content digested again. Raises `FormatError` for a record that cannot
    be one.
    """
    known: set[int] = set()
    for record in records:
        if record.get("k") in ("grant", "verified", "free") and record.get("rank") == table.rank:
            known.add(_replay(table, record))
    for index in [index for index in table.slots if index not in headers]:
        table.remove(index)
    written: list[Record] = []
    for index, header in headers.items():
        slot = table.slots.setdefault(index, Slot(index))
        if index not in known or (header is not None and header.generation > slot.generation):
            slot.clear()
            if header is not None:
                _trust_header(slot, header)
        elif slot.state is SlotState.VERIFIED:
            if header is None or header.generation != slot.generation or not _same(slot, header):
                slot.clear()
        elif slot.state is SlotState.FILLING and header is not None and header.generation == slot.generation:
            if header.state in (SlotState.SEALED, SlotState.VERIFIED) and header.shard is not None:
                slot.state, slot.shard, slot.step = SlotState.SEALED, header.shard, header.shard.step
            elif header.state is SlotState.FILLING and header.shard is not None:
                slot.step = header.shard.step
        if slot.state is SlotState.FILLING and slot.writer == DAEMON:
            slot.clear()
        if slot.state is SlotState.FREE:
            written.append(slot_record("free", table.rank, slot))
    return written


def _replay(table: SlotTable, record: Record) -> int:
    try:
        index, generation = int(record["slot"]), int(record["gen"])
        slot = table.slots.setdefault(index, Slot(index))
        slot.clear()
        slot.generation = generation
        if record["k"] == "grant":
            pid, start = record["writer"]
            slot.state, slot.writer, slot.token = SlotState.FILLING, Writer(pid, start), token_from(record["token"])
        elif record["k"] == "verified":
            slot.shard = ShardFacts.from_record(record["shard"])
            slot.state, slot.step = SlotState.VERIFIED, slot.shard.step
        return index
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a slot record does not have the fields of one: {error!r}") from error


def _trust_header(slot: Slot, header: HeaderFacts) -> None:
    slot.generation = header.generation
    if header.state in (SlotState.SEALED, SlotState.VERIFIED) and header.shard is not None:
        slot.state, slot.shard, slot.step = SlotState.SEALED, header.shard, header.shard.step
    elif header.state is SlotState.FILLING and header.shard is not None and header.writer is not None:
        slot.state, slot.writer, slot.token = SlotState.FILLING, header.writer, header.shard.token
        slot.step = header.shard.step


def _same(slot: Slot, header: HeaderFacts) -> bool:
    shard = slot.shard
    return (
        shard is not None
        and header.shard is not None
        and header.state in (SlotState.SEALED, SlotState.VERIFIED)
        and (header.shard.token, header.shard.rank, header.shard.step) == (shard.token, shard.rank, shard.step)
    )
