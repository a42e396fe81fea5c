"""One rank of a job of bench/overhead.py. Run with one JSON argument; writes its record as JSON where that says.

Each step belongs to one contestant. Which steps are baftd's its daemon decides (its cadence and its probes, the steps
it leaves free on purpose); the other steps are drawn, alike on all ranks, from the contestants of the argument.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _contestants import Contestant, make_contestants, same_on_all
from _workloads import Marking, Operations, all_reduced_norm, make_schedule, state_of

import baft_torch

FIRST = 3
"""Steps before anything is measured: allocations, connections, the first layout."""


def _busy() -> float:
    """CPU seconds of all processes of the machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Rank:
    """The training loop."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        made = make_schedule(spec, self.rank, self.world)
        self.schedule, self.modules, stages, self.source, self.target = made
        self.operations = Operations(stages)
        self.optimizer = Marking(self.modules)
        self.inputs = () if self.source is None else (self.source,)
        self.keywords = {} if self.target is None else {"target": self.target}
        self.contestants: dict[str, Contestant] = {}
        self.absent: dict[str, str] = {}
        self.ckpt: Any = None
        self.skipped: dict[str, int] = {}
        self.steps: list[dict[str, Any]] = []
        self.until = time.monotonic() + spec["seconds"]

    def train(self) -> None:
        """Forward, backward and what a trainer does with gradients before the update."""
        self.schedule.step(*self.inputs, **self.keywords)
        all_reduced_norm(self.modules)

    def update(self) -> None:
        """The update."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, directory: Path) -> None:
        """Warm up, then measure until the time is over or there are steps enough."""
        spec = self.spec
        if spec["baftd"]:
            self.ckpt = baft_torch.attach(self.modules, self.optimizer, job=spec["job"], schedule=self.schedule)
            self.ckpt.resume()
        for _ in range(FIRST):
            self.train()
            self.update()
            if self.ckpt is not None:
                self.ckpt.step()
                self.ckpt._session.settle(60.0)  # the first layouts, so that every rank has a slot from the start
        made, self.absent = make_contestants(spec["contestants"], state_of(self.modules), directory)
        self.contestants = {name: made[name] for name in sorted(same_on_all(set(made)))}
        drawn = [name for name in spec["contestants"] if name in self.contestants] + ["none"] * spec["none_weight"]
        number = 0
        while self._goes_on(number):
            self._step(number, drawn if number >= spec["settle"] else ["none"])
            number += 1
        for contestant in self.contestants.values():
            contestant.close()

    def _goes_on(self, number: int) -> bool:
        """Rank 0 has the clock; every tenth step it tells the others."""
        if number % 10 or number < 10:
            return True
        over = torch.tensor([float(time.monotonic() > self.until or number >= self.spec["steps"])])
        dist.broadcast(over, 0)
        return not over.item()

    def _step(self, number: int, drawn: list[str]) -> None:
        cpu, busy = time.process_time(), _busy()
        daemon = _cpu_of(self.spec["daemon"]) if self.rank == 0 and self.spec["daemon"] else 0.0
        begin = time.perf_counter()
        mode, boundary = "none", -1
        if self.ckpt is not None:
            began = self.ckpt.counters.began
            self.ckpt.step()
            boundary = self.ckpt.steps
            if self.ckpt.counters.began > began:
                mode = "ours"
            elif self.ckpt.counters.skipped != self.skipped:
                mode = "skipped"
            self.skipped = dict(self.ckpt.counters.skipped)
        if mode == "none":
            mode = random.Random(f"{self.spec['job']}-{number}").choice(drawn)
        contestant = self.contestants.get(mode)
        if contestant is not None:
            self._begin(contestant, number, mode)
        self.train()
        if contestant is not None:
            contestant.fence()
        fence = time.perf_counter()
        self.update()
        end = time.perf_counter()
        record: dict[str, Any] = {
            "number": number, "mode": mode, "begin": begin, "fence": fence, "end": end, "boundary": boundary,
            "cpu": time.process_time() - cpu, "busy": _busy() - busy,
        }  # fmt: skip
        if self.rank == 0 and self.spec["daemon"]:
            record["daemon"] = _cpu_of(self.spec["daemon"]) - daemon
        if mode == "ours":
            record["held_ms"] = self.ckpt.counters.last_held_ms
        self.steps.append(record)
        if contestant is not None and mode != "none":
            contestant.settle()
            dist.barrier()

    def _begin(self, contestant: Contestant, number: int, mode: str) -> None:
        """Another way to checkpoint makes a step slow that has no snapshot of baftd's: its daemon, which compares steps
        with and without one, is told that this one is apart."""
        if self.ckpt is None or mode == "none":
            contestant.begin(number)
            return
        with self.ckpt.paused():
            contestant.begin(number)

    def record(self) -> dict[str, Any]:
        """What is written for the parent."""
        said: dict[str, Any] = {
            "rank": self.rank,
            "absent": self.absent,
            "steps": self.steps,
            "operations": self.operations.seen,
            "state": sum(tensor.nbytes for tensor in state_of(self.modules).values()),
        }
        if self.ckpt is not None:
            counters = self.ckpt.counters
            said["counters"] = {"began": counters.began, "sealed": counters.sealed, "torn": counters.torn,
                                "skipped": counters.skipped}  # fmt: skip
        return said


def main() -> None:
    """Train as the JSON argument says."""
    os.setpgid(0, 0)  # with all that peers start, so that the parent can end them
    spec = json.loads(sys.argv[1])
    signal.alarm(int(spec["seconds"]) + 300)  # nothing waits for ever, whatever a peer does
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    importlib.import_module("torch.distributed.checkpoint")
    rank = Rank(spec)
    directory = Path(spec["scratch"]) / f"rank{rank.rank}"
    directory.mkdir(parents=True)
    rank.run(directory)
    if rank.ckpt is not None:
        rank.ckpt.close()
    Path(spec["record"]).with_suffix(f".{rank.rank}").write_text(json.dumps(rank.record()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
