"""Shells around the production cores, as thin as the daemon's: they persist, then carry out, and may die in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baftd.checkpoint import commit, orders
from baftd.checkpoint.commit import CoordinatorInstruction, JobCoordinator, Policy
from baftd.checkpoint.facts import (
    Answer,
    CadenceProposal,
    EpochFacts,
    Inventory,
    JobView,
    Ready,
    Record,
    ShardFacts,
    Source,
    Writer,
    is_lasting,
    next_incarnation,
)
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.orders import NodeInstruction
from baftd.checkpoint.slots import HeaderFacts, SlotState
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import Scheduler
from tests.simulation.world import Bytes, DurableDirectory, Machine, digest, shorten

if TYPE_CHECKING:
    from tests.simulation.training import Process

__all__ = ["Cluster", "Rules", "SimCoordinator", "SimNode", "Weather"]


@dataclass(frozen=True)
class Rules:
    """The classes under test. A test of the test puts a broken one in."""

    node: type[NodeJob] = NodeJob
    coordinator: type[JobCoordinator] = JobCoordinator
    history: type[History] = History
    keep_records: Callable[[Record], bool] = lambda _: True


@dataclass
class Weather:
    """What may go wrong in a run, and how often. Each seed draws its own, so that some go wrong in one way only."""

    torn_shells: float = 0.0
    """A daemon or coordinator dies between two records of its journal."""
    corrupt: float = 0.0
    """A rank's replica of the state differs (silent corruption)."""
    torn_snapshots: float = 0.0
    slow_writers: float = 0.0
    stale: float = 0.0
    """A process outlives its run."""
    new_layouts: float = 0.0
    full_disk: float = 0.0
    rollbacks: float = 0.0
    reshards: float = 0.0
    """A start has another number of ranks, or another layout, than the one before."""
    divisions: float = 0.0
    """At a step, what ranks hold is divided anew; each comes to the newer plan when it hears of it. 0: no division."""
    faults: tuple[int, ...] = ()
    """Weights of the kinds of faults in `run._Faults`."""

    @classmethod
    def draw(cls, rng: random.Random, kinds: int) -> Weather:
        """The weather of a seed."""
        return cls(
            torn_shells=rng.choice([0.0, 0.0, 0.004]),
            corrupt=rng.choice([0.0, 0.0, 0.02, 0.2]),
            torn_snapshots=rng.choice([0.0, 0.03, 0.15]),
            slow_writers=rng.choice([0.0, 0.05, 0.2]),
            stale=rng.choice([0.0, 0.3, 0.9]),
            new_layouts=rng.choice([0.0, 0.0, 0.03]),
            full_disk=rng.choice([0.0, 0.05, 0.3]),
            rollbacks=rng.choice([0.0, 0.0, 0.1, 0.4]),
            reshards=rng.choice([0.0, 0.0, 0.3, 0.8]),
            faults=(*(rng.choice([0, 1, 1, 4]) for _ in range(kinds - 1)), 1),
        )

    @classmethod
    def fair(cls) -> Weather:
        """Nothing goes wrong."""
        return cls()


@dataclass
class Cluster:
    """Everything one run shares."""

    sched: Scheduler
    rules: Rules
    oracle: Oracle
    machines: dict[str, Machine]
    durable: DurableDirectory
    policy: Policy
    slots: int
    nodes: dict[str, SimNode] = field(default_factory=dict)
    processes: dict[Writer, Process] = field(default_factory=dict)
    coordinator: SimCoordinator = field(init=False)
    origins: dict[Token, Token | None] = field(default_factory=dict)
    weather: Weather = field(default_factory=Weather)
    plans: random.Random = field(default_factory=random.Random)
    """Draws when what ranks hold is divided anew."""


class SimCoordinator:
    """The coordinator's shell: a journal, and messages."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.journal: list[Record] = []
        self.store = next_incarnation(None, 0)
        self.core: JobCoordinator | None = None
        self.down_until = 0.0
        self.start()

    def start(self) -> None:
        """Come up with what the journal says, as a new store."""
        cluster = self.cluster
        self.core = cluster.rules.coordinator.replay(
            "job", self.journal, store=self.store, policy=cluster.policy, now=cluster.sched.now
        )
        if cluster.rules.history is not History:
            self.core.history = cluster.rules.history.replay(self.journal)
        for name in cluster.nodes:
            cluster.sched.send(cluster.nodes[name].on_view, self.core.view)

    def crash(self, wiped: bool, away: float) -> None:
        """Lose all that is not in the journal, or that as well."""
        if self.cluster.sched.tracing:
            self.cluster.sched.trace("coordinator", "WIPED" if wiped else "CRASH")
        if wiped:
            self.journal.clear()
        self.store = next_incarnation(self.store, self.cluster.sched.rng.getrandbits(64))
        self.core = None
        for node in self.cluster.nodes.values():
            if node.core is not None and self.cluster.sched.chance(0.8):
                node.execute(node.core.away())
        self.cluster.sched.at(away, self._restart, self.store)

    def _restart(self, store: str) -> None:
        if store == self.store and self.core is None:
            self.start()

    def call(self, method: str, *args: Any) -> None:
        """A message has arrived."""
        core = self.core
        if core is None:
            return
        if method == "propose" and args[0] != core.token:
            return  # it would raise `Fenced`
        if method in ("join", "report", "skip", "restored", "manifest_written", "durable_failed", "tick"):
            args = (*args, self.cluster.sched.now)
        self.execute(getattr(core, method)(*args))

    def execute(self, ready: Ready[CoordinatorInstruction]) -> None:
        """Persist, then act; a crash may come after any record."""
        cluster, core = self.cluster, self.core
        sched = cluster.sched
        assert core is not None
        for record in ready.records:
            if cluster.weather.torn_shells and sched.chance(cluster.weather.torn_shells):
                self.crash(wiped=False, away=sched.rng.uniform(0.1, 1.0))
                return
            self.journal.append(record)
            if record["k"] == "epoch":
                facts = EpochFacts.from_record(record)
                if facts.token in cluster.origins:
                    cluster.oracle.opened(facts, cluster.origins[facts.token])
            elif record["k"] == "durable":
                cluster.oracle.became_durable(core.token, CheckpointId(*record["checkpoint"]))
        for order in ready.announce:
            if sched.tracing and not isinstance(order, Answer | commit.Publish | commit.Joined):
                sched.trace("coordinator", _show(order))
            if isinstance(order, Answer):
                sched.send(cluster.nodes[order.node].on_answer, order)
            elif isinstance(order, commit.Publish):
                for node in cluster.nodes.values():
                    sched.send(node.on_view, order.view)
            elif isinstance(order, commit.Joined):
                if order.accepted:
                    sched.send(cluster.nodes[order.node].on_joined, order.incarnation, order.view)
            elif isinstance(order, commit.NotJoined):
                sched.send(cluster.nodes[order.node].on_not_joined, order.incarnation)
            elif isinstance(order, commit.Committed):
                if order.tier == "memory":
                    cluster.oracle.committed(
                        core.token, order.checkpoint, core.places, core.nodes, core.history.quarantined
                    )
            elif isinstance(order, commit.WriteManifest):
                sched.send(cluster.nodes[order.node].on_manifest, order, core.history.line)
            elif isinstance(order, commit.Retain):
                history = core.history
                cluster.durable.retain(2, order.pinned, history.epoch, history.is_abandoned, None)
            elif isinstance(order, commit.Finished) and order.tier == "durable":
                cluster.oracle.finished()


class SimNode:
    """The daemon of one machine: a core, and what it does to slots, disk and processes."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self.cluster = cluster
        self.machine = machine
        self.core: NodeJob | None = None
        self.life = 0
        self.fetching: dict[int, tuple[int, int]] = {}
        self.proposal: tuple[Token, CadenceProposal] | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.machine.name

    # ------------------------------------------------------------ life

    def boot(self) -> None:
        """Switch the machine on: its memory is new."""
        machine, sched = self.machine, self.cluster.sched
        machine.up = True
        machine.incarnation = next_incarnation(machine.incarnation or None, sched.rng.getrandbits(64))
        machine.slots.clear()
        machine.journal.clear()
        self.start_daemon()

    def power_off(self) -> None:
        """The machine dies with all its processes; the disk stays."""
        machine, cluster = self.machine, self.cluster
        if cluster.sched.tracing:
            cluster.sched.trace(self.name, "NODE CRASH")
        machine.up = False
        self.core = None
        self.proposal = None
        self.life += 1
        machine.slots.clear()
        machine.journal.clear()
        for key in [key for key in cluster.oracle.grants if key[0] == self.name]:
            del cluster.oracle.grants[key]
        for key in [key for key in cluster.oracle.reading if key[0] == self.name]:
            del cluster.oracle.reading[key]
        for process in list(cluster.processes.values()):
            if process.node is self:
                process.vanish()

    def kill_daemon(self) -> None:
        """Only the daemon dies; slots and processes stay."""
        if self.cluster.sched.tracing:
            self.cluster.sched.trace(self.name, "DAEMON CRASH")
        self.core = None
        self.proposal = None
        self.life += 1
        for key in [key for key in self.cluster.oracle.reading if key[0] == self.name]:
            del self.cluster.oracle.reading[key]

    def start_daemon(self) -> None:
        """Start the daemon beside what is in memory and on disk."""
        machine, cluster = self.machine, self.cluster
        if not machine.up or self.core is not None:
            return
        self.life += 1
        self.fetching.clear()
        history = cluster.rules.history.replay(machine.manifest)
        headers: dict[tuple[int, int], HeaderFacts | None] = {key: held.header for key, held in machine.slots.items()}
        core, ready = cluster.rules.node.rebuild(
            "job", self.name, machine.incarnation, history=history, records=machine.journal, headers=headers
        )
        self.core = core
        if cluster.sched.tracing:
            cluster.sched.trace(self.name, f"daemon starts, slots: {self._slots()}")
        self.execute(ready)
        if self.core is None:
            return
        for writer in self.core.writers():
            process = cluster.processes.get(writer)
            if process is None or not process.alive:
                self.on_death(writer)
            if self.core is None:
                return
        self._timer(self.life)
        for process in cluster.processes.values():
            if process.node is self and process.alive:
                cluster.sched.at(0.05, process.reconnect)

    def _slots(self) -> str:
        return ", ".join(
            f"{rank}/{slot} {held.header.state.name}@{held.header.generation}"
            for (rank, slot), held in sorted(self.machine.slots.items())
        )

    def _timer(self, life: int) -> None:
        if self.core is None or life != self.life:
            return
        self.execute(self.core.resend())
        self.tell("poll", self.name, self.machine.incarnation)
        self._say_proposal()
        self.cluster.sched.at(0.7, self._timer, life)

    def propose(self, every: int, probe: int) -> None:
        """The planning loop of this node finds that its ranks need this cadence."""
        core = self.core
        if core is None or core.token is None:
            return
        newest = max((step for (token, _), step in core._passed.items() if token == core.token), default=0)
        self.proposal = core.token, CadenceProposal(self.name, every, probe, step=newest, why=f"{every} steps")
        self._say_proposal()

    def _say_proposal(self) -> None:
        if self.proposal is not None and self.core is not None and self.core.token == self.proposal[0]:
            self.tell("propose", self.proposal[0], self.machine.incarnation, self.proposal[1])

    def tell(self, method: str, *args: Any) -> None:
        """Send a message to the coordinator."""
        self.cluster.sched.send(self.cluster.coordinator.call, method, *args)

    # ------------------------------------------------------------ messages in

    def on_view(self, view: JobView) -> None:
        """A view was published."""
        if self.core is not None:
            self.execute(self.core.take_view(view))

    def on_answer(self, answer: Answer) -> None:
        """The answer to something this node said."""
        if self.core is not None:
            if self.cluster.sched.tracing:
                what = f"{answer.tier or 'skip'} rank {answer.rank} step {answer.step}"
                self.cluster.sched.trace(self.name, f"answer to {what}: {answer.verdict.value} {answer.detail}")
            self.execute(self.core.take_answer(answer))

    def on_joined(self, incarnation: str, view: JobView) -> None:
        """The coordinator has taken this node in."""
        if self.core is not None and incarnation == self.machine.incarnation:
            self.execute(self.core.joined(view))

    def on_not_joined(self, incarnation: str) -> None:
        """The coordinator does not know this node."""
        if self.core is not None and incarnation == self.machine.incarnation:
            self.execute(self.core.not_joined())

    def on_death(self, writer: Writer) -> None:
        """The kernel says that a process is gone."""
        if self.core is not None:
            headers = {key: self._header(key) for key in self.core.granted_to(writer)}
            self.execute(self.core.writer_dead(writer, headers))

    def on_manifest(self, order: commit.WriteManifest, line: tuple[EpochFacts, ...]) -> None:
        """This node writes a checkpoint's manifest."""
        if self.core is None:
            return
        if self.cluster.durable.commit(order.checkpoint, order.token, order.world, line):
            self.tell("manifest_written", order.checkpoint)

    def client(self, method: str, *args: Any, **kwargs: Any) -> None:
        """A message of a training process."""
        if method == "declare":
            self.declare(*args)
        elif self.core is not None:
            self.execute(getattr(self.core, method)(*args, **kwargs))

    def declare(self, process: Process, indices: range) -> None:
        """What the daemon does on a Declare: make the slot files, then tell the core."""
        if self.core is None:
            return
        for slot in indices if process.token == self.core.token else ():
            self.machine.slots.setdefault((process.rank, slot), Bytes())
        self.execute(
            self.core.declare(
                process.rank,
                process.writer,
                process.token,
                world=process.run.world,
                tree_digest=process.tree,
                slots=list(indices),
            )
        )

    def _header(self, key: tuple[int, int]) -> HeaderFacts | None:
        held = self.machine.slots.get(key)
        return held.header if held is not None else None

    # ------------------------------------------------------------ orders

    def execute(self, ready: Ready[NodeInstruction]) -> None:
        """Persist, then act; the daemon may die after any record."""
        cluster, machine = self.cluster, self.machine
        sched, oracle = cluster.sched, cluster.oracle
        for record in ready.records:
            if cluster.weather.torn_shells and sched.chance(cluster.weather.torn_shells):
                self.kill_daemon()
                sched.at(sched.rng.uniform(0.05, 1.0), self.start_daemon)
                return
            if not cluster.rules.keep_records(record):
                pass
            elif is_lasting(record):
                machine.manifest.append(record)
            else:
                machine.journal.append(record)
            kind = record["k"]
            if kind == "grant":
                writer = Writer(*record["writer"])
                oracle.granted(self.name, record["rank"], record["slot"], record["gen"], writer)
            elif kind == "free":
                oracle.freed(self.name, record["rank"], record["slot"])
            elif kind == "verified":
                oracle.freed(self.name, record["rank"], record["slot"])
                oracle.verified_any = True
        for order in ready.announce:
            if sched.tracing:
                sched.trace(self.name, _show(order))
            _ORDERS[type(order)](self, order)

    def _join(self, order: orders.SendJoin) -> None:
        self.tell("join", self.name, self.machine.incarnation, order.inventory)

    def _report(self, order: orders.SendReport) -> None:
        self.tell("report", order.report)

    def _skip(self, order: orders.SendSkip) -> None:
        self.tell("skip", order.skipped)

    def _restored(self, order: orders.SendRestored) -> None:
        self.tell("restored", order.restored)

    def _persist_failed(self, order: orders.SendPersistFailed) -> None:
        self.tell("durable_failed", order.token, order.step, order.rank, order.reason)

    def _to_process(self, order: Any) -> None:
        process = self.cluster.processes.get(order.writer)
        if process is not None and process.alive and process.node is self:
            self.cluster.sched.at(0.01, process.hear, order, self.life)

    def _free(self, order: orders.FreeSlot) -> None:
        held = self.machine.slots[(order.rank, order.slot)]
        held.header = HeaderFacts(SlotState.FREE, order.generation)

    def _remove(self, order: orders.RemoveSlot) -> None:
        del self.machine.slots[(order.rank, order.slot)]

    def _digest(self, order: orders.Digest) -> None:
        self.cluster.sched.at(self.cluster.sched.rng.uniform(0.05, 0.4), self._digested, self.life, order)

    def _digested(self, life: int, order: orders.Digest) -> None:
        if life != self.life or self.core is None:
            return
        held = self.machine.slots[(order.rank, order.slot)]
        shard = order.shard.verified(digest(held.content), b"", order.shard.replicas)
        self.execute(self.core.digested(order.rank, order.slot, order.generation, shard))

    def _persist(self, order: orders.StartPersist) -> None:
        key = (self.name, order.rank, order.slot)
        self.cluster.oracle.reading[key] = order.generation
        self.cluster.sched.at(self.cluster.sched.rng.uniform(0.2, 2.5), self._persisted, self.life, order)

    def _persisted(self, life: int, order: orders.StartPersist) -> None:
        cluster = self.cluster
        if life != self.life or self.core is None:
            return
        cluster.oracle.reading.pop((self.name, order.rank, order.slot), None)
        shard = order.shard
        held = self.machine.slots[(order.rank, order.slot)]
        token = self.core.token
        fine = digest(held.content) == shard.root_digest and token == shard.token
        if fine and cluster.sched.chance(cluster.weather.full_disk):
            fine = False  # a full disk
        head = self.core.history.find(shard.token.epoch)
        if fine and cluster.durable.write(shard, held.content, head.parent if head else None, shard.token):
            self.execute(self.core.persisted(order.rank, shard.checkpoint, {"at": "durable"}))
        else:
            self.execute(self.core.persist_failed(order.rank, shard.checkpoint, "disk full or fenced"))

    def _nothing(self, order: Any) -> None:
        """Logged only; a durable write that is cancelled ends by itself here."""

    # ------------------------------------------------------------ restore

    def fetch(self, rank: int, shard: ShardFacts, source: Source, done: Callable[[str], None]) -> None:
        """Bring a shard into a slot of this node. `done` gets "" or what went wrong: "gone", "bad"."""
        core, machine = self.core, self.machine
        if core is None:
            done("gone")
            return
        usable = [slot.index for slot in core.tables.get(rank) or () if not slot.retired]
        place = None
        for made in ([], [max((index + 1 for owner, index in machine.slots if owner == rank), default=0)]):
            if not usable and not made:
                continue
            for slot in made:
                machine.slots[(rank, slot)] = Bytes()
            ready = core.receive(rank, made or usable, made=made)
            self.execute(ready)
            place = next((o for o in ready.announce if isinstance(o, orders.ReceiveSlot)), None)
            if self.core is not core:
                done("gone")
                return
            if place is not None:
                break
        if place is None:
            done("no room")
            return
        delay = self.cluster.sched.rng.uniform(0.1, 0.8)
        self.cluster.sched.at(delay, self._fetched, self.life, place, shard, source, done)

    def _fetched(
        self,
        life: int,
        place: orders.ReceiveSlot,
        shard: ShardFacts,
        source: Source,
        done: Callable[[str], None],
    ) -> None:
        cluster, core = self.cluster, self.core
        if life != self.life or core is None:
            done("gone")
            return
        rank, content = place.rank, None
        if source.tier == "memory":
            other = cluster.machines[source.node]
            held = other.slots.get((source.place["rank"], source.place["slot"])) if other.up else None
            if held is not None and held.header.generation == source.place["gen"]:
                content = held.content if held.header.state >= SlotState.SEALED else None
        else:
            entry = cluster.durable.checkpoints.get(shard.checkpoint)
            content = entry.shards[rank][1] if entry is not None and rank in entry.shards else None
        if content is None or digest(content) != shard.root_digest:
            self.execute(core.receive_failed(rank, place.slot, place.generation))
            done("gone" if content is None else "bad")
            return
        cluster.oracle.writes(self.name, rank, place.slot, place.generation, Writer(0, 0))
        held = self.machine.slots[(rank, place.slot)]
        held.content = content
        held.header = HeaderFacts(SlotState.VERIFIED, place.generation, shard, Writer(0, 0))
        self.execute(core.received(rank, place.slot, place.generation, shard))
        done("")


_ORDERS: dict[type, Callable[[SimNode, Any], None]] = {
    orders.SendJoin: SimNode._join,
    orders.SendReport: SimNode._report,
    orders.SendSkip: SimNode._skip,
    orders.SendRestored: SimNode._restored,
    orders.SendPersistFailed: SimNode._persist_failed,
    orders.GrantSlot: SimNode._to_process,
    orders.RefuseGrant: SimNode._nothing,
    orders.TellCommitted: SimNode._to_process,
    orders.TellCadence: SimNode._to_process,
    orders.FenceWriter: SimNode._to_process,
    orders.Refuse: SimNode._to_process,
    orders.FreeSlot: SimNode._free,
    orders.RemoveSlot: SimNode._remove,
    orders.RemoveRank: SimNode._nothing,
    orders.Digest: SimNode._digest,
    orders.ReceiveSlot: SimNode._nothing,
    orders.DropShard: SimNode._nothing,
    orders.StartPersist: SimNode._persist,
    orders.CancelPersist: SimNode._nothing,
    orders.Superseded: SimNode._nothing,
}


def _show(order: object) -> str:
    """An instruction in a line of the trace."""
    parts = []
    for name, value in vars(order).items():
        if isinstance(value, Token):
            text = shorten(value)
        elif isinstance(value, ShardFacts):
            text = f"{shorten(value.token)} rank {value.rank} step {value.step}"
        elif isinstance(value, CheckpointId):
            text = str(value)
        elif isinstance(value, JobView | Inventory):
            continue
        elif hasattr(value, "shard"):
            text = f"{value.tier} {shorten(value.shard.token)} rank {value.shard.rank} step {value.shard.step}"
            text += f" passed={value.passed} held={value.held}"
        elif hasattr(value, "passed"):
            text = f"{shorten(value.token)} rank {value.rank} step {value.step} passed={value.passed} held={value.held}"
        else:
            text = str(value)
        parts.append(f"{name}={text}" if len(text) < 400 else f"{name}=...")
    return f"{type(order).__name__} {' '.join(parts)}"
