"""Training processes, the launcher that starts them again and again, and the operator who rolls back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from baftd.checkpoint import orders
from baftd.checkpoint.facts import Cadence, Held, Inventory, ShardFacts, Writer
from baftd.checkpoint.history import BadSource, EpochConflict
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import RestorePlan
from baftd.checkpoint.slots import HeaderFacts, SlotState
from baftd.errors import BaftError, NothingRestorable, UsageError
from tests.simulation.cluster import Cluster, SimNode
from tests.simulation.world import Content, digest, grow, shorten

__all__ = ["Launcher", "Process", "Run"]


class Process:
    """One rank: it trains, and fills the slots it was granted, at its own pace."""

    def __init__(self, run: Run, rank: int, node: SimNode, writer: Writer) -> None:
        self.run, self.rank, self.node, self.writer = run, rank, node, writer
        self.cluster = run.cluster
        self.token = run.token
        self.alive = True
        self.zombie = False
        self.fenced = False
        self.declared = False
        self.grants: deque[tuple[int, int]] = deque()
        self.used: dict[int, int] = {}
        self.unanswered: list[tuple[int, str, tuple[Any, ...], dict[str, Any]]] = []
        self.cadence: Cadence | None = None
        self.reached = 0
        self.filling: tuple[int, int, int] | None = None
        self.layout = run.layout
        self.division = run.division
        self.cluster.processes[writer] = self

    def __str__(self) -> str:
        return f"rank {self.rank} ({shorten(self.token)} {self.writer})"

    # ------------------------------------------------------------ daemon

    def say(self, step: int, method: str, *args: Any, **kwargs: Any) -> None:
        """Send a message that must arrive, and keep it until a newer step is committed."""
        self.unanswered.append((step, method, args, kwargs))
        del self.unanswered[:-64]
        self._deliver(self.node.life, method, args, kwargs)
        if self.cluster.sched.lossy and self.cluster.sched.chance(0.05):
            self._deliver(self.node.life, method, args, kwargs)

    def _deliver(self, life: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cluster.sched.at(0.01, self._arrive, life, method, args, kwargs)

    def _arrive(self, life: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if life == self.node.life:
            self.node.client(method, *args, **kwargs)

    def declare(self) -> None:
        """Lay out the shard, in slots of the current layout."""
        if self.fenced or not self.alive:
            return
        self.declared = True
        count = self.cluster.slots
        indices = range(self.layout * count, (self.layout + 1) * count)
        self._deliver(self.node.life, "declare", (self, indices), {})

    @property
    def tree(self) -> bytes:
        """Digest of the current layout."""
        return b"tree%d.%d.%d" % (self.rank, self.run.world, self.layout)

    def reconnect(self) -> None:
        """The daemon is back: say again what it may not have heard."""
        if not self.alive or self.fenced or not self.declared:
            return
        self.grants.clear()
        self.declare()
        for _, method, args, kwargs in self.unanswered:
            self._deliver(self.node.life, method, args, kwargs)

    def hear(self, order: Any, life: int) -> None:
        """A message of the daemon."""
        if not self.alive or life != self.node.life:
            return
        if isinstance(order, orders.GrantSlot):
            if order.generation > self.used.get(order.slot, 0) and (order.slot, order.generation) not in self.grants:
                self.grants.append((order.slot, order.generation))
        elif isinstance(order, orders.TellCommitted):
            if order.tier == "memory":
                self.unanswered = [kept for kept in self.unanswered if kept[0] > order.step]
        elif isinstance(order, orders.TellCadence):
            self._take_cadence(order.cadence)
        elif isinstance(order, orders.FenceWriter):
            self.fenced = True
            if self.cluster.sched.chance(0.7):
                self.cluster.sched.at(self.cluster.sched.rng.uniform(0.0, 2.0), self.vanish)

    def _take_cadence(self, cadence: Cadence) -> None:
        known, self.cadence = self.cadence, cadence
        missed = cadence.missed(known, self.reached) if known is not None else None
        if missed is not None:
            self.say(missed, "skip", self.rank, self.writer, self.token, missed, "heard of the cadence too late")

    def vanish(self) -> None:
        """The process dies; the kernel tells the daemon."""
        if not self.alive:
            return
        self.alive = False
        self.cluster.processes.pop(self.writer, None)
        if self.cluster.sched.tracing:
            self.cluster.sched.trace(str(self), "DIES")
        self.cluster.sched.at(0.03, self.node.on_death, self.writer)

    # ------------------------------------------------------------ snapshots

    def boundary(self, step: int, line: int) -> None:
        """State(step) exists: begin a snapshot, or say why not."""
        sched = self.cluster.sched
        if not self.alive:
            return
        self.reached = step
        due = self.cadence is None or self.cadence.due(step)
        self.cluster.oracle.decides(self.token, step, self.rank, due, sched.now)
        if not due:
            self.run.passed(self, step)
            return
        if sched.chance(self.cluster.weather.new_layouts):
            self.layout += 1
            self.grants.clear()
            self.declare()
        if not self.grants:
            self.say(step, "skip", self.rank, self.writer, self.token, step, "no slot")
            self.run.passed(self, step)
            return
        if self.cluster.weather.divisions and self.cluster.plans.random() < 0.6:
            self.division = self.run.division  # it has heard of it
        slot, generation = self.grants.popleft()
        self.used[slot] = generation
        self.filling = (slot, generation, step)
        shard = self._shard(step, line, b"")
        self._write(slot, generation, (-1, step), HeaderFacts(SlotState.FILLING, generation, shard, self.writer))
        self.say(step, "begin", self.rank, self.writer, self.token, step, slot, generation)
        slow = (
            sched.rng.uniform(0.5, 4.0)
            if sched.chance(self.cluster.weather.slow_writers)
            else sched.rng.uniform(0.1, 0.5)
        )
        sched.at(slow, self._fill, step, slot, generation, line)

    def _shard(self, step: int, line: int, root: bytes) -> ShardFacts:
        replica = digest((line, -1))
        if (self.token, step) in self.cluster.oracle.corrupt and self.rank == 0:
            replica = b"flipped"
        world = self.run.world
        plan = b"plan%d" % self.division if self.cluster.weather.divisions else b""
        return ShardFacts(
            self.token, self.rank, world, step, step, self.tree, root, 100, replicas=((b"all", replica),), plan=plan
        )

    def _write(self, slot: int, generation: int, content: Content, header: HeaderFacts) -> None:
        held = self.node.machine.slots.get((self.rank, slot))
        if held is None:
            return  # removed: the mapping still exists, but nobody else sees it
        self.cluster.oracle.writes(self.node.name, self.rank, slot, generation, self.writer)
        held.content = content
        held.header = header

    def _fill(self, step: int, slot: int, generation: int, line: int) -> None:
        if not self.alive:
            return
        sched = self.cluster.sched
        self.filling = None
        if sched.chance(self.cluster.weather.torn_snapshots):
            self.say(step, "skip", self.rank, self.writer, self.token, step, "torn", slot, generation)
        else:
            content = (line, self.rank)
            root = digest(content) if self.run.digests else b""
            shard = self._shard(step, line, root)
            self.cluster.oracle.saved(shard)
            self._write(slot, generation, content, HeaderFacts(SlotState.SEALED, generation, shard, self.writer))
            if sched.lossy and sched.chance(0.01):
                sched.at(0.0, self.vanish)  # sealed, and never able to say so
                return
            self.say(step, "seal", self.rank, self.writer, shard, slot, generation, digested=self.run.digests)
        self.run.passed(self, step)
        if self.zombie and sched.chance(0.5):
            more = grow(line, self.token, step + 1)
            self.cluster.oracle.trained(self.token, step + 1, more)  # a lone one is a whole job
            sched.at(0.2, self.boundary, step + 1, more)


class Run:
    """One start of all ranks: restore together, then step together."""

    def __init__(
        self, launcher: Launcher, token: Token, plan: RestorePlan, where: dict[int, SimNode], reshard: bool
    ) -> None:
        self.launcher, self.cluster = launcher, launcher.cluster
        self.token, self.plan, self.where, self.reshard = token, plan, where, reshard
        self.world = len(where)
        self.layout = launcher.layout
        self.digests = self.cluster.sched.chance(0.7)
        self.division = 1
        self.processes: dict[int, Process] = {}
        self.loaded: dict[int, int] = {}
        self.training = False
        self.over = False
        self.step = 0
        self.line = 0
        self.waiting: set[int] = set()
        self.quiet_since = self.cluster.sched.now
        self.fetching: set[int] = set()

    # ------------------------------------------------------------ restore

    def restore(self) -> None:
        """Look again at every rank that has not loaded yet."""
        if self.over or self.training:
            return
        sched = self.cluster.sched
        if sched.now - self.quiet_since > 12.0:
            self.end("the restore takes too long")
            return
        for rank in self._saved():
            if rank not in self.loaded and rank not in self.fetching:
                self._restore_rank(rank)
                if self.over:
                    return
        told = all(node.core is not None and node.core.token == self.token for node in self.where.values())
        if told and len(self.loaded) == len(self._saved()):
            self._train()
        else:
            sched.at(0.2, self.restore)

    def _saved(self) -> range:
        """The ranks that saved what this start begins from; its own when it begins afresh."""
        return range(self.plan.world if self.plan.checkpoint is not None else self.world)

    def _restore_rank(self, rank: int) -> None:
        """Bring the shard of a rank that saved, and that need not be one of this start, to a node, and read it."""
        node = self.where[rank % self.world]
        core = node.core
        if core is None or core.token != self.token or core.history.head is None:
            return
        parent = core.history.head.parent
        if parent != self.plan.checkpoint:
            return
        if parent is None:
            self.loaded[rank] = 0
            return
        slot = core.holding(rank, parent)
        if slot is not None and slot.shard is not None:
            held = node.machine.slots[(rank, slot.index)]
            if digest(held.content) != slot.shard.root_digest:
                node.execute(core.damaged(rank, parent, "its digest does not fit"))
                self._bad(rank, "memory", node.name)
                return
            assert self.plan.token is not None
            self.cluster.oracle.loaded(self.plan.token, parent.step, rank, held.content)
            self.loaded[rank] = held.content[0]
            return
        source = self.plan.sources[rank]
        if source.source.tier == "memory" and source.source.node == node.name:
            self._replan()  # it was there when the plan was made
            return
        self.fetching.add(rank)
        node.fetch(rank, source.shard, source.source, lambda problem: self._fetched(rank, source, problem))

    def _fetched(self, rank: int, source: Held, problem: str) -> None:
        self.fetching.discard(rank)
        if self.over or self.training or not problem:
            return
        if problem == "bad":
            self._bad(rank, source.source.tier, source.source.node)
        elif problem == "gone":
            self._replan()

    def _bad(self, rank: int, tier: str, node: str) -> None:
        core = self.cluster.coordinator.core
        checkpoint = self.plan.checkpoint
        if core is None or checkpoint is None:
            return
        try:
            bad = BadSource(checkpoint, rank, tier, node, "its digest does not fit")
            self.cluster.coordinator.execute(core.source_failed(self.token, bad))
        except BaftError:
            self.end("fenced")
            return
        self._replan()

    def _replan(self) -> None:
        coordinator, launcher = self.cluster.coordinator, self.launcher
        if coordinator.core is None or not launcher.all_here():
            return
        checkpoint = self.plan.checkpoint
        assert checkpoint is not None
        if coordinator.core.token != self.token:
            self.end("another start has taken over")
            return
        quarantined = coordinator.core.history.quarantined
        try:
            plan = coordinator.core.plan(
                launcher.inventories(),
                world=self.world,
                reshard=self.reshard,
                at_most=checkpoint.step,
                prefer=self._prefer(),
            )
        except NothingRestorable:
            self.cluster.oracle.nothing(self.token, quarantined)
            self.end("nothing is left to restore")
            return
        except UsageError as error:
            self.end(str(error))
            return
        self.cluster.oracle.planned(self.token, plan, free_choice=True, fresh=False, quarantined=quarantined)
        if plan.checkpoint != checkpoint:
            try:
                self.cluster.origins[self.token] = plan.token
                coordinator.execute(coordinator.core.reparent(self.token, plan))
            except (UsageError, BaftError):
                self.end("the plan is fixed")
                return
            self.cluster.oracle.begins(self.token, plan.checkpoint)
            self.loaded.clear()
        self.plan = plan

    def _prefer(self) -> dict[int, str]:
        return {rank: self.where[rank % self.world].name for rank in range(self.launcher.most)}

    # ------------------------------------------------------------ train

    def _train(self) -> None:
        lines = set(self.loaded.values())
        if len(lines) != 1:
            raise AssertionError(f"ranks have loaded different states: {self.loaded}")
        self.training = True
        self.line, self.step = lines.pop(), self.plan.step
        if self.cluster.sched.tracing:
            self.cluster.sched.trace("launcher", f"{shorten(self.token)} trains from step {self.step}")
        for rank, node in self.where.items():
            if node.core is not None:
                node.execute(node.core.restored(rank, self.token))
            process = Process(self, rank, node, self.launcher.new_writer())
            self.processes[rank] = process
            if not node.machine.up:
                process.vanish()
                continue
            process.declare()
        self.cluster.sched.at(0.3, self._advance)

    def _advance(self) -> None:
        if self.over or any(not process.alive for process in self.processes.values()):
            return
        sched, launcher = self.cluster.sched, self.launcher
        if self.step >= launcher.target and sched.lossy:
            self._finish()
            return
        self.step += 1
        if self.cluster.weather.divisions:
            self.division += self.cluster.plans.random() < self.cluster.weather.divisions
        self.line = grow(self.line, self.token, self.step)
        self.cluster.oracle.trained(self.token, self.step, self.line)
        if self.world > 1 and sched.chance(self.cluster.weather.corrupt):
            self.cluster.oracle.corrupt.add((self.token, self.step))
        self.waiting = set(self.processes)
        self.quiet_since = sched.now
        for process in self.processes.values():
            sched.at(sched.rng.uniform(0.0, 0.15), process.boundary, self.step, self.line)

    def passed(self, process: Process, step: int) -> None:
        """A rank's fence for this step is behind it."""
        if step == self.step and not self.over:
            self.waiting.discard(process.rank)
            if not self.waiting:
                self.cluster.sched.at(self.cluster.sched.rng.uniform(0.1, 0.3), self._advance)

    def _finish(self) -> None:
        if self.over:
            return
        core = self.cluster.coordinator.core
        if core is not None and core.token == self.token:
            for rank in self.processes:
                self.cluster.coordinator.execute(core.finish(self.token, rank, self.step, self.cluster.sched.now))
                if self.cluster.coordinator.core is not core:
                    break
            else:
                if core.view.finished:
                    self.end("finished")
                    return
        if self.cluster.sched.now - self.quiet_since > 6.0:
            self.end("left without finishing")
            return
        self.cluster.sched.at(0.5, self._finish)

    def end(self, why: str) -> None:
        """Kill what is left; some processes linger as stale ones."""
        if self.over:
            return
        self.over = True
        sched = self.cluster.sched
        if sched.tracing:
            sched.trace("launcher", f"{shorten(self.token)} ends: {why}")
        for process in self.processes.values():
            if process.alive:
                if sched.chance(self.cluster.weather.stale):
                    process.zombie = True
                    sched.at(sched.rng.uniform(1.0, 10.0), process.vanish)
                else:
                    sched.at(sched.rng.uniform(0.0, 0.3), process.vanish)


class Launcher:
    """torchrun and an operator in one: starts the job, watches it, starts it again; rolls back now and then."""

    def __init__(self, cluster: Cluster, target: int, world: int, most: int) -> None:
        """`world`: ranks of the first start; later ones have at most `most`."""
        self.cluster = cluster
        self.target = target
        self.world = world
        self.most = most
        self.layout = 0
        self.reshards = 0
        self.run: Run | None = None
        self.pids = 100
        self.fresh = False
        self.runs = 0
        self.rollbacks = 0
        self.restored_from: list[CheckpointId | None] = []

    def new_writer(self) -> Writer:
        """The identity of a new process."""
        self.pids += 1
        return Writer(self.pids, self.pids)

    def all_here(self) -> bool:
        """Whether every daemon is up and joined."""
        core = self.cluster.coordinator.core
        return core is not None and all(
            node.core is not None and core.nodes.get(node.name) == node.machine.incarnation
            for node in self.cluster.nodes.values()
        )

    def inventories(self) -> list[Inventory]:
        """What all nodes and the durable directory hold."""
        found = [node.core.inventory() for node in self.cluster.nodes.values() if node.core is not None]
        return [*found, self.cluster.durable.inventory()]

    def tick(self) -> None:
        """Look at the job, twice a second."""
        sched, run = self.cluster.sched, self.run
        sched.at(0.5, self.tick)
        if run is not None and not run.over:
            dead = any(not process.alive for process in run.processes.values())
            if dead and sched.chance(0.5):
                run.end("a rank is dead")
            elif run.training and sched.now - run.quiet_since > 8.0:
                run.end("it hangs")
            return
        if not self.all_here():
            return
        core = self.cluster.coordinator.core
        assert core is not None
        if core.history.epoch and sched.chance(self.cluster.weather.rollbacks):
            self._roll_back()
            return
        self._start()

    def _start(self) -> None:
        sched, core = self.cluster.sched, self.cluster.coordinator.core
        assert core is not None
        self.cluster.coordinator.execute(core.learn(self.cluster.durable.inventory(), sched.now))
        if self.cluster.coordinator.core is not core:
            return
        names = list(self.cluster.nodes.values())
        shift = sched.rng.randrange(len(names)) if sched.chance(0.3) else 0
        if sched.chance(self.cluster.weather.reshards):
            self.world = sched.rng.randint(1, self.most)
            self.layout += sched.rng.randint(0, 1)
        world = self.world
        where = {rank: names[(rank * len(names) // world + shift) % len(names)] for rank in range(world)}
        expected = core.history.epoch
        quarantined = core.history.quarantined
        prefer = {rank: where[rank % world].name for rank in range(self.most)}
        found = self.inventories()
        try:
            plan = core.plan(found, world=world, reshard=True, fresh=self.fresh, prefer=prefer)
            try:
                strict = core.plan(found, world=world, fresh=self.fresh, prefer=prefer)
            except UsageError:
                strict = None
            self.cluster.oracle.refused(world, strict, plan)
        except NothingRestorable as error:
            self.cluster.oracle.nothing(core.token, quarantined)
            if sched.tracing:
                sched.trace("launcher", str(error))
            self.fresh = True
            return
        self.cluster.oracle.planned(core.token, plan, free_choice=True, fresh=self.fresh, quarantined=quarantined)
        reshard = strict is None or sched.chance(self.cluster.weather.reshards)
        self._open(plan, expected, world, lambda token: self._begin(token, plan, where, reshard))

    def _begin(self, token: Token, plan: RestorePlan, where: dict[int, SimNode], reshard: bool) -> None:
        self.fresh = False
        self.runs += 1
        self.reshards += plan.checkpoint is not None and plan.world != len(where)
        self.restored_from.append(plan.checkpoint)
        self.run = Run(self, token, plan, where, reshard)
        if plan.step >= self.target:
            self.target = plan.step + self.cluster.sched.rng.randint(2, 8)
        self.run.restore()

    def _roll_back(self) -> None:
        """`baftd restore --at-most`: an epoch of the operator's own, which no process has."""
        sched, core = self.cluster.sched, self.cluster.coordinator.core
        assert core is not None
        expected, quarantined = core.history.epoch, core.history.quarantined
        at_most = max(1, core.history.highest_step - sched.rng.randint(0, 6))
        try:
            plan = core.plan(self.inventories(), at_most=at_most)
        except NothingRestorable:
            return
        self.cluster.oracle.planned(core.token, plan, free_choice=False, fresh=False, quarantined=quarantined)
        self.rollbacks += 1
        self._open(plan, expected, plan.world, lambda token: None)

    def _open(self, plan: RestorePlan, expected: int, world: int, then: Callable[[Token], None]) -> None:
        self.cluster.sched.at(self.cluster.sched.rng.uniform(0.0, 0.4), self._really_open, plan, expected, world, then)
        self.run = None

    def _really_open(self, plan: RestorePlan, expected: int, world: int, then: Callable[[Token], None]) -> None:
        sched, coordinator = self.cluster.sched, self.cluster.coordinator
        core = coordinator.core
        if core is None or (self.run is not None and not self.run.over):
            return
        token = Token(expected + 1, f"{sched.rng.getrandbits(128):032x}")
        self.cluster.origins[token] = plan.token
        try:
            ready = core.open_epoch(token.incarnation, plan, world=world, expected=expected, now=sched.now)
        except (EpochConflict, UsageError) as error:
            if sched.tracing:
                sched.trace("launcher", f"cannot open an epoch: {error}")
            return
        if sched.tracing:
            sched.trace("launcher", f"opens {shorten(token)} from {plan.checkpoint}; passed over: {plan.passed_over}")
        coordinator.execute(ready)
        if coordinator.core is not core:
            return
        self.cluster.oracle.begins(token, plan.checkpoint)
        then(token)
