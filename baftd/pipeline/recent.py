"""The newest values of something that is not seen at every step. Pure.

What a snapshot showed is seen once an interval: the newest 17 values of an interval of 100 steps would be 1,700 steps
old, and a short disturbance would be believed for all of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["AGE", "FORGOTTEN", "Recent"]

T = TypeVar("T")

AGE, LEAST = 64, 3
"""Steps after which a value counts no more, as long as so many newer ones are known."""
FORGOTTEN = 512
"""Steps after which values say nothing of now."""


class Recent(Sequence[T], Generic[T]):
    """At most `most` values, the newest of the last `AGE` steps, and some older ones where these are few."""

    def __init__(self, most: int) -> None:
        self._all: deque[tuple[int, T]] = deque(maxlen=most)

    def add(self, step: int, value: T) -> None:
        """A value of a step; steps rise."""
        self._all.append((step, value))
        while len(self._all) > LEAST and step - self._all[0][0] > AGE:
            self._all.popleft()

    def known(self, step: int) -> bool:
        """Whether the newest value still says something at `step`."""
        return bool(self._all) and step - self._all[-1][0] <= FORGOTTEN

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._all)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        """Oldest first."""
        return [value for _, value in self._all][index]
