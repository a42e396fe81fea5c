"""Scripted scenarios in the manner of raft's testdata: commands, and under each what the cores said.

    cluster ranks=0,1/2 slots=3 durable=2       nodes n0 (ranks 0, 1) and n1 (rank 2); durable every 2 steps
    start                                       plan, open an epoch, load, declare: all ranks
    step 5 [without=1] [torn=2]                 every rank snapshots state(5); without: no grant asked for, torn: skip
    begin RANK STEP / seal RANK STEP            the halves of a snapshot
    die RANK | daemon NODE | power NODE         SIGKILL of a process; of a daemon (and restart); of a machine (and boot)
    hold NODE / release NODE                    messages of a node to the coordinator wait / arrive, in order
    plan                                        the first half of the next start: holds are taken, the plan is made
    away / wipe / back                          the coordinator stops; loses all; comes back
    restore [step=K] [at_most=K]                `baftd restore`: an epoch of the operator's own
    persist                                     durable writes that were asked for complete
    finish                                      every rank finishes
    slots | status                              show

Everything is delivered at once and in order, so that a scenario reads like a story. Bytes are modelled as in the
seeded simulation, and checked when they are loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from baftd.checkpoint import decisions, orders
from baftd.checkpoint.commit import JobCoordinator, Policy
from baftd.checkpoint.facts import Answer, Ready, Record, ShardFacts, Writer, is_lasting, next_incarnation
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import Token
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.recovery import RestorePlan
from baftd.checkpoint.slots import HeaderFacts, SlotState
from baftd.errors import BaftError
from tests.simulation.world import Bytes, DurableDirectory, Machine, digest, grow

__all__ = ["Script", "run_script"]


def run_script(text: str, coordinator: type[JobCoordinator] = JobCoordinator) -> str:
    """The scenario with every answer filled in. Lines that begin with a command stay; all others are made anew."""
    script = Script(coordinator)
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") or not line.strip():
            continue
        out.append(line)
        if not line.startswith("#"):
            out += [f"    {said}" for said in script.command(line)]
            out.append("")
    return "\n".join(out).rstrip() + "\n"


class _Rank:
    def __init__(self, rank: int, node: str) -> None:
        self.rank, self.node = rank, node
        self.writer = Writer(0, 0)
        self.grants: deque[tuple[int, int]] = deque()
        self.filling: tuple[int, int, int] | None = None
        self.alive = False
        self.fenced = False


class Script:
    """A small cluster that does what it is told."""

    def __init__(self, coordinator: type[JobCoordinator]) -> None:
        self.coordinator_class = coordinator
        self.said: list[str] = []
        self.machines: dict[str, Machine] = {}
        self.cores: dict[str, NodeJob] = {}
        self.ranks: dict[int, _Rank] = {}
        self.durable = DurableDirectory()
        self.persists: list[tuple[str, orders.StartPersist]] = []
        self.held: dict[str, list[tuple[Any, ...]]] = {}
        self.queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.journal: list[Record] = []
        self.store = next_incarnation(None, 0)
        self.core: JobCoordinator | None = None
        self.token: Token | None = None
        self.planned: RestorePlan | None = None
        self.lines: dict[tuple[Token, int], int] = {}
        self.line = 0
        self.pids = 100
        self.starts = 0
        self.slots = 3
        self.policy = Policy()

    # ------------------------------------------------------------ commands

    def command(self, line: str) -> list[str]:
        """Carry out one line, deliver everything, and return what was said."""
        self.said = []
        words = line.split()
        plain = [word for word in words[1:] if "=" not in word]
        options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        try:
            getattr(self, f"do_{words[0]}")(*plain, **options)
            self._deliver()
        except BaftError as error:
            self.said.append(f"{type(error).__name__}: {error}")
        return self.said

    def do_cluster(self, ranks: str = "0,1", slots: str = "3", durable: str = "", every: str = "1") -> None:
        """Set up nodes and the coordinator."""
        self.slots = int(slots)
        self.policy = Policy(int(every), durable=bool(durable), durable_steps=int(durable) if durable else None)
        for index, group in enumerate(ranks.split("/")):
            name = f"n{index}"
            self.machines[name] = Machine(name)
            for rank in group.split(","):
                self.ranks[int(rank)] = _Rank(int(rank), name)
        self._start_coordinator()
        for name in self.machines:
            self.do_boot(name)

    def do_boot(self, name: str) -> None:
        """Switch a machine on."""
        machine = self.machines[name]
        machine.incarnation = next_incarnation(machine.incarnation or None, 0)
        machine.slots.clear()
        machine.journal.clear()
        self._start_daemon(name)

    def do_power(self, name: str) -> None:
        """Power off and on: memory and processes are lost, the disk stays."""
        self.cores.pop(name)
        self.held.pop(name, None)
        for rank in self.ranks.values():
            if rank.node == name:
                rank.alive = False
        self.do_boot(name)

    def do_daemon(self, name: str) -> None:
        """Kill the daemon and start it again."""
        self.cores.pop(name)
        self._start_daemon(name)
        self._deliver()
        for rank in self.ranks.values():
            if rank.node == name and rank.alive and not rank.fenced:
                rank.grants.clear()
                self._declare(rank)

    def do_away(self) -> None:
        """The coordinator stops answering; what it has not written down is lost."""
        self.core = None
        self.store = next_incarnation(self.store, 0)
        for name, core in self.cores.items():
            self._node(name, core.away())

    def do_wipe(self) -> None:
        """The coordinator's store is emptied."""
        self.do_away()
        self.journal.clear()
        self.do_back()

    def do_back(self) -> None:
        """The coordinator is there again."""
        self._start_coordinator()
        for name, core in self.cores.items():
            self._node(name, core.resend())
            self._to_coordinator(name, "poll", name, self.machines[name].incarnation)

    def do_hold(self, name: str) -> None:
        """What this node sends to the coordinator is held up."""
        self.held[name] = []

    def do_release(self, name: str) -> None:
        """It arrives."""
        for method, *args in self.held.pop(name):
            self.queue.append((self._coordinator, (method, *args)))

    def do_plan(self) -> None:
        """What the next start goes on from; between here and there anything may happen."""
        assert self.core is not None
        for core in self.cores.values():
            core.hold()
        self.planned = self.core.plan(self._inventories(), world=len(self.ranks))

    def do_start(self, fresh: str = "") -> None:
        """Start all ranks: plan, open, load, declare."""
        assert self.core is not None
        self._deliver()
        planned, self.planned = self.planned, None
        plan = planned or self.core.plan(self._inventories(), world=len(self.ranks), fresh=bool(fresh))
        self._open(plan)
        if planned is not None:
            self._deliver()
            for name, core in self.cores.items():
                self._node(name, core.release())
        for rank in self.ranks.values():
            self._load(rank, plan)
        self._deliver()
        for rank in self.ranks.values():
            self.pids += 1
            rank.writer, rank.alive, rank.fenced = Writer(self.pids, self.pids), True, False
            rank.grants.clear()
            rank.filling = None
            self._declare(rank)

    def do_restore(self, step: str = "", at_most: str = "") -> None:
        """`baftd restore`."""
        assert self.core is not None
        plan = self.core.plan(
            self._inventories(), step=int(step) if step else None, at_most=int(at_most) if at_most else None
        )
        self._open(plan)

    def do_step(self, number: str, without: str = "", torn: str = "") -> None:
        """Every living rank snapshots the step."""
        absent = {int(rank) for rank in without.split(",") if rank}
        broken = {int(rank) for rank in torn.split(",") if rank}
        for rank in self.ranks:
            if rank not in absent:
                self.do_begin(str(rank), number)
                self._deliver()
        for rank in self.ranks:
            if rank in broken:
                self._skip(self.ranks[rank], int(number), "torn")
            elif rank not in absent:
                self.do_seal(str(rank), number)
            self._deliver()

    def do_begin(self, rank: str, number: str) -> None:
        """Begin a snapshot, or skip it for want of a slot."""
        mine, step = self.ranks[int(rank)], int(number)
        if not mine.alive:
            return
        assert self.token is not None
        if not mine.grants:
            self.said.append(f"rank {rank}: no slot for step {step}")
            self._skip(mine, step, "no slot")
            return
        slot, generation = mine.grants.popleft()
        mine.filling = (slot, generation, step)
        held = self.machines[mine.node].slots[(mine.rank, slot)]
        held.content = (-1, step)
        held.header = HeaderFacts(SlotState.FILLING, generation, self._shard(mine, step), mine.writer)
        self._client(mine, "begin", mine.rank, mine.writer, self._token(mine), step, slot, generation)

    def do_seal(self, rank: str, number: str, silently: str = "") -> None:
        """Complete it; silently: the process dies before it can say so."""
        mine, step = self.ranks[int(rank)], int(number)
        if not mine.alive or mine.filling is None or mine.filling[2] != step:
            return
        slot, generation, _ = mine.filling
        mine.filling = None
        shard = self._shard(mine, step)
        held = self.machines[mine.node].slots[(mine.rank, slot)]
        held.content = (self._line(shard.token, step), mine.rank)
        held.header = HeaderFacts(SlotState.SEALED, generation, shard, mine.writer)
        if silently:
            self.do_die(rank)
        else:
            self._client(mine, "seal", mine.rank, mine.writer, shard, slot, generation, digested=True)

    def do_die(self, rank: str) -> None:
        """SIGKILL."""
        mine = self.ranks[int(rank)]
        mine.alive = False
        core = self.cores[mine.node]
        headers: dict[tuple[int, int], HeaderFacts | None] = {
            key: self.machines[mine.node].slots[key].header for key in core.granted_to(mine.writer)
        }
        self._node(mine.node, core.writer_dead(mine.writer, headers))

    def do_persist(self, fail: str = "") -> None:
        """Durable writes complete, or fail on a node."""
        for name, order in self.persists:
            core, shard = self.cores[name], order.shard
            held = self.machines[name].slots[(order.rank, order.slot)]
            if fail == name:
                self._node(name, core.persist_failed(order.rank, shard.checkpoint, "disk full"))
            elif digest(held.content) == shard.root_digest and self.durable.write(
                shard, held.content, None, shard.token
            ):
                self._node(name, core.persisted(order.rank, shard.checkpoint, {}))
            else:
                self._node(name, core.persist_failed(order.rank, shard.checkpoint, "fenced"))
        self.persists.clear()

    def do_finish(self) -> None:
        """Every rank is done."""
        assert self.core is not None
        assert self.token is not None
        for rank in self.ranks:
            self._execute(self.core.finish(self.token, rank, 0, 0.0))

    def do_flip(self, rank: str, number: str) -> None:
        """A bit flips in the slot that holds a step."""
        mine = self.ranks[int(rank)]
        for (owner, _), held in self.machines[mine.node].slots.items():
            if owner == mine.rank and held.header.shard is not None and held.header.shard.step == int(number):
                held.content = (-1, 77)

    def do_resend(self) -> None:
        """Every node says again what was not answered."""
        for name, core in self.cores.items():
            self._node(name, core.resend())

    def do_slots(self) -> None:
        """Show the slots."""
        for rank in self.ranks.values():
            for line in self.cores[rank.node].describe(rank.rank):
                self.said.append(f"rank {rank.rank} {line}")

    def do_status(self) -> None:
        """Show what the coordinator knows."""
        assert self.core is not None
        core = self.core
        self.said.append(f"epoch {core.history.epoch} committed {core.committed} durable {core.durable}")

    # ------------------------------------------------------------ shells

    def _start_coordinator(self) -> None:
        self.core = self.coordinator_class.replay("job", self.journal, store=self.store, policy=self.policy)

    def _start_daemon(self, name: str) -> None:
        machine = self.machines[name]
        headers: dict[tuple[int, int], HeaderFacts | None] = {key: b.header for key, b in machine.slots.items()}
        core, ready = NodeJob.rebuild(
            "job",
            name,
            machine.incarnation,
            history=History.replay(machine.manifest),
            records=machine.journal,
            headers=headers,
        )
        self.cores[name] = core
        self._node(name, ready)
        for writer in sorted(core.writers()):
            if not any(rank.alive and rank.writer == writer for rank in self.ranks.values()):
                dead = {key: machine.slots[key].header for key in core.granted_to(writer)}
                self._node(name, core.writer_dead(writer, dead))
        self._node(name, core.resend())

    def _deliver(self) -> None:
        while self.queue:
            call, args = self.queue.popleft()
            call(*args)

    def _to_coordinator(self, name: str, method: str, *args: Any) -> None:
        if name in self.held:
            self.held[name].append((method, *args))
        else:
            self.queue.append((self._coordinator, (method, *args)))

    def _coordinator(self, method: str, *args: Any) -> None:
        if self.core is not None:
            timed = method in ("join", "report", "skip", "restored", "manifest_written", "durable_failed")
            self._execute(getattr(self.core, method)(*args, *((0.0,) if timed else ())))

    def _execute(self, ready: Ready[decisions.CoordinatorInstruction]) -> None:
        self.journal += ready.records
        for order in ready.announce:
            if isinstance(order, Answer):
                self.queue.append((self._answered, (order,)))
            elif isinstance(order, decisions.Publish):
                for name in self.cores:
                    self.queue.append((self._viewed, (name, order.view)))
            elif isinstance(order, decisions.Joined):
                self.queue.append((self._joined, (order,)))
            elif isinstance(order, decisions.NotJoined):
                self._node(order.node, self.cores[order.node].not_joined())
            elif isinstance(order, decisions.WriteManifest):
                assert self.core is not None
                self.durable.commit(order.checkpoint, order.token, order.world, self.core.history.line)
                self._to_coordinator(order.node, "manifest_written", order.checkpoint)
            elif isinstance(order, decisions.Committed):
                self.said.append(f"coordinator: {order.checkpoint} is committed ({order.tier})")
            elif isinstance(order, decisions.Dead):
                self.said.append(f"coordinator: {order.checkpoint} is dead, rank {order.rank}: {order.reason}")
            elif isinstance(order, decisions.Withdrawn):
                self.said.append(f"coordinator: {order.checkpoint} has lost ranks {order.ranks}: {order.reason}")
            elif isinstance(order, decisions.Finished):
                self.said.append(f"coordinator: finished at {order.checkpoint} ({order.tier})")

    def _answered(self, order: Answer) -> None:
        core = self.cores.get(order.node)
        if core is not None:
            if order.verdict.value in ("fenced", "stale_node", "refused", "unknown", "quarantined"):
                self.said.append(f"{order.node}: step {order.step} of rank {order.rank}: {order.verdict.value}")
            self._node(order.node, core.take_answer(order))

    def _viewed(self, name: str, view: Any) -> None:
        if name in self.cores:
            self._node(name, self.cores[name].take_view(view))

    def _joined(self, order: decisions.Joined) -> None:
        if order.accepted and self.machines[order.node].incarnation == order.incarnation:
            self._node(order.node, self.cores[order.node].joined(order.view))

    def _node(self, name: str, ready: Ready[orders.NodeInstruction]) -> None:
        machine = self.machines[name]
        for record in ready.records:
            (machine.manifest if is_lasting(record) else machine.journal).append(record)
        for order in ready.announce:
            self._carry_out(name, order)

    def _carry_out(self, name: str, order: orders.NodeInstruction) -> None:
        core, machine = self.cores[name], self.machines[name]
        if isinstance(order, orders.SendJoin):
            self._to_coordinator(name, "join", name, machine.incarnation, order.inventory)
        elif isinstance(order, orders.SendReport):
            self._to_coordinator(name, "report", order.report)
        elif isinstance(order, orders.SendSkip):
            self._to_coordinator(name, "skip", order.skipped)
        elif isinstance(order, orders.SendRestored):
            self._to_coordinator(name, "restored", order.restored)
        elif isinstance(order, orders.SendPersistFailed):
            self._to_coordinator(name, "durable_failed", order.token, order.step, order.rank, order.reason)
        elif isinstance(order, orders.GrantSlot):
            rank = self.ranks[order.rank]
            if rank.writer == order.writer and (order.slot, order.generation) not in rank.grants:
                rank.grants.append((order.slot, order.generation))
        elif isinstance(order, orders.RefuseGrant):
            self.said.append(f"{name}: no grant for rank {order.rank}: {order.reason}")
        elif isinstance(order, orders.FenceWriter):
            self.ranks[order.rank].fenced = True
            self.said.append(f"{name}: rank {order.rank} ({order.writer}) is fenced: {order.reason}")
        elif isinstance(order, orders.FreeSlot):
            machine.slots[(order.rank, order.slot)].header = HeaderFacts(SlotState.FREE, order.generation)
            self.said.append(f"{name}: rank {order.rank} slot {order.slot} is free")
        elif isinstance(order, orders.RemoveSlot):
            del machine.slots[(order.rank, order.slot)]
        elif isinstance(order, orders.Digest):
            content = machine.slots[(order.rank, order.slot)].content
            shard = order.shard.verified(digest(content), b"", order.shard.replicas)
            self.said.append(f"{name}: rank {order.rank} step {shard.step} is taken from its header and digested")
            self._node(name, core.digested(order.rank, order.slot, order.generation, shard))
        elif isinstance(order, orders.StartPersist):
            self.persists.append((name, order))
            self.said.append(f"{name}: writes rank {order.rank} step {order.shard.step} to the durable tier")
        elif isinstance(order, orders.CancelPersist):
            self.said.append(f"{name}: stops the durable write of rank {order.rank}, {order.checkpoint}")
        elif isinstance(order, orders.DropShard):
            self.said.append(f"{name}: drops rank {order.rank}'s shard of {order.checkpoint}: {order.reason}")

    # ------------------------------------------------------------ processes

    def _inventories(self) -> list[Any]:
        return [*(core.inventory() for core in self.cores.values()), self.durable.inventory()]

    def _open(self, plan: RestorePlan) -> None:
        assert self.core is not None
        self.starts += 1
        incarnation = f"{self.starts:032x}"
        for text in plan.passed_over:
            self.said.append(f"passed over: {text}")
        sources = sorted({held.source.tier for held in plan.sources.values()})
        self.said.append(f"begins from {plan.checkpoint or 'step 0'} {'+'.join(sources)}".rstrip())
        self._execute(
            self.core.open_epoch(incarnation, plan, world=len(self.ranks), expected=self.core.history.epoch, now=0.0)
        )
        self._deliver()
        self.token = self.core.token
        self.line = self.lines[(plan.token, plan.step)] if plan.token is not None else 0
        self.origin = plan.step

    def _load(self, rank: _Rank, plan: RestorePlan) -> None:
        if plan.checkpoint is None or self.token is None:
            return
        core, machine = self.cores[rank.node], self.machines[rank.node]
        if core.holding(rank.rank, plan.checkpoint) is None:
            source = plan.sources[rank.rank]
            for slot in range(self.slots):
                machine.slots.setdefault((rank.rank, slot), Bytes())
            self._node(rank.node, core.lay_slots(rank.rank, range(self.slots)))
            ready = core.receive(rank.rank)
            self._node(rank.node, ready)
            place = next(order for order in ready.announce if isinstance(order, orders.ReceiveSlot))
            held = machine.slots[(rank.rank, place.slot)]
            if source.source.tier == "memory":
                key = (source.source.place["rank"], source.source.place["slot"])
                held.content = self.machines[source.source.node].slots[key].content
            else:
                held.content = self.durable.checkpoints[plan.checkpoint].shards[rank.rank][1]
            held.header = HeaderFacts(SlotState.VERIFIED, place.generation, source.shard)
            self._node(rank.node, core.received(rank.rank, place.slot, place.generation, source.shard))
            self.said.append(f"{rank.node}: fetches rank {rank.rank} from {source.source.node or 'the durable tier'}")
        slot_held = core.holding(rank.rank, plan.checkpoint)
        assert slot_held is not None
        content = machine.slots[(rank.rank, slot_held.index)].content
        assert content == (self.line, rank.rank), f"rank {rank.rank} loaded {content}, not {(self.line, rank.rank)}"
        self._node(rank.node, core.restored(rank.rank, self.token))

    def _declare(self, rank: _Rank) -> None:
        machine = self.machines[rank.node]
        for slot in range(self.slots):
            machine.slots.setdefault((rank.rank, slot), Bytes())
        self._client(
            rank,
            "declare",
            rank.rank,
            rank.writer,
            self._token(rank),
            world=len(self.ranks),
            tree_digest=b"tree",
            slots=list(range(self.slots)),
        )

    def _client(self, rank: _Rank, method: str, *args: Any, **kwargs: Any) -> None:
        self._node(rank.node, getattr(self.cores[rank.node], method)(*args, **kwargs))

    def _skip(self, rank: _Rank, step: int, reason: str) -> None:
        slot, generation, _ = rank.filling or (None, 0, 0)
        rank.filling = None
        self._client(rank, "skip", rank.rank, rank.writer, self._token(rank), step, reason, slot, generation)

    def _token(self, rank: _Rank) -> Token:
        assert self.token is not None
        return self.token

    def _line(self, token: Token, step: int) -> int:
        line = self.lines.get((token, step))
        if line is None:
            line = self.line
            for number in range(self.origin + 1, step + 1):
                line = self.lines.setdefault((token, number), grow(line, token, number))
        return line

    def _shard(self, rank: _Rank, step: int) -> ShardFacts:
        token = self._token(rank)
        root = digest((self._line(token, step), rank.rank))
        return ShardFacts(token, rank.rank, len(self.ranks), step, step, b"tree", root, 100)
