"""What the ranks of a start must know of each other before they load another layout: one small all-reduce each time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from baftd.errors import TryAgain

__all__ = ["Agreement"]


class Agreement:
    """Asks all ranks of a process group. Without an initialised group, or alone in it, a rank speaks for itself."""

    def __init__(self, group: Any = None, *, world: int = 1, timeout: float = 60.0) -> None:
        """`group`: None: the default one, if there is one. `world`: ranks of the job. `timeout`: seconds to wait for
        the others."""
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        dist = torch.distributed
        self.alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1
        """Nobody else can be asked."""
        self.complete = world == 1 or not self.alone
        """The answers are those of all ranks."""

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags some rank has set. All ranks come here with equally many.

        Raises TryAgain if the others do not come in time: one of them has failed, and says itself why.
        """
        if self.alone:
            return list(flags)
        dist = torch.distributed
        device = torch.device("cpu")
        if dist.get_backend(self._group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        mine = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8, device=device)
        try:
            work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as problem:
            raise TryAgain(
                f"the other ranks did not come to compare layouts in {self._timeout.total_seconds():g} s: {problem}",
                hint="One of them has failed: its own log says why.",
            ) from problem
        return [bool(flag) for flag in mine.tolist()]

    def all(self, flag: bool) -> bool:
        """Whether every rank has set its flag. Errors as `any`."""
        return not self.any([not flag])[0]
