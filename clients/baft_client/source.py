"""What a framework's adapter hands to a session at a boundary, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from baftd.checkpoint.shard import TensorEntry

if TYPE_CHECKING:
    from baft_client.restore import RestoredImage
    from baft_client.saved import SavedShards
    from baft_client.whole import WholeImage

__all__ = ["Counters", "Outcome", "OutcomeKind", "Resumed", "Source"]


@dataclass(slots=True, eq=False)
class Source:
    """One tensor of the training state, where it lies now.

    Make the object once and keep it: from boundary to boundary only `address`, `identity` and `keep` change, and
    a session recognises an unchanged tree by the identity of the `entry` objects (300 of them in some 10 us).

    A stable tensor is read by pointer until the fence, so `keep` must own the *storage* (for torch
    `tensor.untyped_storage()`; holding the tensor does not survive `p.data = other`). A volatile one is copied
    within `boundary()`, before it returns.
    """

    entry: TensorEntry
    """Name, dtype, shape, bytes and kind: what is saved and how it is declared."""
    address: int
    """Of the first of `entry.nbytes` contiguous bytes; ignored where nbytes is 0."""
    keep: object
    """Owns the memory at `address`; held from begin to seal."""
    itemsize: int = 1
    """Bytes of one element: the canary takes whole elements."""
    identity: tuple[int, ...] = ()
    """Witness (b): storage pointer, storage size, version counter at the boundary; empty for none."""
    witness: Callable[[], tuple[int, ...]] | None = None
    """Reads `identity` again at the fence; None: not compared (or `boundary(recheck=)` reads all at once)."""
    device: bool = False
    """The tensor lies on a device: `address` is ignored, the session's `DeviceCopier` copies it."""


class OutcomeKind(str, Enum):
    """What a boundary or a fence did."""

    BEGAN = "began"
    """boundary: the snapshot is being copied."""
    NOT_DUE = "not_due"
    """boundary: the job's cadence does not take this step."""
    SKIPPED = "skipped"
    """boundary: no snapshot of this step, for `reason`; the daemon is told."""
    SEALED = "sealed"
    """fence: the slot holds state(step) and the daemon is told."""
    TORN = "torn"
    """fence: a witness disagreed about tensor `name`; the snapshot was dropped."""
    NOTHING = "nothing"
    """fence: no snapshot was in progress."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of `Session.boundary` and `Session.fence`."""

    kind: OutcomeKind
    step: int = 0
    reason: str = ""
    name: str = ""

    def __bool__(self) -> bool:
        """True when it went as hoped: begun, sealed, or nothing was asked for."""
        return self.kind not in (OutcomeKind.SKIPPED, OutcomeKind.TORN)


@dataclass
class Counters:
    """What a session has done so far. `skipped` counts by kind of reason."""

    boundaries: int = 0
    began: int = 0
    sealed: int = 0
    torn: int = 0
    audits: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    declares: int = 0
    reconnects: int = 0
    refused: int = 0
    """Begins, seals and skips that the daemon refused; each is in the log."""
    committed_memory: int = 0
    """Newest step known committed at the memory tier."""
    committed_durable: int = 0
    held_seconds: float = 0.0
    """Time the training thread was held by all boundaries and fences."""
    last_held_ms: float = 0.0
    """The same for the newest sealed snapshot alone."""
    bytes_copied: int = 0


@dataclass(frozen=True)
class Resumed:
    """Where training goes on."""

    step: int
    """Boundaries passed: the first step to run. 0: from the beginning."""
    updates: int
    epoch: int
    """Of this start of the job; 0 when it began without a daemon (`fresh=True`)."""
    image: RestoredImage | WholeImage | None
    """What to load; None: nothing, the job begins, or `shards` has it."""
    tier: str = ""
    passed_over: tuple[str, ...] = ()
    """One sentence for each newer step that could not be used."""
    seconds: float = 0.0
    """Spent by the daemon in planning, fetching and verifying."""
    durable: bool = False
    """A durable tier is on."""
    shards: SavedShards | None = None
    """The shards of all ranks that saved, where a rank of this start said `reshard`: what to load is cut from them."""
