"""The story that scripts/quickstart.sh tells: train, crash, restore, go on, compare. Exits with 0 only if all is equal.

Starts a daemon of its own in directories of its own, runs scripts/examples/pipeline_gpt.py as two processes, and ends
everything it started, by PID.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".quickstart"
LOGS = HOME / "logs"
BAFTD = str(Path(sys.executable).parent / "baftd")
TRAINER = ROOT / "scripts" / "examples" / "pipeline_gpt.py"
RANKS = 2
GRACE = 15.0
"""Seconds that a rank may take to notice that another one is gone."""


class Failed(Exception):
    """The quickstart did not show what it promises; the message says why."""


def say(text: str = "") -> None:
    """A line for the person who watches."""
    print(text, flush=True)


def baftd(*arguments: str, env: dict[str, str], timeout: float = 60.0) -> str:
    """Run the command line as a user would; its output. Raises Failed with what it said."""
    done = subprocess.run([BAFTD, *arguments], env=env, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise Failed(f"`baftd {' '.join(arguments)}` exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Line:
    """One step as a rank logged it."""

    step: int
    loss: str
    """Hexadecimal: equal means equal in every bit."""
    seconds: float


class Run:
    """One start of the training: two processes, their logs."""

    def __init__(self, title: str, job: str, steps: int, env: dict[str, str], *, every: int = 1) -> None:
        self.title = title
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(RANKS):
            self._path(rank, "steps").unlink(missing_ok=True)
            command = [sys.executable, str(TRAINER), "--job", job, "--steps", str(steps), "--every", str(every)]
            own = {
                **env,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            with self._path(rank, "log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, "--log", str(self._path(rank, "steps"))],
                        env=own,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def _path(self, rank: int, kind: str) -> Path:
        return LOGS / f"{self.title}-rank{rank}.{kind}"

    def lines(self, rank: int) -> list[Line]:
        """What a rank has logged so far, whole lines only."""
        path = self._path(rank, "steps")
        text = path.read_text() if path.exists() else ""
        rows = [row.split() for row in text[: text.rfind("\n") + 1].splitlines()]
        return [Line(int(step), loss, float(seconds)) for step, loss, seconds in rows]

    def losses(self) -> dict[int, str]:
        """By step; the last stage knows them."""
        return {line.step: line.loss for line in self.lines(RANKS - 1)}

    def output(self, rank: int) -> str:
        """Everything a rank has printed."""
        return self._path(rank, "log").read_text(errors="replace")

    def wait_for_step(self, step: int, timeout: float) -> None:
        """Until every rank has logged `step`, showing a loss now and then."""
        self._watch(lambda: all(self._reached(rank) >= step for rank in range(RANKS)), timeout)

    def wait(self, timeout: float) -> None:
        """Until every rank has ended well."""
        self._watch(lambda: all(process.poll() is not None for process in self.processes), timeout)

    def _reached(self, rank: int) -> int:
        lines = self.lines(rank)
        return lines[-1].step if lines else -1

    def _watch(self, done: object, timeout: float) -> None:
        assert callable(done)
        deadline = time.monotonic() + timeout
        shown = -1
        while not done():
            for rank, process in enumerate(self.processes):
                if process.poll() not in (None, 0):
                    raise Failed(f"rank {rank} ended with {process.returncode}:\n{self.output(rank)[-3000:]}")
            if time.monotonic() > deadline:
                raise Failed(f"the run {self.title!r} took more than {timeout:g} s; see {LOGS}")
            lines = self.lines(RANKS - 1)
            if lines and lines[-1].step // 40 > shown:
                shown = lines[-1].step // 40
                say(f"      step {lines[-1].step + 1:4}   loss {float.fromhex(lines[-1].loss):.4f}")
            time.sleep(0.05)

    def end(self) -> None:
        """End what still runs, by PID."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def resumed(run: Run) -> tuple[int, float]:
    """(step, seconds) that `resume()` reported; the slower rank's time."""
    found = []
    for rank in range(RANKS):
        line = next(line for line in run.output(rank).splitlines() if line.startswith("resumed "))
        fields = dict(part.split("=") for part in line.split()[1:])
        found.append((int(fields["step"]), float(fields["seconds"])))
    if len({step for step, _ in found}) != 1:
        raise Failed(f"the ranks resumed at different steps: {found}")
    return found[0][0], max(seconds for _, seconds in found)


def overhead(run: Run) -> tuple[float, float, int]:
    """(relative cost of a snapshot, its standard error, pairs): each step with one against its two neighbours without.

    The run took a boundary after every second step, whose copy falls into the step that follows.
    """
    lines = {line.step: line.seconds for line in run.lines(RANKS - 1)}
    ratios = [
        lines[step] / ((lines[step - 1] + lines[step + 1]) / 2) - 1
        for step in range(10, max(lines), 2)
        if {step - 1, step, step + 1} <= set(lines)
    ]
    error = 1.2533 * stdev(ratios) / len(ratios) ** 0.5  # of a median
    return median(ratios), error, len(ratios)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One quickstart at a time in a checkout: they would share .quickstart/. Raises Failed where one runs."""
    place = os.open(ROOT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"another quickstart runs in {ROOT}. Wait until it has ended.") from None
        yield
    finally:
        os.close(place)


@contextlib.contextmanager
def daemon(steps: int) -> Iterator[dict[str, str]]:
    """A daemon in directories of its own; the environment of processes that shall find it."""
    checkout = hashlib.blake2b(str(ROOT).encode(), digest_size=4).hexdigest()
    shm = Path(f"/dev/shm/baftd-quickstart-{os.getuid()}-{checkout}")
    clean_up_after_a_killed_one(shm)
    for path in (HOME, LOGS):
        path.mkdir(parents=True)
    run_dir = Path(tempfile.mkdtemp(prefix="baftd-qs-", dir="/tmp"))  # short: a socket's path has 107 bytes at most
    (HOME / "run-dir").write_text(f"{run_dir}\n")
    (HOME / "shm-dir").write_text(f"{shm}\n")
    shm.mkdir(mode=0o700)
    env = {key: value for key, value in os.environ.items() if not key.startswith("BAFTD_")}
    env |= {
        "BAFTD_RUN_DIR": str(run_dir),
        "BAFTD_STATE_DIR": str(HOME / "state"),
        "BAFTD_SHM_DIR": str(shm),
        "BAFTD_DURABLE_DIR": str(HOME / "durable"),
        "BAFTD_DURABLE_EVERY": f"{steps // 4} steps",
        "BAFTD_MEMORY_RESERVE": "4 MiB",
        "BAFTD_INTERVAL": "1 step",  # these steps are too short for what a snapshot costs to be 1 % of them
        "GLOO_SOCKET_IFNAME": "lo",
    }
    (HOME / "durable").mkdir()
    try:
        baftd("start", env=env)
        yield env
    finally:
        with contextlib.suppress(Failed, subprocess.TimeoutExpired):
            baftd("stop", "--force", env=env)
        shutil.copy(run_dir / "baftd.log", LOGS / "daemon.log") if (run_dir / "baftd.log").exists() else None
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def clean_up_after_a_killed_one(shm: Path) -> None:
    """End the daemon of an earlier quickstart that was killed itself, and remove what it left."""
    with contextlib.suppress(OSError, Failed, subprocess.TimeoutExpired):
        run_dir = Path((HOME / "run-dir").read_text().strip())
        if run_dir.name.startswith("baftd-qs-") and run_dir.exists():
            with contextlib.suppress(Failed):
                baftd("stop", "--force", "--run-dir", str(run_dir), env=dict(os.environ))
            shutil.rmtree(run_dir, ignore_errors=True)
    shutil.rmtree(shm, ignore_errors=True)
    shutil.rmtree(HOME, ignore_errors=True)


def story(steps: int, env: dict[str, str], runs: list[Run]) -> None:
    """All of it; raises Failed where it does not end well."""
    began = time.monotonic()
    say(f"1/5  a daemon of its own: slots in {env['BAFTD_SHM_DIR']}, durable checkpoints in {HOME / 'durable'}")
    say(f"2/5  the uninterrupted run, {steps} steps (a snapshot at every second one, to see what it costs)")
    whole = Run("uninterrupted", "gpt-uninterrupted", steps, env, every=2)
    runs.append(whole)
    whole.wait(300.0)

    at = int(steps * 0.7)
    say(f"3/5  the same again: a snapshot at every step, a durable checkpoint every {steps // 4}")
    crashed = Run("crashed", "gpt", steps, env)
    runs.append(crashed)
    crashed.wait_for_step(at, 300.0)
    time.sleep(random.SystemRandom().uniform(0.0, 1.5) * crashed.lines(1)[-1].seconds)
    victim = crashed.processes[1]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    complete = min(crashed.lines(rank)[-1].step for rank in range(RANKS)) + 1
    say(f"      kill -9 {victim.pid} (rank 1) in step {complete + 1}")
    try:
        crashed.processes[0].wait(GRACE)
    except subprocess.TimeoutExpired:
        say("      rank 0 waits for it; a launcher would end rank 0 now, and so do we")
        crashed.end()
    else:
        say(f"      rank 0 noticed and ended with {crashed.processes[0].returncode}")

    say("4/5  baftd restore --job gpt")
    began_restore = time.perf_counter()
    plan = baftd("restore", "--job", "gpt", env=env)
    for line in plan.splitlines():
        say(f"      {line}" if line else "")
    restore_seconds = time.perf_counter() - began_restore

    say("5/5  the trainers again")
    again = Run("resumed", "gpt", steps, env)
    runs.append(again)
    again.wait(300.0)
    first, resume_seconds = resumed(again)
    if f"step {first} " not in plan:
        raise Failed(f"the trainers resumed at step {first}, which is not what `baftd restore` had fixed")
    compare(steps, first, whole, crashed, again)
    cost, error, pairs = overhead(whole)
    say(f"\nsteps lost to the crash   {complete - first}  ({complete} were complete; {first} were restored)")
    took = f"`baftd restore` {restore_seconds:.2f} s, then resume() {resume_seconds:.2f} s"
    say(f"restore time              {restore_seconds + resume_seconds:.2f} s  ({took})")
    against = f"{pairs} steps with one, each against its neighbours without"
    say(f"overhead of snapshots     {100 * cost:+.1f} % +- {100 * error:.1f} of a step  ({against})")
    say(f"losses                    bit-identical  ({steps - first} after the restart, {complete} before the crash)")
    say(f"\nAll of this took {time.monotonic() - began:.0f} s. Logs are in {LOGS}")


def compare(steps: int, first: int, whole: Run, crashed: Run, again: Run) -> None:
    """Every loss of the second start, and of the first, with those of the uninterrupted run."""
    expected, before, after = whole.losses(), crashed.losses(), again.losses()
    if sorted(expected) != list(range(steps)):
        raise Failed(f"the uninterrupted run has {len(expected)} losses, not {steps}")
    if sorted(after) != list(range(first, steps)) or not 0 < first < steps:
        raise Failed(f"the second start resumed at step {first} and has losses of {len(after)} steps")
    say("\n      step   uninterrupted      after the restart")
    for step in sorted({first, first + 1, (first + steps) // 2, steps - 1}):
        mark = "=" if after[step] == expected[step] else "DIFFERENT"
        say(f"      {step + 1:4}   {float.fromhex(expected[step]):.12f}     {float.fromhex(after[step]):.12f}  {mark}")
    different = [step for run in (before, after) for step in run if run[step] != expected[step]]
    if different:
        raise Failed(f"{len(different)} losses differ from those of the uninterrupted run, at steps {different[:10]}")


def main() -> int:
    """Tell the story, and leave nothing running."""
    parser = argparse.ArgumentParser(description="Train, crash, restore, go on, compare.")
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    if args.steps < 40:
        parser.error("--steps must be at least 40")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[Run] = []
    try:
        with alone(), daemon(args.steps) as env:
            try:
                story(args.steps, env, runs)
            finally:
                for run in runs:
                    run.end()
    except Failed as problem:
        say(f"\nFAILED: {problem}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted; everything is ended")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
