"""What a session needs to keep its last steps: a token, a daemon that is there, and words for what was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baft_client.io_thread import IoThread, LinkState
from baft_client.standing import Standing
from baftd.errors import Fenced

if TYPE_CHECKING:
    from baftd.settings import Settings
    from baftd.telemetry import Logger
    from baftd.wire.messages import Saved, WireToken

__all__ = ["reach_again", "say_finished", "token_of"]


def token_of(standing: Standing, link: IoThread, settings: Settings) -> WireToken:
    """The token to save or finish with, while a daemon is there. Raises Fenced or Unreachable."""
    me = standing.identity
    if standing.fenced:
        raise Fenced(f"job {me.job}, rank {me.rank}: {standing.fenced}.")
    if standing.token is None:
        raise link.unreachable("no token")
    if not link.wait_up(settings.connect_timeout):
        raise link.unreachable(f"no answer within {settings.connect_timeout:g} s")
    return standing.token


def reach_again(link: IoThread, log: Logger, step: int, wait: float) -> None:
    """Wait for a daemon that is away."""
    if link.state is not LinkState.UP:
        log.warning("waiting", phase="the daemon is away", step=step, why=link.last_error)
        link.wait_up(wait)


def say_finished(log: Logger, saved: Saved, step: int) -> None:
    """Log what is kept after `step` steps. A note says why it is less than was asked for."""
    if saved.step < step:
        saved.note = saved.note or f"step {step} has no snapshot: what was trained since is not kept"
    say = log.warning if saved.note else log.info
    say("finished", step=saved.step, tier=saved.tier, path=saved.path, note=saved.note)
