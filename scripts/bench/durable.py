"""What the durable tier costs beside the disk itself: writing a shard, reading it back into a slot, verifying it."""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from _report import Report, arguments, interleave, median, ratio

from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.shard import CHUNK, root_digest
from baftd.storage.directory import DirectoryTier
from baftd.storage.interface import FileSink, ShardRecord

MIB = 1 << 20
BLOCK = 16 * MIB
HEADER = 4096
TOKEN = Token(1, "0" * 32)


class Bench:
    """A slot of `nbytes` on tmpfs, and a directory on the disk to be measured."""

    def __init__(self, slot: int, directory: Path, nbytes: int) -> None:
        self.slot = slot
        self.directory = directory
        self.nbytes = nbytes
        self.tier = DirectoryTier(directory / "durable", node="bench")
        self.steps = itertools.count(1)
        self.cpu: dict[str, list[float]] = {}
        noise = os.urandom(MIB)
        for offset in range(0, nbytes, MIB):
            os.pwrite(slot, noise, HEADER + offset)
        self.table = [(offset, min(CHUNK, nbytes - offset)) for offset in range(0, nbytes, CHUNK)]
        self.digests = b"".join(xxhash.xxh3_128_digest(os.pread(slot, n, HEADER + at)) for at, n in self.table)

    def measured(self, name: str, work: Callable[[], object]) -> float:
        """Seconds of `work`; its CPU seconds go to `cpu`."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.cpu.setdefault(name, []).append(spent)
        return seconds

    # ------------------------------------------------------------------------------------ contestants

    def ours(self) -> float:
        """A whole durable checkpoint of one rank, from the call to the return of the commit; then deleted."""
        checkpoint = CheckpointId(1, next(self.steps))
        seconds = self.measured("ours", lambda: self.save(checkpoint))
        self.tier.delete("bench", checkpoint)
        return seconds

    def save(self, checkpoint: CheckpointId) -> ShardRecord:
        """Write and commit."""
        record = self.tier.write_shard(
            "bench",
            checkpoint,
            0,
            self.slot,
            HEADER,
            self.nbytes,
            self.table,
            self.digests,
            token=TOKEN,
            tree_digest=bytes(16),
            updates=1,
            world=1,
        )
        self.tier.commit("bench", checkpoint, [record], plan_digest=bytes(16), token=TOKEN, updates=1, world=1)
        return record

    def plain(self) -> float:
        """The same bytes with O_DIRECT, 16 MiB at a time, two threads, preallocated, synced; nothing checked."""
        window = memoryview(mmap.mmap(self.slot, HEADER + self.nbytes, prot=mmap.PROT_READ))[HEADER:]
        return self.measured("plain", lambda: self.write_directly(window))

    def write_directly(self, window: memoryview) -> None:
        """Write all of `window` to a new file."""
        path = self.directory / "plain"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, self.nbytes)
        offsets = iter(range(0, self.nbytes, BLOCK))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                os.pwrite(fd, window[offset : offset + BLOCK], offset)

        crew = [threading.Thread(target=work) for _ in range(2)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        os.fsync(fd)
        os.close(fd)
        above = os.open(self.directory, os.O_RDONLY)
        os.fsync(above)
        os.close(above)

    def buffered(self) -> float:
        """The same bytes through the page cache, one thread, synced: what a plain `write` and `fsync` do."""
        window = memoryview(mmap.mmap(self.slot, HEADER + self.nbytes, prot=mmap.PROT_READ))[HEADER:]

        def work() -> None:
            fd = os.open(self.directory / "buffered", os.O_WRONLY | os.O_CREAT, 0o600)
            for offset in range(0, self.nbytes, BLOCK):
                os.pwrite(fd, window[offset : offset + BLOCK], offset)
            os.fsync(fd)
            os.close(fd)

        return self.measured("buffered", work)

    def removing(self, contestant: Callable[[], float]) -> Callable[[], float]:
        """Measure, then remove what a contestant wrote, so that every round makes new files."""

        def run() -> float:
            seconds = contestant()
            for name in ("plain", "buffered"):
                (self.directory / name).unlink(missing_ok=True)
            return seconds

        return run

    def fetch(self, checkpoint: CheckpointId) -> float:
        """The shard from the disk into the slot, every chunk verified."""
        sink = FileSink(self.slot, HEADER, self.nbytes)
        return self.measured("fetch", lambda: self.tier.fetch("bench", checkpoint, 0, sink))

    def read_directly(self, path: str) -> float:
        """The same file with O_DIRECT into memory, two threads: nothing checked or kept."""

        def work() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            offsets = iter(range(0, self.nbytes, BLOCK // 2))
            lock = threading.Lock()

            def body() -> None:
                buffer = memoryview(mmap.mmap(-1, BLOCK // 2))
                while True:
                    with lock:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    os.preadv(fd, [buffer], offset)

            crew = [threading.Thread(target=body) for _ in range(2)]
            for thread in crew:
                thread.start()
            for thread in crew:
                thread.join()
            os.close(fd)

        return self.measured("read", work)


@contextmanager
def bench(nbytes: int, directory: str | None) -> Iterator[Bench]:
    """A slot and a directory, removed afterwards."""
    with (
        tempfile.TemporaryFile(prefix="baftd-bench-", dir="/dev/shm") as slot,
        tempfile.TemporaryDirectory(prefix="baftd-bench-", dir=directory) as base,
    ):
        os.posix_fallocate(slot.fileno(), 0, HEADER + nbytes)
        yield Bench(slot.fileno(), Path(base), nbytes)


def durable(report: Report, *, nbytes: int, rounds: int, directory: str | None = None) -> None:
    """Add the figures of the durable tier to `report`. `directory`: on the disk to be measured."""
    with bench(nbytes, directory) as one:
        series = interleave({name: one.removing(getattr(one, name)) for name in ("ours", "plain", "buffered")}, rounds)
        size = nbytes / 1e9
        report.add(
            "durable_ratio",
            ratio(series["plain"], series["ours"]),
            unit="",
            goal=0.9,
            better="higher",
            how=f"{size:.2f} GB: bare O_DIRECT write of 2 threads + fsync / write_shard + commit, digests included",
        )
        report.add(
            "durable_gbps",
            median([size / seconds for seconds in series["ours"]]),
            unit="GB/s",
            goal=None,
            better="higher",
            how="write_shard + commit",
        )
        report.add(
            "durable_cpu_per_gb",
            median([seconds / size for seconds in one.cpu["ours"][1:]]),
            unit="s",
            goal=None,
            better="lower",
            how="CPU seconds a GB of write_shard + commit",
        )
        report.add(
            "buffered_ratio",
            ratio(series["plain"], series["buffered"]),
            unit="",
            goal=None,
            better="higher",
            how="the same for a write through the page cache and fsync, nothing checked",
        )
        checkpoint = CheckpointId(1, next(one.steps))
        path = one.save(checkpoint).path
        back = interleave(
            {"fetch": lambda: one.fetch(checkpoint), "read": lambda: one.read_directly(path)}, max(1, rounds // 2)
        )
        report.add(
            "fetch_ratio",
            ratio(back["read"], back["fetch"]),
            unit="",
            goal=None,
            better="higher",
            how="bare O_DIRECT read of 2 threads / the shard verified and in the slot",
        )
        assert root_digest(one.digests, nbytes)
    spread = statistics.stdev(series["plain"]) / statistics.mean(series["plain"]) if rounds > 1 else 0.0
    if spread > 0.25:
        report.note(f"durable_ratio is not discriminating here: bare writes alone vary by {spread:.0%}")


def main() -> None:
    """Measure, print, exit 0: a goal not met is printed as not met."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--directory", help="on the disk to be measured (default: the temporary directory)")
    options = parser.parse_args()
    quick: bool = options.quick
    report = Report("durable")
    durable(report, nbytes=(32 if quick else 1024) * MIB, rounds=2 if quick else 11, directory=options.directory)
    if quick:
        report.note("--quick: sizes and rounds are too small for the figures to mean anything")
    report.print(as_json=options.json)


if __name__ == "__main__":
    main()
