"""Levels that do not swing. Pure.

What becomes worse is answered at once, what becomes better only after a while, and after twice that while each time it
did not last.
"""

from __future__ import annotations

__all__ = ["MOST_PATIENCE", "PATIENCE", "Steady"]

PATIENCE = 32
"""Steps for which something worse is kept at least, before something better is tried."""
MOST_PATIENCE = 4096
RELAPSE = 8
"""Times its patience within which a level that rises again did not last."""


class Steady:
    """A level that rises at once and falls with patience: higher is worse."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._since = 0
        self._patience = PATIENCE
        self._fell = -MOST_PATIENCE

    def wait(self, step: int) -> bool:
        """Whether it is too early to fall."""
        return step - self._since < self._patience

    def to(self, level: int, step: int) -> None:
        """Another level holds from this step on."""
        if level == self.level:
            return
        if level > self.level and step - self._fell < RELAPSE * self._patience:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)  # what was better did not last
            self._fell = -RELAPSE * MOST_PATIENCE  # several steps up are one relapse
        if level < self.level:
            self._fell = step
        self.level, self._since = level, step
