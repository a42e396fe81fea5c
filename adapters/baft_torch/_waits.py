"""Where a training thread waits, beside the receives of a pipeline: windows around collectives and around the end of
a step.

Every blocking collective of torch.distributed ends in `Work.wait`, and so does every asynchronous one, every receive
outside of torch's own pipelines, and FSDP2's gathering and scattering: that one method is wrapped while a training is
attached. Functions that were imported by name before, `async_op=True`, and groups made later are seen all the same;
compiled code, which knows the functions of torch.distributed by their identity, finds them as they were. Functional
collectives (DTensor, and `clip_grad_norm_` on it) wait in `wait_tensor`, which is wrapped too.

The *tail* is the window from the end of the last backward pass, or of `schedule.step()`, to the update: gradient norms,
DDP's reductions and a search for infinities lie in it, whatever they wait with. `_tail.py` finds its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from baft_client.recorder import Recorder
    from baft_client.windows import Windows

__all__ = ["Waits"]


class Waits:
    """Windows of one attached training. All of its methods are for the training thread, and none raises."""

    def __init__(
        self,
        windows: Windows,
        recorder: Recorder,
        *,
        modules: Iterable[nn.Module] = (),
        params: Iterable[torch.Tensor] = (),
        pipeline: bool = False,
    ) -> None:
        """Begin to watch the thread that calls this, and, at each boundary, the one that passes it.

        modules: whose forward ends a tail. params: whose gradients tell of a backward pass; not looked at where
        `pipeline`, in which `schedule_returned` tells of the end.
        """
        self.covered = False
        """Set while somebody else stands for what the thread waits for (the observer of a pipeline around its receives):
        waits within open no window of their own and are not recorded."""

    def schedule_begins(self) -> None:
        """`schedule.step()` was called: the tail of a former call ends."""

    def schedule_returned(self) -> None:
        """`schedule.step()` has returned: the tail begins."""

    def forward_begins(self) -> None:
        """A forward pass begins: a tail that is open ends."""

    def fence(self) -> None:
        """An update is about to begin: the tail ends, and until the next boundary no window opens."""

    def boundary(self) -> None:
        """A step is complete: waits of the calling thread are windows of the next."""

    def close(self) -> None:
        """Undo every wrapping and take hooks away. Safe to call again."""
