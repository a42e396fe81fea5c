"""One private slot without a daemon, a copy that can be stopped in the middle, and what the witnesses say about it."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from baft_client.engine import EngineHooks, EngineState
from baft_client.load_engine import load_engine
from baft_client.shard_writer import ShardWriter, Snapshot, Torn
from baft_client.source import Source
from baft_torch._state import TrainingState
from baftd.checkpoint.identity import Token
from baftd.checkpoint.image import plan_image
from baftd.memory.control import ControlPage
from baftd.memory.slot_file import SlotFile
from tests.support.daemon import wait_until

RELEASED = 1 << 40
"""`hold_at` that no copy reaches."""


@dataclass(frozen=True)
class Verdict:
    """What became of one snapshot."""

    wrong: bool
    """The slot does not hold what the tensors held at the boundary."""
    caught: str
    """The witness that dropped it; empty if it was sealed."""
    name: str
    """The tensor named, or the first one that is wrong."""


class Bench:
    """A slot on tmpfs laid out for `state`, and a copy engine that stops before a chunk."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._dir = tempfile.TemporaryDirectory(prefix=f"baftd-test-{os.getpid()}-", dir="/dev/shm")
        base = Path(self._dir.name)
        sources = state.refresh()
        entries = [source.entry for source in sources]
        self.layout = plan_image(entries, 4096, job="bench", rank=0, world=1)
        self.control = ControlPage.create(base / "control", rank=0)
        self.engine = load_engine(self.control, hooks=EngineHooks(hold=True))
        self._file = SlotFile.create(base / "slot", self.layout.capacity)
        self._generation = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        self.control.close()
        self._file.close()
        self._dir.cleanup()

    def torn_by(
        self,
        change: Callable[[], None],
        *,
        witnesses: frozenset[str],
        audit: bool,
        updates: Callable[[], int],
        at: float,
    ) -> Verdict:
        """Begin a snapshot, stop it when the share `at` of its chunks is copied, change the state, finish and seal."""
        self._generation += 1
        sources = self.state.refresh()
        stable = [source for source in sources if source.entry.kind == "stable" and source.entry.nbytes]
        expected = {source.entry.name: _bytes(source) for source in stable}
        writer = ShardWriter(
            self.layout, sources, self.engine, {0: SlotFile.open_rw(self._file.path)}, witnesses=witnesses
        )
        try:
            hold = int(at * len(stable))
            self.control.set("hold_at", hold)
            snapshot = self._begin(writer, sources, updates(), audit)
            wait_until(
                lambda: self.engine.state is (EngineState.HELD if hold < len(stable) else EngineState.DONE),
                f"the copy stops at chunk {hold} of {len(stable)}",
            )
            change()
            self.control.set("hold_at", RELEASED)
            result = writer.seal(snapshot, updates=updates(), deadline=20.0)
            wrong = self._wrong(expected)
        finally:
            self.control.set("hold_at", RELEASED)
            writer.close()
        if isinstance(result, Torn):
            return Verdict(bool(wrong), result.witness, result.name)
        return Verdict(bool(wrong), "", wrong)

    def _begin(self, writer: ShardWriter, sources: list[Source], updates: int, audit: bool) -> Snapshot:
        return writer.begin(
            0,
            self._generation,
            Token(1, "0" * 32),
            step=1,
            updates=updates,
            sources=sources,
            small=b"",
            recheck=self.state.identities,
            writer=(os.getpid(), 0),
            now=0.0,
            audit=audit,
        )

    def _wrong(self, expected: dict[str, bytes]) -> str:
        """First tensor whose bytes in the slot are not those of the boundary; of a dropped snapshot too."""
        for place in self.layout.placements:
            name = place.entry.name
            if name in expected and self._file.pread(place.offset, place.nbytes) != expected[name]:
                return name
        return ""


def _bytes(source: Source) -> bytes:
    return ctypes.string_at(source.address, source.entry.nbytes)
