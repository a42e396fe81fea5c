"""Every error that baftd raises on purpose, and the exit code each one carries.

    BaftError                    1   something failed
    ├── UsageError               2   the caller asked for something that makes no sense
    │   ├── SettingsError            a setting: unknown key, wrong unit, wrong type
    │   ├── JobNameError             a job name that cannot be a directory
    │   ├── RankError                rank or world size missing, disagreeing, or claimed twice
    │   ├── LayoutError              ranges that make no whole tensor (tensor, rank and range are named)
    │   ├── StateTreeError           small state holds a value that is not data (its path is named)
    │   └── UnsupportedTensor        a tensor that cannot be copied byte by byte (its name is named)
    ├── NothingRestorable        3   the job has been further, but no step of it can be restored
    ├── VerificationFailed       4   bytes are not what their digest says
    │   ├── FormatError              a header, journal, manifest or image cannot be what it claims
    │   └── ModelMismatch            the saved tensors are not those of this model
    ├── Degraded                 5   it works, but not as asked for
    │   └── NoRoom                   not enough shared memory or disk; says what to change
    ├── Unreachable              6   the daemon or the coordinator does not answer
    ├── TryAgain                75   a live predecessor still runs, or somebody holds the lease
    ├── ProtocolError            1   a message that breaks the protocol (its field is named)
    ├── Fenced                   1   a newer start of the job has taken over; this one may write nothing
    └── TornSnapshot             1   the state changed between boundary and fence (the tensor is named)

A message is one sentence or two: what failed, where (rank, node, file), why, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BaftError",
    "Degraded",
    "Fenced",
    "FormatError",
    "JobNameError",
    "LayoutError",
    "ModelMismatch",
    "NoRoom",
    "NothingRestorable",
    "ProtocolError",
    "RankError",
    "SettingsError",
    "StateTreeError",
    "TornSnapshot",
    "TryAgain",
    "Unreachable",
    "UnsupportedTensor",
    "UsageError",
    "VerificationFailed",
    "error_class",
]


class BaftError(Exception):
    """Base of all errors raised by baftd. `code` names the class on the wire, `exit_code` ends a command.

    `hint` is the next thing to do, in one sentence; empty where the message already says it.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(BaftError):
    """The caller asked for something that makes no sense."""

    exit_code = 2
    code = "usage"


class SettingsError(UsageError):
    """A setting has an unknown key, a unit that makes no sense, or the wrong type."""

    code = "settings"


class JobNameError(UsageError):
    """A job name that cannot be the name of a directory."""

    code = "job_name"


class RankError(UsageError):
    """Rank or world size is missing, disagrees with the launcher, or is claimed twice."""

    code = "rank"


class LayoutError(UsageError):
    """Index ranges, ranks or mesh coordinates that make no layout, or a layout that needs what nobody saved.

    `tensor`, `rank` and `ranges` (in words, "[0:4, 2:8]") say where; "" and None where there is no such thing.
    """

    code = "layout"

    def __init__(
        self, message: str, *, hint: str = "", tensor: str = "", rank: int | None = None, ranges: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.tensor = tensor
        self.rank = rank
        self.ranges = ranges


class StateTreeError(UsageError):
    """Small state holds a value that is not data; the message names its path."""

    code = "state_tree"


class UnsupportedTensor(UsageError):
    """A tensor that cannot be copied byte by byte (sparse, quantised, meta, resizable storage)."""

    code = "unsupported_tensor"


class NothingRestorable(BaftError):
    """The job has been further, but no step of it can be restored."""

    exit_code = 3
    code = "nothing_restorable"


class VerificationFailed(BaftError):
    """Bytes are not what their digest says."""

    exit_code = 4
    code = "verification_failed"


class FormatError(VerificationFailed):
    """A header, journal, manifest or image cannot be what it claims to be."""

    code = "format"


class ModelMismatch(VerificationFailed):
    """The saved tensors are not those of this model; all differences are named."""

    code = "model_mismatch"


class Degraded(BaftError):
    """It works, but not as asked for."""

    exit_code = 5
    code = "degraded"


class NoRoom(Degraded):
    """Not enough shared memory or disk; the message holds the sum and says what to change.

    `missing`: bytes that would have to become free; 0 where that is not known.
    """

    code = "no_room"

    def __init__(self, message: str, *, hint: str = "", missing: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class Unreachable(BaftError):
    """The daemon or the coordinator does not answer within the deadline."""

    exit_code = 6
    code = "unreachable"


class TryAgain(BaftError):
    """A live predecessor still runs, or somebody else holds the lease."""

    exit_code = 75
    code = "try_again"


class ProtocolError(BaftError):
    """A message that breaks the protocol. `field` names the part that is wrong, as a path."""

    code = "protocol"

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class Fenced(BaftError):
    """A newer start of the job has taken over; this process may write nothing any more."""

    code = "fenced"


class TornSnapshot(BaftError):
    """The training state changed between the boundary and the fence; the snapshot was dropped."""

    code = "torn_snapshot"


def _walk(cls: type[BaftError]) -> dict[str, type[BaftError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_walk(child))
    return found


def error_class(code: str) -> type[BaftError]:
    """The class that a code on the wire stands for; `BaftError` for one from a newer daemon."""
    return _walk(BaftError).get(code, BaftError)
