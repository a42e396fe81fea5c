"""How the death of a training process is seen: at once by pidfd; by its record lock where the PID cannot be seen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baftd.daemon.clients import Client, ClientTable
from baftd.errors import RankError
from baftd.memory.processes import start_time
from baftd.wire.server import Peer

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def holder(lock: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def client(process: subprocess.Popen[bytes], rank: int = 0, **changes: object) -> Client:
    fields: dict[str, object] = {
        "job": "gpt",
        "incarnation": "a" * 32,
        "rank": rank,
        "world": 2,
        "pid": process.pid,
        "pid_start": start_time(process.pid),
        "peer": Peer(b"%d" % process.pid, os.getuid(), os.getgid(), process.pid),
        **changes,
    }
    return Client(**fields)  # type: ignore[arg-type]


class Deaths:
    def __init__(self) -> None:
        self.seen: list[Client] = []
        self.event = asyncio.Event()

    def __call__(self, client: Client) -> None:
        self.seen.append(client)
        self.event.set()


def table(deaths: Deaths) -> ClientTable:
    return ClientTable(deaths, clock=time.monotonic, last_heard=lambda peer: time.monotonic())


def test_a_death_is_seen_at_once_and_told_once() -> None:
    async def story() -> None:
        deaths = Deaths()
        clients = table(deaths)
        process = sleeper()
        known = clients.add(client(process))
        assert clients.add(client(process)) is known
        assert clients.still_alive(known)
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(deaths.event.wait(), 5)
        process.communicate()
        assert deaths.seen == [known]
        assert known.state == "dead"
        assert not known.alive
        clients.dead(known)
        assert len(deaths.seen) == 1
        clients.close()

    asyncio.run(story())


def test_one_that_has_finished_may_end() -> None:
    async def story() -> None:
        deaths = Deaths()
        clients = table(deaths)
        process = sleeper()
        known = clients.add(client(process))
        known.state = "finished"
        process.kill()
        process.communicate()
        for _ in range(100):
            if not known.alive:
                break
            await asyncio.sleep(0.01)
        assert not known.alive
        assert known.state == "finished"
        assert deaths.seen == []
        clients.close()

    asyncio.run(story())


def test_a_rank_of_a_live_process_is_not_given_away_and_that_of_a_dead_one_is() -> None:
    async def story() -> None:
        deaths = Deaths()
        clients = table(deaths)
        first, second = sleeper(), sleeper()
        clients.add(client(first))
        with pytest.raises(RankError, match=f"pid {first.pid} and by pid {second.pid}"):
            clients.add(client(second))
        first.kill()
        first.communicate()
        taken = clients.add(client(second))
        assert clients.find("gpt", "a" * 32, 0) is taken
        assert len(deaths.seen) == 1
        second.kill()
        second.communicate()
        clients.close()

    asyncio.run(story())


def test_without_a_visible_pid_the_lock_tells(shm_path: Path) -> None:
    async def story() -> None:
        lock = shm_path / "rank-00000.lock"
        lock.touch()
        process = holder(lock)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        deaths = Deaths()
        clients = table(deaths)
        known = clients.add(client(process, visible=False, pid=process.pid, lock_path=str(lock)))
        assert clients.still_alive(known)
        process.kill()
        process.communicate()
        await asyncio.wait_for(deaths.event.wait(), 10)
        assert deaths.seen == [known]
        clients.close()

    asyncio.run(story())
