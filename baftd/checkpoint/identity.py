"""Names of things that outlive a process: job, token, checkpoint. Values, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baftd.errors import JobNameError, UsageError

__all__ = ["MAX_WORLD", "CheckpointId", "Token", "check_incarnation", "check_job_name", "step_directory"]

MAX_WORLD = 1 << 20
"""Ranks in one job; a larger number is taken for a mistake."""

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INCARNATION = re.compile(r"[0-9a-f]{32}")
_STEP_DIRECTORY = re.compile(r"step-([0-9]+)\.e([0-9]+)")


def check_job_name(name: str) -> str:
    """Return `name` if it can name a directory and a key, else raise `JobNameError`."""
    if not _JOB.fullmatch(name) or ".." in name:
        raise JobNameError(
            f"job name {name!r} cannot be used: it becomes a directory name.",
            hint="Use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit, without '..'.",
        )
    return name


def check_incarnation(value: str) -> str:
    """Return `value` if it is 128 bits in lower-case hexadecimal, else raise `UsageError`."""
    if not _INCARNATION.fullmatch(value):
        raise UsageError(
            f"incarnation {value!r} is not 32 lower-case hexadecimal digits.",
            hint="Set BAFTD_INCARNATION to the output of `openssl rand -hex 16`, new at each start of the job.",
        )
    return value


@dataclass(frozen=True, order=True)
class Token:
    """(epoch, incarnation): which start of the job speaks. Older epochs may write nothing.

    Two tokens of the same epoch with different incarnations are a conflict, not an order: `order=True`
    only gives a stable sort.
    """

    epoch: int
    incarnation: str

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise UsageError(f"epoch {self.epoch} is not positive")
        check_incarnation(self.incarnation)


@dataclass(frozen=True, order=True)
class CheckpointId:
    """(epoch, step) within a job. Step numbers repeat after a rollback; alone they identify nothing."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return step_directory(self)


def step_directory(checkpoint: CheckpointId) -> str:
    """`step-<k>.e<epoch>`: the directory name of a durable checkpoint."""
    return f"step-{checkpoint.step}.e{checkpoint.epoch}"


def parse_step_directory(name: str) -> CheckpointId | None:
    """The checkpoint that a directory name stands for; None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    return CheckpointId(epoch=int(match[2]), step=int(match[1])) if match else None
