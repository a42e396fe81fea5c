"""A forked child (a data loader's worker) holds nothing of its parent's session, and the parent's goes on."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baft_client.source import OutcomeKind
from baftd.errors import UsageError
from baftd.memory.processes import lock_holder
from baftd.wire.messages import Seal
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import Places, Trainer


@pytest.fixture
def daemon(where: Places) -> Iterator[ScriptedDaemon]:
    with where.daemon() as running:
        lock = where.shm / "rank-00000.lock"
        lock.touch()
        running.lock_path = str(lock)
        yield running


def in_child(work: Callable[[], Any], timeout: float = 20.0) -> Any:
    """What `work` returns in a forked child, which then ends at once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    try:
        data = b""
        deadline = time.monotonic() + timeout
        while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                return json.loads(data)
            data += part
        raise AssertionError(f"the child did not answer within {timeout} s: a deadlock")
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def holdings(where: Places) -> list[str]:
    """Descriptors, mappings and connections of this process that belong to the session."""
    import socket

    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if str(where.shm) in target:
            found.append(f"{name} -> {target}")
        if target.startswith("socket:"):
            probe = socket.socket(fileno=os.dup(int(name)))
            try:
                if probe.family == socket.AF_UNIX and probe.getpeername() == str(where.socket):
                    found.append(f"{name} -> connection to the daemon")
            except OSError:
                pass
            finally:
                probe.close()
    found += [line.strip() for line in Path("/proc/self/maps").read_text().splitlines() if str(where.shm) in line]
    return found


@pytest.mark.parametrize("moment", ["attached", "restoring", "training", "copying"])
def test_a_child_holds_nothing_and_the_parent_goes_on(where: Places, daemon: ScriptedDaemon, moment: str) -> None:
    with Trainer(where) as trainer:
        trainer.session._link.wait_up(5)
        if moment == "restoring":
            trainer.session.resume()
        elif moment != "attached":
            trainer.join()
            assert trainer.one_step().kind is OutcomeKind.SEALED
            trainer.wait_for_grant()
            if moment == "copying":
                assert trainer.boundary().kind is OutcomeKind.BEGAN
        parents = holdings(where)
        assert any("connection" in line for line in parents), "the test must be able to see it"
        # The scripted daemon lives in this process too, and its descriptors are inherited: only they may be left.
        daemons = tuple(f"{file.fd} -> " for shard in daemon.ranks.values() for file in shard.files)
        left = in_child(lambda: holdings(where))
        assert [line for line in left if not line.startswith(daemons)] == []
        if moment == "restoring":
            trainer.session.restored()
        elif moment == "copying":
            assert trainer.fence().kind is OutcomeKind.SEALED
        if moment in ("training", "copying"):
            trainer.wait_for_grant()
            assert trainer.one_step().kind is OutcomeKind.SEALED
            assert trainer.session.settle(5)


def test_a_childs_session_is_inert(where: Places, daemon: ScriptedDaemon) -> None:
    def calls(trainer: Trainer) -> list[str]:
        session = trainer.session
        results = [trainer.boundary().reason, trainer.fence().kind.value, str(session.finish())]
        session.leave("child")
        session.close()
        try:
            session.save()
        except UsageError as error:
            results.append(str(error))
        results.append(str(session.due(5)))
        return results

    with Trainer(where) as trainer:
        trainer.join()
        trainer.boundary()
        said = in_child(lambda: calls(trainer))
        assert said[0].startswith("forked")
        assert said[1:3] == ["nothing", "None"]
        assert "belongs to the parent" in said[3]
        assert said[4] == "False"
        assert trainer.fence().kind is OutcomeKind.SEALED
        assert daemon.wait_for(Seal)[0].step == 1


def test_forks_at_any_moment_deadlock_nobody(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where, size=50_000) as trainer:
        trainer.join()
        for _ in range(30):
            trainer.boundary()
            assert in_child(lambda: 7) == 7
            trainer.fence()
        assert trainer.session.settle(5)
        assert trainer.session.counters.sealed >= 15


def test_the_lock_is_held_and_not_shared_with_a_child(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.session._link.wait_up(5)

        def child() -> bool:
            with open(daemon.lock_path, "r+b") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return False
                return True

        assert in_child(child) is False, "the parent holds it, the child does not"
        assert in_child(lambda: lock_holder(daemon.lock_path)) == os.getpid()
    assert in_child(child) is True


TRAINER = """
import os, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2].split(":")
from tests.support.trainer import Places, Trainer
where = Places.__new__(Places)
where.base, where.shm, where.socket = Path(sys.argv[1]).parent.parent, Path(sys.argv[3]), Path(sys.argv[1])
trainer = Trainer(where).join()
trainer.one_step()
assert trainer.session.settle(10)
worker = os.fork()
if worker == 0:
    print(os.getpid(), flush=True)  # the handlers of the fork have run by now
    time.sleep(60)  # a loader worker that outlives its trainer
    os._exit(0)
time.sleep(60)
"""


def test_death_of_a_trainer_is_seen_while_its_worker_lives_on(where: Places, daemon: ScriptedDaemon) -> None:
    root = Path(__file__).parents[2]
    roots = f"{root}:{root / 'clients'}"
    command = [sys.executable, "-c", TRAINER, str(where.socket), roots, str(where.shm)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        worker = 0
        try:
            assert trainer.stdout is not None
            worker = int(trainer.stdout.readline())
            assert lock_holder(daemon.lock_path) == trainer.pid
            assert daemon.server is not None
            peer = daemon.peers[0]
            trainer.kill()
            trainer.wait(10)
            os.kill(worker, 0)
            assert lock_holder(daemon.lock_path) is None, "a worker must not keep the lock"
            for path in (f"/proc/{worker}/maps", *(f"/proc/{worker}/fd/{n}" for n in os.listdir(f"/proc/{worker}/fd"))):
                text = Path(path).read_text() if path.endswith("maps") else os.readlink(path)
                assert str(where.shm) not in text
            # the connection is gone: what is sent to it has no route
            deadline = time.monotonic() + 5
            assert daemon._loop is not None
            while daemon.server.last_heard(peer) != float("-inf"):
                from baftd.wire.messages import Ping

                daemon._loop.call_soon_threadsafe(daemon.server.send, peer, Ping())
                assert time.monotonic() < deadline, "a worker must not keep the connection"
                time.sleep(0.02)
        finally:
            trainer.kill()
            if worker:
                os.kill(worker, signal.SIGKILL)


def test_the_interpreter_ends_cleanly_without_close(where: Places, daemon: ScriptedDaemon) -> None:
    root = Path(__file__).parents[2]
    code = TRAINER.split("worker = os.fork()")[0] + "trainer.boundary()\nprint('done', flush=True)\n"
    command = [sys.executable, "-c", code, str(where.socket), f"{root}:{root / 'clients'}", str(where.shm)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
    from baftd.wire.messages import Leave, Skip

    assert daemon.wait_for(Leave)[0].reason == "the process ends"
    assert daemon.wait_for(Skip)[0].step == 2
