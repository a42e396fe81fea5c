"""The declared layout of a session: agreed with the daemon, mapped, and handed to a copy engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from baft_client.cutting import Cutting, Recheck
from baft_client.engine import CopyEngine, EngineHooks
from baft_client.load_engine import load_engine
from baft_client.periods import Copied
from baft_client.shard_writer import DeviceCopier, ShardWriter
from baft_client.source import Source
from baft_client.standing import Identity
from baftd.checkpoint.image import plan_image
from baftd.checkpoint.shard import TensorEntry
from baftd.memory.control import ControlPage
from baftd.memory.slot_file import SlotFile
from baftd.wire.messages import Declare, Declared, Entry, ScheduleSaid, WireToken

__all__ = ["Layout", "wire_entry"]


class Layout:
    """Engine, control page and slots of one session. Belongs to the training thread, but for `cancel`."""

    def __init__(
        self,
        identity: Identity,
        *,
        prefer: Literal["auto", "native", "python"],
        witnesses: frozenset[str],
        hooks: EngineHooks | None,
    ) -> None:
        """`prefer`: which engine; `witnesses` and `hooks`: for tests."""
        self.writer: ShardWriter | None = None
        self.small_room = 0
        self.cutting: Cutting | None = None
        """Where replicated ranges are divided: what of the tensors this rank saves."""
        self._identity = identity
        self._prefer = prefer
        self._witnesses = witnesses
        self._hooks = hooks
        self._engine: CopyEngine | None = None
        self._control: ControlPage | None = None
        self._control_file = (0, 0)

    def fits(self, sources: Sequence[Source], small_bytes: int) -> bool:
        """Whether these tensors and a small state of this size can go into the slots as they are."""
        if self.writer is None or small_bytes > self.small_room:
            return False
        return (self.cutting or self.writer).same_tree(sources)

    def saved(self, sources: Sequence[Source], recheck: Recheck | None) -> tuple[Sequence[Source], Recheck | None]:
        """What the rank saves of these sources, and what reads the identities of its stable ones again."""
        if self.cutting is None:
            return sources, recheck
        return self.cutting.of(sources), self.cutting.recheck(recheck)

    def declare(
        self,
        token: WireToken,
        sources: Sequence[Source],
        small_bytes: int,
        *,
        ask: Callable[[Declare], Declared],
        device: DeviceCopier | None,
        stages: Sequence[int] = (),
        coordinates: Mapping[str, int] | None = None,
        schedule: ScheduleSaid | None = None,
    ) -> Declared:
        """Agree on a layout and map its slots. What was mapped before is unmapped.

        `stages`, `coordinates` and `schedule`: of this rank, where they are known; they are told to the daemon.

        Raises:
            NoRoom: the slots do not fit; the message holds the sum.
            TryAgain: the ranks divide what they hold, and some have not declared it yet; nothing has changed.
            BaftError: the daemon refused, or it is away.
            OSError: a slot or the control page cannot be opened.
        """
        message = Declare(
            token=token,
            rank=self._identity.rank,
            entries=[wire_entry(source.entry) for source in sources],
            small_bytes=small_bytes,
            numa_node=numa_node(),
            stages=list(stages),
            coordinates=dict(coordinates or {}),
            uncut=[place for place, source in enumerate(sources) if source.device],
            schedule=schedule,
        )
        reply = ask(message)
        me = self._identity
        held = [source.entry for source in sources]
        cutting = Cutting(held, reply.shares) if reply.plan else None
        saved = sources if cutting is None else cutting.of(sources)
        layout = plan_image(
            [source.entry for source in saved], reply.small_room, job=me.job, rank=me.rank, world=me.world,
            plan=reply.plan, held=held,
        )  # fmt: skip
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        self.cutting = cutting
        engine = self._take_control(Path(reply.control_path), token)
        files: dict[int, SlotFile] = {}
        try:
            for place in reply.slots:
                files[place.slot] = SlotFile.open_rw(place.path)
            self.writer = ShardWriter(layout, saved, engine, files, device=device, witnesses=self._witnesses)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        self.small_room = reply.small_room
        for grant in reply.grants[:1]:
            self.writer.prefault(grant.slot)
        return reply

    def _take_control(self, path: Path, token: WireToken) -> CopyEngine:
        """Map the control page, and have an engine that is gated by it."""
        found = path.stat()
        engine = self._engine
        if engine is None or self._control_file != (found.st_dev, found.st_ino):
            self._drop_engine()
            self._control = ControlPage.open(path)
            self._control_file = (found.st_dev, found.st_ino)
            engine = self._engine = load_engine(self._control, prefer=self._prefer, hooks=self._hooks)
        self.page(pid=self._identity.pid, pid_start=self._identity.pid_start, epoch=token.epoch)
        return engine

    def page(self, **words: int) -> None:
        """Write words of the control page, where there is one."""
        if self._control is not None:
            for name, value in words.items():
                self._control.set(name, value)

    def copied(self) -> Copied | None:
        """How the bytes of the newest snapshot came into the slot; None: nothing is declared."""
        return None if self.writer is None else self.writer.copied()

    def timed(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """Have the engine copy by the clock, as `CopyEngine.timed`."""
        if self._engine is not None:
            self._engine.timed(windows)

    def cancel(self) -> None:
        """Stop the engine's copy, from any thread."""
        engine = self._engine
        if engine is not None:
            engine.cancel()

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """Unmap the slots, join the engine's thread. Safe to call twice."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        self._drop_engine()

    def abandon_in_child(self) -> None:
        """In a forked child: unmap and close what was inherited; there is no engine here to stop."""
        if self.writer is not None:
            self.writer.unmap()
            self.writer = None
        self._engine = None
        if self._control is not None:
            self._control.close()
            self._control = None


def numa_node() -> int:
    """The NUMA node whose CPUs this process may run on; -1 where there is one node only, or several are allowed."""
    allowed = os.sched_getaffinity(0)
    nodes: dict[int, set[int]] = {}
    for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"):
        with contextlib.suppress(OSError, ValueError):
            cpus: set[int] = set()
            for span in path.read_text().strip().split(","):
                first, _, last = span.partition("-")
                cpus.update(range(int(first), int(last or first) + 1))
            nodes[int(path.parent.name[4:])] = cpus
    ours = [node for node, cpus in nodes.items() if cpus & allowed]
    return ours[0] if len(ours) == 1 and len(nodes) > 1 else -1


def wire_entry(entry: TensorEntry) -> Entry:
    """A tensor entry as it is declared."""
    return Entry(
        name=entry.name,
        dtype=entry.dtype,
        shape=list(entry.shape),
        nbytes=entry.nbytes,
        kind=entry.kind,
        global_shape=None if entry.global_shape is None else list(entry.global_shape),
        ranges=None if entry.ranges is None else list(entry.ranges),
        aliases=list(entry.aliases),
        strides=None if entry.strides is None else list(entry.strides),
    )
