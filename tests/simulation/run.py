"""One seeded run: a cluster, a few dozen steps, a handful of faults, then peace, in which it must go on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from baftd.checkpoint.commit import Policy
from tests.simulation.cluster import Cluster, Rules, SimCoordinator, SimNode, Weather
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import Scheduler, Violation
from tests.simulation.training import Launcher
from tests.simulation.world import DurableDirectory, Machine

__all__ = ["Outcome", "simulate"]


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    events: int
    commits: int
    runs: int
    rollbacks: int
    reshards: int = 0
    changes: int = 0
    """Of the cadence."""
    violation: str = ""
    trace: list[str] = field(default_factory=list)


def simulate(
    seed: int,
    *,
    rules: Rules | None = None,
    trace: bool = False,
    trouble: float = 14.0,
    stress: tuple[str, ...] = (),
) -> Outcome:
    """Run one seed for `trouble` seconds of virtual time with faults, then until it has committed again.

    `stress` names kinds of faults (`_Faults.kinds`, "loss", "reshard" or "plans") that are to strike more than others.
    """
    sched = Scheduler(seed, trace=trace)
    rng = sched.rng
    count, per = rng.choice([(1, 2), (2, 1), (2, 1), (2, 2), (3, 1)])
    world = count * per
    durable_on = rng.random() < 0.6
    # Of its own, as `plans` below: what is drawn for it changes nothing else.
    words = random.Random(f"{seed} cadence")
    policy = Policy(
        interval_fixed=words.random() < 0.3,
        interval=1 if rng.random() < 0.8 else 2,
        durable=durable_on,
        durable_steps=rng.choice([2, 3, 5]) if durable_on else None,
        durable_seconds=rng.choice([None, 3.0]) if durable_on else None,
    )
    machines = {f"n{index}": Machine(f"n{index}") for index in range(count)}
    durable = DurableDirectory()
    oracle = Oracle(machines, durable)
    slots = 4 if durable_on else 3
    cluster = Cluster(sched, rules or Rules(), oracle, machines, durable, policy, slots)
    cluster.weather = Weather.draw(rng, len(_Faults.kinds))
    sched.loss, sched.doubled = rng.choice([0.0, 0.08, 0.25]), rng.choice([0.0, 0.06, 0.25])
    sched.late = rng.choice([0.0, 0.08, 0.2])
    if stress:
        cluster.weather.faults = tuple(8 if kind in stress else 1 for kind in _Faults.kinds)
        sched.loss = 0.35 if "loss" in stress else sched.loss
        cluster.weather.reshards = 0.8 if "reshard" in stress else cluster.weather.reshards
    plans = random.Random(f"{seed} plans")
    cluster.weather.divisions = 0.4 if "plans" in stress else plans.choice([0.0, 0.0, 0.1, 0.4])
    cluster.plans = plans
    cluster.coordinator = SimCoordinator(cluster)
    for name, machine in machines.items():
        cluster.nodes[name] = SimNode(cluster, machine)
        cluster.nodes[name].boot()
    launcher = Launcher(cluster, target=rng.randint(4, 30), world=world, most=max(world, 4))
    outcome = Outcome(seed, 0, 0, 0, 0)
    try:
        launcher.tick()
        _coordinator_timer(cluster)
        faults = _Faults(cluster, launcher, words)
        for _ in range(rng.randint(6, 10) if stress else rng.randint(1, 8)):
            sched.at(rng.uniform(0.5, trouble), faults.strike)
        if rng.random() < 0.25:
            faults.three_crashes(rng.uniform(2.0, trouble / 2))
        sched.run(trouble, oracle.check)
        faults.heal()
        faults.change_the_cadence()
        _must_commit(cluster)
        _must_be_tidy(cluster, launcher)
    except Violation as violation:
        outcome.violation = f"at {sched.now:.3f} s: {violation}"
        if trace:
            sched.trace("VIOLATION", str(violation))
    outcome.events, outcome.commits = sched.events, oracle.commits
    outcome.runs, outcome.rollbacks, outcome.reshards = launcher.runs, launcher.rollbacks, launcher.reshards
    outcome.changes = sum(record["k"] == "cadence" for record in cluster.coordinator.journal)
    outcome.trace = sched.lines
    return outcome


def _must_commit(cluster: Cluster) -> None:
    """Without faults the job commits step after step again, soon, and makes some of them durable."""
    sched, oracle = cluster.sched, cluster.oracle
    deadline = sched.now + 40.0
    commits, durable = oracle.commits + 4, oracle.durable_commits + (1 if cluster.policy.durable else 0)
    while oracle.commits < commits or oracle.durable_commits < durable:
        if sched.now >= deadline:
            what = "commit" if oracle.commits < commits else "make durable"
            raise Violation(f"the job does not {what} anything any more, though nothing fails")
        sched.run(sched.now + 1.0, oracle.check)


def _must_be_tidy(cluster: Cluster, launcher: Launcher) -> None:
    """What an earlier start of more ranks has left is gone, once every node has heard of a commit of the last one."""
    run = launcher.run
    if run is not None and run.training and not run.over:
        cluster.sched.run(cluster.sched.now + 2.0, cluster.oracle.check)
    if run is launcher.run and run is not None and run.training and not run.over and run.step > run.plan.step + 4:
        cluster.oracle.remains(run.world)


def _coordinator_timer(cluster: Cluster) -> None:
    cluster.coordinator.call("tick")
    cluster.sched.at(0.6, _coordinator_timer, cluster)


class _Faults:
    """What goes wrong."""

    kinds = ("_rank", "_daemon", "_machine", "_coordinator", "_wipe", "_flip", "_cadence", "_both", "_all", "_start")

    def __init__(self, cluster: Cluster, launcher: Launcher, words: random.Random) -> None:
        """`words` draws what nodes propose."""
        self.cluster = cluster
        self.launcher = launcher
        self.words = words

    def strike(self) -> None:
        """Something happens, at random."""
        name = self.cluster.sched.rng.choices(self.kinds, self.cluster.weather.faults)[0]
        getattr(self, name)()

    def three_crashes(self, at: float) -> None:
        """Crash three times around one step number."""
        sched = self.cluster.sched
        for index in range(3):
            sched.at(at + index * sched.rng.uniform(2.0, 3.0), self._all)

    def _rank(self) -> None:
        run = self.launcher.run
        if run is not None and run.processes and not run.over:
            self.cluster.sched.rng.choice(list(run.processes.values())).vanish()

    def _all(self) -> None:
        run = self.launcher.run
        if run is not None and run.training and not run.over:
            for process in run.processes.values():
                if self.cluster.sched.chance(0.9):
                    process.vanish()
            run.end("all ranks crash")

    def _start(self) -> None:
        """A start is given up while its ranks load."""
        run = self.launcher.run
        if run is not None and not run.training and not run.over:
            run.end("killed while it loads")

    def _daemon(self) -> None:
        rng = self.cluster.sched.rng
        node = rng.choice(list(self.cluster.nodes.values()))
        if node.core is not None:
            node.kill_daemon()
            self.cluster.sched.at(rng.uniform(0.05, 3.0), node.start_daemon)

    def _machine(self) -> None:
        sched = self.cluster.sched
        node = sched.rng.choice(list(self.cluster.nodes.values()))
        if not node.machine.up:
            return
        incarnation = node.machine.incarnation
        node.power_off()
        if sched.chance(0.6):  # the lease runs out
            sched.at(
                sched.rng.uniform(0.0, 1.0),
                self.cluster.coordinator.call,
                "node_lost",
                node.name,
                incarnation,
                "its lease has run out",
            )
        sched.at(sched.rng.uniform(0.3, 2.0), self._boot, node)

    def _boot(self, node: SimNode) -> None:
        if not node.machine.up:
            node.boot()

    def _coordinator(self) -> None:
        if self.cluster.coordinator.core is not None:
            self.cluster.coordinator.crash(wiped=False, away=self.cluster.sched.rng.choice([0.05, 1.0, 4.0]))

    def _wipe(self) -> None:
        if self.cluster.coordinator.core is not None:
            self.cluster.coordinator.crash(wiped=True, away=self.cluster.sched.rng.choice([0.05, 1.0, 4.0]))

    def _both(self) -> None:
        self._all()
        for node in self.cluster.nodes.values():
            if node.core is not None:
                node.kill_daemon()
                self.cluster.sched.at(self.cluster.sched.rng.uniform(0.05, 1.0), node.start_daemon)

    def _flip(self) -> None:
        """A bit flips in a verified slot, or in a durable shard."""
        cluster, rng = self.cluster, self.cluster.sched.rng
        places = [
            (node.name, rank, slot.index)
            for node in cluster.nodes.values()
            if node.core is not None
            for rank, table in sorted(node.core.tables.items())
            for slot in table.contents()
        ]
        if places and rng.random() < 0.7:
            name, rank, slot = rng.choice(places)
            held = cluster.machines[name].slots[(rank, slot)]
            assert held.header.shard is not None
            cluster.oracle.damaged.add((held.header.shard.token, held.header.shard.step))
            held.content = (-1, rng.getrandbits(20))
        elif cluster.durable.checkpoints:
            checkpoint = rng.choice(sorted(cluster.durable.checkpoints))
            entry = cluster.durable.checkpoints[checkpoint]
            if entry.shards:
                rank = rng.choice(sorted(entry.shards))
                cluster.oracle.damaged.add((entry.token, checkpoint.step))
                entry.shards[rank] = (entry.shards[rank][0], (-1, rng.getrandbits(20)))

    def _cadence(self) -> None:
        """The operator has set another interval, or a node finds that its ranks need one."""
        core = self.cluster.coordinator.core
        if not self.cluster.policy.interval_fixed:
            self._propose()
        elif core is not None and core.token is not None:
            self.cluster.coordinator.execute(core.set_cadence(self.cluster.sched.rng.choice([1, 2, 3])))

    def _propose(self) -> None:
        node = self.words.choice(sorted(self.cluster.nodes))
        self.cluster.nodes[node].propose(self.words.choice([1, 1, 2, 3]), self.words.choice([0, 0, 3, 6]))

    def change_the_cadence(self) -> None:
        """In peace nodes change their minds, and all ranks agree about every step all the same."""
        self.cluster.oracle.calm_from = self.cluster.sched.now + 2.0  # what was lost before is heard of by then
        if not self.cluster.policy.interval_fixed:
            for _ in range(self.words.randint(1, 4)):
                self.cluster.sched.at(self.words.uniform(0.0, 4.0), self._propose)

    def heal(self) -> None:
        """From now on nothing fails: what is down comes up, stale processes die."""
        cluster = self.cluster
        cluster.weather = Weather.fair()
        cluster.sched.lossy = False
        if cluster.sched.tracing:
            cluster.sched.trace("world", "PEACE")
        for process in list(cluster.processes.values()):
            if process.zombie:
                process.vanish()
        if cluster.coordinator.core is None:
            cluster.coordinator.start()
        for node in cluster.nodes.values():
            if not node.machine.up:
                node.boot()
            elif node.core is None:
                node.start_daemon()
