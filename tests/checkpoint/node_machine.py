"""The state machine of `test_node_core`: one rank of one node, its daemon's shell, its processes, its coordinator.

Rank 0 is here, under test, with its slot files modelled as headers; rank 1 is elsewhere and is played. After every
event it is looked for a slot that was taken from somebody, and the core is made again from its records and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baftd.checkpoint import commit, orders
from baftd.checkpoint.commit import JobCoordinator, Policy
from baftd.checkpoint.facts import (
    Answer,
    EpochFacts,
    Held,
    Inventory,
    Ready,
    Record,
    Report,
    ShardFacts,
    Skipped,
    Source,
    Writer,
    is_lasting,
    next_incarnation,
)
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import Token
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.slots import DAEMON, HeaderFacts, SlotState, table_records
from baftd.errors import NothingRestorable

__all__ = ["NodeMachine"]

NODE, OTHER = next_incarnation(None, 7), next_incarnation(None, 8)
FREE = HeaderFacts(SlotState.FREE, 0)
TREE = b"tree"


def shard(token: Token, step: int, rank: int = 0) -> ShardFacts:
    digest = b"%d.%d.%d" % (token.epoch, step, rank)
    return ShardFacts(token, rank, 2, step, step, TREE, digest, 1)


class Was(NamedTuple):
    """A slot before an event."""

    state: SlotState
    generation: int
    writer: Writer | None
    shard: ShardFacts | None


@dataclass(eq=False)
class Process:
    """A training process, as little of it as the core can see."""

    writer: Writer
    token: Token
    step: int
    slots: tuple[int, ...]
    alive: bool = True
    grant: tuple[int, int] | None = None
    filling: tuple[int, int] | None = None
    used: set[tuple[int, int]] = field(default_factory=set)


class NodeMachine(RuleBasedStateMachine):
    """`truth` is the coordinator; `owed` what rank 0 must have in a slot whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[Record] = []
        self.manifest: list[Record] = []
        self.headers: dict[int, HeaderFacts] = {}
        self.generations: dict[int, int] = {}
        self.core = NodeJob("job", "n0", NODE)
        self.store = next_incarnation(None, 1)
        self.truth = JobCoordinator("job", store=self.store, policy=Policy(durable=True))
        self.to_truth: list[Any] = []
        self.to_node: list[tuple[str, Any]] = []
        self.sent: list[tuple[str, Writer, tuple[Any, ...], dict[str, Any]]] = []
        self.digests: list[orders.Digest] = []
        self.persists: list[orders.StartPersist] = []
        self.fetch: orders.ReceiveSlot | None = None
        self.processes: list[Process] = []
        self.others: list[ShardFacts] = []
        self.saved: list[ShardFacts] = []
        self.owed: tuple[Token, int] | None = None
        self.planning = False
        self.crash_after: int | None = None
        self.count = 3

    @initialize(count=st.integers(3, 4))
    def begin_job(self, count: int) -> None:
        self.count = count
        self.hear(self.truth.join("n1", OTHER, None, 0.0))
        self.open_epoch(None)
        self.do("resend")
        self.all_arrives()
        self.process_starts()

    # ------------------------------------------------------------ the daemon

    def do(self, method: str, *args: Any, actor: Writer | None = None, **kwargs: Any) -> Ready[Any]:
        """One event: what it takes away is looked at, its records are kept, its orders carried out."""
        table = self.core.tables.get(0)
        before = {s.index: Was(s.state, s.generation, s.writer, s.shard) for s in table or ()}
        ready: Ready[Any] = getattr(self.core, method)(*args, **kwargs)
        if method != "damaged":  # what is wrong is dropped, pinned or not
            self.look(before, ready, actor)
        if self.crash_after is not None:
            self.keep(ready.records[: self.crash_after])
            self.restart()
            return Ready()
        self.keep(ready.records)
        for order in ready.announce:
            self.carry_out(order)
        return ready

    def look(self, before: dict[int, Was], ready: Ready[Any], actor: Writer | None) -> None:
        alive = {p.writer for p in self.processes if p.alive}
        if self.fetch is not None:
            alive.add(DAEMON)
        for record in ready.records:
            if record["k"] not in ("grant", "free"):
                continue
            was = before.get(record["slot"])
            if was is not None and was.state is SlotState.FILLING:
                assert was.writer == actor or was.writer not in alive, f"{record} while {was.writer} may write there"
            if was is not None and was.shard is not None and was.state is SlotState.VERIFIED:
                assert (was.shard.token, was.shard.step) != self.owed, f"{record} takes the newest committed step"
                view = self.core.last_view
                if view is not None and self.core.history.on_line(was.shard.token, was.shard.step):
                    assert was.shard.checkpoint not in (view.committed, view.restored), f"{record} takes a pinned step"
                reading = {(order.slot, order.generation) for order in self.persists}
                assert (record["slot"], was.generation) not in reading, f"{record} while a durable write reads it"
            if record["k"] == "grant":
                assert record["gen"] > self.generations.get(record["slot"], -1), "generations only grow"

    def keep(self, records: tuple[Record, ...]) -> None:
        for record in records:
            (self.manifest if is_lasting(record) else self.journal).append(record)
            if record["k"] == "grant":
                self.generations[record["slot"]] = record["gen"]
            elif record["k"] == "verified":
                found = self.headers[record["slot"]]
                self.headers[record["slot"]] = replace(found, state=SlotState.VERIFIED)

    def carry_out(self, order: Any) -> None:
        if isinstance(order, orders.FreeSlot):
            self.headers[order.slot] = HeaderFacts(SlotState.FREE, order.generation)
        elif isinstance(order, orders.RemoveSlot):
            del self.headers[order.slot]
        elif isinstance(order, orders.GrantSlot):
            slot = self.core.tables[0].slots[order.slot]
            assert (slot.state, slot.writer) == (SlotState.FILLING, order.writer)
            assert (slot.generation, order.token) == (order.generation, self.core.token)
            process = next(p for p in self.processes if p.writer == order.writer)
            if (order.slot, order.generation) not in process.used:
                process.grant = (order.slot, order.generation)
        elif isinstance(order, orders.Digest):
            self.digests.append(order)
        elif isinstance(order, orders.StartPersist):
            self.persists.append(order)
        elif isinstance(order, orders.ReceiveSlot):
            self.fetch = order
        elif type(order).__name__.startswith("Send"):  # to the coordinator
            self.to_truth = [*self.to_truth[-11:], order]

    def restart(self) -> None:
        """The daemon dies and comes back beside its slots."""
        self.crash_after = None
        self.digests, self.persists, self.fetch, self.planning = [], [], None, False
        self.core, ready = self.rebuilt()
        self.keep(ready.records)
        for order in ready.announce:
            self.carry_out(order)
        for writer in self.core.writers():
            if not any(p.alive for p in self.processes if p.writer == writer):
                self.tell_death(writer)

    def rebuilt(self, journal: list[Record] | None = None) -> tuple[NodeJob, Ready[Any]]:
        headers = {(0, index): header for index, header in self.headers.items()}
        history = History.replay(self.manifest)
        records = self.journal if journal is None else journal
        return NodeJob.rebuild("job", "n0", NODE, history=history, records=records, headers=headers)

    def tell_death(self, writer: Writer) -> None:
        granted = self.core.granted_to(writer)
        self.do("writer_dead", writer, {key: self.headers[key[1]] for key in granted}, actor=writer)

    @rule(lost=st.none() | st.integers(0, 3), compacted=st.booleans())
    def daemon_dies(self, lost: int | None, compacted: bool) -> None:
        """At once, or (`lost`) after so many records of the next event."""
        if compacted and 0 in self.core.tables:
            self.journal = table_records(self.core.tables[0])
        self.crash_after = lost
        if lost is None:
            self.restart()

    @rule(what=st.sampled_from(["resend", "resend", "away", "not_joined"]))
    def coordinator_is_silent(self, what: str) -> None:
        self.do(what)

    # ------------------------------------------------------------ training

    def current(self) -> Process | None:
        return next((p for p in self.processes if p.alive and p.token == self.truth.token), None)

    def message(self, method: str, process: Process, *args: Any, lost: bool, **kwargs: Any) -> None:
        self.sent = [*self.sent[-11:], (method, process.writer, args, kwargs)]
        if not lost:
            self.do(method, 0, process.writer, *args, actor=process.writer, **kwargs)

    def declare(self, process: Process) -> None:
        for index in process.slots:
            self.headers.setdefault(index, FREE)
        who, laid = process.writer, process.slots
        self.do("declare", 0, who, process.token, world=2, tree_digest=TREE, slots=laid, actor=who)

    def write(self, process: Process, place: tuple[int, int], state: SlotState) -> None:
        """The process writes into the slot, under the header of its next step."""
        index, generation = place
        slot = self.core.tables[0].slots.get(index)
        assert slot is not None
        assert (slot.state, slot.writer, slot.generation) == (SlotState.FILLING, process.writer, generation)
        self.headers[index] = HeaderFacts(state, generation, shard(process.token, process.step), process.writer)

    @precondition(lambda self: self.current() is None)
    @rule()
    def process_starts(self) -> None:
        head = self.truth.history.head
        if head is None or self.current() is not None:
            return
        writer = Writer(100 + len(self.processes), 1)
        step = head.parent.step if head.parent is not None else 0
        process = Process(writer, head.token, step, tuple(range(self.count)))
        self.processes.append(process)
        self.declare(process)
        self.do("restored", 0, head.token)

    @precondition(lambda self: self.current() is not None)
    @rule(anew=st.booleans(), short=st.booleans(), data=st.data())
    def process_declares(self, anew: bool, short: bool, data: st.DataObject) -> None:
        """For another layout, too, for which there may be no room (`short`)."""
        alive = [p for p in self.processes if p.alive]
        if alive:
            process = data.draw(st.sampled_from(alive))
            if anew:
                first = 0 if process.slots[0] else self.count
                process.slots = tuple(range(first, first + self.count))
                process.grant = process.filling = None
                if short and process.token == self.core.token:
                    keep = [slot for slot in process.slots if slot in self.headers]
                    self.do("shed", 0, process.writer, keep, actor=process.writer)
            self.declare(process)

    @precondition(lambda self: self.pick(0, lambda p: p.grant is not None and p.filling is None) is not None)
    @rule(back=st.integers(0, 2), message_lost=st.booleans())
    def process_begins(self, back: int, message_lost: bool) -> None:
        process = self.pick(back, lambda p: p.grant is not None and p.filling is None)
        if process is not None and process.grant is not None:
            process.step += 1
            process.filling, process.grant = process.grant, None
            process.used.add(process.filling)
            self.write(process, process.filling, SlotState.FILLING)
            self.message("begin", process, process.token, process.step, *process.filling, lost=message_lost)

    @precondition(lambda self: self.pick(0, lambda p: p.filling is not None) is not None)
    @rule(back=st.integers(0, 2), digested=st.booleans(), message_lost=st.booleans())
    def process_seals(self, back: int, digested: bool, message_lost: bool) -> None:
        process = self.pick(back, lambda p: p.filling is not None)
        if process is not None and process.filling is not None:
            place, process.filling = process.filling, None
            self.write(process, place, SlotState.SEALED)
            found = shard(process.token, process.step)
            self.message("seal", process, found, *place, digested=digested, lost=message_lost)

    @precondition(lambda self: self.pick(0, lambda p: p.grant is not None or p.filling is not None) is not None)
    @rule(back=st.integers(0, 2), message_lost=st.booleans())
    def process_skips(self, back: int, message_lost: bool) -> None:
        process = self.pick(back, lambda _: True)
        if process is not None:
            place, process.filling = process.filling, None
            process.step += place is None
            self.message("skip", process, process.token, process.step, "why", *(place or (None, 0)), lost=message_lost)

    @precondition(lambda self: bool(self.sent))
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """Something that a process said before, or that was lost, arrives (again)."""
        if self.sent:
            method, writer, args, kwargs = data.draw(st.sampled_from(self.sent))
            self.do(method, 0, writer, *args, actor=writer, **kwargs)

    @precondition(lambda self: self.pick(0, lambda _: True) is not None)
    @rule(back=st.integers(0, 2))
    def process_dies(self, back: int) -> None:
        process = self.pick(back, lambda _: True)
        if process is not None:
            process.alive = False
            self.tell_death(process.writer)

    @rule(count=st.integers(1, 3))
    def steps_everywhere(self, count: int) -> None:
        """What happens most: steps are sealed by both ranks, and all messages arrive."""
        self.all_arrives()
        process = self.current()
        if process is None:
            self.process_starts()
        elif process.grant is None:
            self.declare(process)
        for _ in range(count):
            self.process_begins(0, False)
            self.process_seals(0, True, False)
            self.other_rank(True)
            self.all_arrives()

    def pick(self, back: int, fit: Callable[[Process], bool]) -> Process | None:
        alive = [p for p in reversed(self.processes) if p.alive and fit(p)]
        return alive[min(back, len(alive) - 1)] if alive else None

    # ------------------------------------------------------------ work of the daemon

    @precondition(lambda self: bool(self.digests))
    @rule(good=st.booleans())
    def digested(self, good: bool) -> None:
        if self.digests:
            order = self.digests.pop(0)
            if good:
                self.do("digested", 0, order.slot, order.generation, order.shard)
            else:
                self.do("digest_failed", 0, order.slot, order.generation, "bits")

    @precondition(lambda self: bool(self.persists))
    @rule(good=st.booleans())
    def durable_write_ends(self, good: bool) -> None:
        if self.persists:
            order = self.persists.pop(0)
            slot = self.core.tables[0].slots[order.slot]
            assert (slot.generation, slot.shard) == (order.generation, order.shard)
            if good:
                self.do("persisted", 0, order.shard.checkpoint, {"at": "durable"})
            else:
                self.do("persist_failed", 0, order.shard.checkpoint, "disk full")

    @precondition(lambda self: self.may_fetch())
    @rule()
    def fetch_begins(self) -> None:
        for index in range(self.count):
            self.headers.setdefault(index, FREE)
        self.do("lay_slots", 0, range(self.count))
        if self.may_fetch():
            self.do("receive", 0)

    def may_fetch(self) -> bool:
        """Between the opening of an epoch and its first process, which waits for what is fetched."""
        view = self.core.last_view
        if view is None or view.restored is None or self.fetch is not None or self.current() is not None:
            return False
        return self.core.holding(0, view.restored) is None

    @precondition(lambda self: self.fetch is not None)
    @rule(good=st.booleans())
    def fetch_ends(self, good: bool) -> None:
        head = self.truth.history.head
        if self.fetch is None or head is None:
            return
        order, parent = self.fetch, head.parent
        origin = self.truth.history.find(parent.epoch) if parent is not None else None
        if good and parent is not None and origin is not None:
            found = shard(origin.token, parent.step)
            self.headers[order.slot] = HeaderFacts(SlotState.SEALED, order.generation, found, DAEMON)
            self.do("received", 0, order.slot, order.generation, found, actor=DAEMON)
        else:
            self.do("receive_failed", 0, order.slot, order.generation, actor=DAEMON)
        self.fetch = None

    @precondition(lambda self: self.owed is not None)
    @rule(data=st.data())
    def bits_flip(self, data: st.DataObject) -> None:
        held = list(self.core.inventory().shards)
        if held and self.truth.token is not None:
            found = data.draw(st.sampled_from(held)).shard
            if (found.token, found.step) == self.owed or self.truth.committed == found.checkpoint:
                return
            self.hear(
                self.truth.source_failed(self.truth.token, BadSource(found.checkpoint, 0, "memory", "n0", "bits"))
            )
            if self.core.history.on_line(found.token, found.step) and found.step < (self.owed or (0, 0))[1]:
                self.do("damaged", 0, found.checkpoint, "bits")

    # ------------------------------------------------------------ the coordinator

    def hear(self, ready: Ready[Any]) -> None:
        """What the coordinator announces."""
        for order in ready.announce:
            if isinstance(order, Answer) and order.node == "n0":
                self.say("take_answer", order)
            elif isinstance(order, commit.Publish):
                self.say("take_view", order.view)
            elif isinstance(order, commit.Joined) and order.node == "n0":
                self.say("joined", order.view)
            elif isinstance(order, commit.NotJoined):
                self.say("not_joined", None)
            elif isinstance(order, commit.WriteManifest):
                self.hear(self.truth.manifest_written(order.checkpoint, 0.0))
            elif isinstance(order, commit.Committed) and order.tier == "memory":
                facts = self.truth.history.find(order.checkpoint.epoch)
                assert facts is not None
                place = (facts.token, order.checkpoint.step)
                assert self.holds(*place), f"{order.checkpoint} is committed, and its slot is gone"
                self.saved += [shard(*place, 0), shard(*place, 1)]
                if self.owed is None or self.owed[0] != place[0] or place[1] > self.owed[1]:
                    self.owed = place

    def say(self, method: str, value: Any) -> None:
        self.to_node = [*self.to_node[-11:], (method, value)]

    def holds(self, token: Token, step: int) -> bool:
        return 0 in self.core.tables and self.core.tables[0].content(token, step) is not None

    def tell_truth(self, order: Any) -> None:
        if isinstance(order, orders.SendReport):
            self.hear(self.truth.report(order.report, 0.0))
        elif isinstance(order, orders.SendSkip):
            self.hear(self.truth.skip(order.skipped, 0.0))
        elif isinstance(order, orders.SendRestored):
            self.hear(self.truth.restored(order.restored, 0.0))
        elif isinstance(order, orders.SendJoin):
            self.hear(self.truth.join("n0", NODE, order.inventory, 0.0))
        else:
            self.hear(self.truth.durable_failed(order.token, order.step, order.rank, order.reason, 0.0))

    def tell_node(self, method: str, value: Any) -> None:
        self.do(method, *(() if value is None else (value,)))

    @precondition(lambda self: bool(self.to_truth))
    @rule(back=st.integers(0, 11))
    def coordinator_hears(self, back: int) -> None:
        if self.to_truth:
            self.tell_truth(self.to_truth[max(-1 - back, -len(self.to_truth))])

    @precondition(lambda self: bool(self.to_node))
    @rule(back=st.integers(0, 11))
    def node_hears(self, back: int) -> None:
        if self.to_node:
            self.tell_node(*self.to_node[max(-1 - back, -len(self.to_node))])

    @rule()
    def all_arrives(self) -> None:
        """Everything said so far, in order, and the answers."""
        for _ in range(3):
            said, self.to_truth = self.to_truth, []
            for order in said:
                self.tell_truth(order)
            heard, self.to_node = self.to_node, []
            for method, value in heard:
                self.tell_node(method, value)

    @precondition(lambda self: self.current() is not None)
    @rule(sealed=st.booleans())
    def other_rank(self, sealed: bool) -> None:
        """Rank 1 comes to where rank 0 is, and says again what it holds."""
        process = self.current()
        if process is None:
            return
        mine = [s.step for s in self.others if s.token == process.token]
        committed = self.truth.committed
        if sealed and process.step > max(mine, default=0):
            self.others.append(shard(process.token, process.step, 1))
        held = [s for s in self.others if s.token == process.token]
        held = [s for s in held if committed is None or committed.epoch < s.token.epoch or s.step >= committed.step]
        steps = tuple(s.step for s in held)
        passed = max([process.step, *steps])
        if not sealed:
            skipped = Skipped(self.store, "n1", OTHER, process.token, 1, process.step, "why", passed, steps)
            if process.step not in steps:
                self.hear(self.truth.skip(skipped, 0.0))
        for found in held:
            self.hear(self.truth.report(Report(self.store, "n1", OTHER, found, "memory", passed, steps), 0.0))

    @precondition(lambda self: self.truth.committed is not None and not self.truth.view.persist)
    @rule()
    def durable_is_wanted(self) -> None:
        if self.truth.token is not None:
            self.hear(self.truth.want_durable(self.truth.token, 0, 0.0))

    @precondition(lambda self: bool(self.truth.view.persist))
    @rule()
    def other_part_is_durable(self) -> None:
        for found in self.others:
            if found.token == self.truth.token and found.step in self.truth.view.persist:
                report = Report(self.store, "n1", OTHER, found, "durable", found.step, (found.step,), {"at": "durable"})
                self.hear(self.truth.report(report, 0.0))

    @rule(wiped=st.booleans())
    def coordinator_restarts(self, wiped: bool) -> None:
        epochs = self.truth.history.epochs()
        self.store = next_incarnation(self.store, 0)
        records = () if wiped else self.truth.to_records()
        self.truth = JobCoordinator.replay("job", records, store=self.store, policy=Policy(durable=True))
        self.hear(self.truth.join("n1", OTHER, self.inventory_of_other(epochs), 0.0))

    def inventory_of_other(self, epochs: tuple[EpochFacts, ...] = ()) -> Inventory:
        held = tuple(Held(found, Source("memory", "n1", {})) for found in self.others)
        return Inventory("n1", OTHER, held, epochs)

    @precondition(lambda self: not self.planning and bool(self.saved))
    @rule()
    def restore_is_planned(self) -> None:
        """Until the epoch is open, nothing that lies here may go."""
        self.core.hold()
        self.planning = True

    @precondition(lambda self: self.planning)
    @rule(at_most=st.none() | st.integers(0, 6), walk_back=st.booleans())
    def restore_is_decided(self, at_most: int | None, walk_back: bool) -> None:
        self.crash_after = None
        self.open_epoch(at_most)
        head = self.truth.history.head
        if walk_back and head is not None and head.parent is not None:
            self.hear(self.truth.quarantine(head.parent, "bits"))
            plan = self.plan(head.parent.step - 1)
            if plan is not None and plan.checkpoint is not None:
                self.hear(self.truth.reparent(head.token, plan))
                self.owed_is_parent()
            else:
                self.owed = None
        self.do("take_view", self.truth.view)
        self.planning = False
        self.do("release")

    def plan(self, at_most: int | None) -> Any:
        saved = Inventory("", "", tuple(Held(found, Source("durable", "", {})) for found in self.saved))
        try:
            return self.truth.plan([self.core.inventory(), self.inventory_of_other(), saved], at_most=at_most)
        except NothingRestorable:
            return None

    def open_epoch(self, at_most: int | None) -> None:
        number = self.truth.history.epoch
        plan = self.plan(at_most) or self.truth.plan([], fresh=True)
        self.hear(self.truth.open_epoch(f"{number + 1:032x}", plan, world=2, expected=number, now=0.0))
        self.owed_is_parent()

    def owed_is_parent(self) -> None:
        head = self.truth.history.head
        assert head is not None
        facts = self.truth.history.find(head.parent.epoch) if head.parent is not None else None
        place = (facts.token, head.parent.step) if facts is not None and head.parent is not None else None
        self.owed = place if place is not None and self.holds(*place) else None

    # ------------------------------------------------------------ what holds at any time

    @invariant()
    def what_is_owed_is_there(self) -> None:
        assert self.owed is None or self.holds(*self.owed), f"step {self.owed} is lost"

    @invariant()
    def records_suffice(self) -> None:
        """A core made from the records, as they are or compacted, is this one."""
        table = self.core.tables.get(0)
        if table is None:
            return
        for journal in (self.journal, table_records(table)):
            made, _ = self.rebuilt(journal)
            assert made.history.line == self.core.history.line
            assert made.history.quarantined == self.core.history.quarantined
            assert made.history.highest_step >= self.core.history.highest_step
            for slot in table:
                again, header = made.tables[0].slots[slot.index], self.headers[slot.index]
                sealed = header.generation == slot.generation and header.state >= SlotState.SEALED
                assert again.generation == slot.generation
                if slot.state is SlotState.FILLING and not sealed:
                    fetched = slot.writer == DAEMON
                    assert again.state is (SlotState.FREE if fetched else SlotState.FILLING)
                    assert fetched or (again.writer, again.token) == (slot.writer, slot.token)
                elif slot.state is SlotState.FILLING:
                    assert (again.state, again.shard) == (SlotState.SEALED, header.shard)
                else:
                    assert (again.state, again.shard) == (slot.state, slot.shard)
