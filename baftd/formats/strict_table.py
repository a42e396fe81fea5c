"""Tables of TOML or JSON read strictly: every key has its type, and one that nobody asks for is an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from baftd.errors import UsageError

__all__ = ["StrictTable", "named", "nearest", "rank_numbers"]

_WORDS = {str: "a text", int: "a whole number", list: "a list", dict: "a table", bool: "true or false"}


class StrictTable:
    """A table whose keys are taken one by one. `where`: how errors name it, the file first. All methods raise
    UsageError for what is missing (where there is no default) or of another type."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._asked: list[str] = []
        self.where = where

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def fail(self, text: str) -> NoReturn:
        """Raise UsageError: `text` is said of this table."""
        raise UsageError(f"{self.where}: {text}{'' if text.endswith('?') else '.'}")

    def value(self, key: str, *kinds: type) -> Any:
        """What stands under a key that must be there."""
        self._asked.append(key)
        if key not in self._values:
            near = difflib.get_close_matches(key, [name for name in self._values if name not in self._asked], n=1)
            self.fail(f"`{key}` is missing" + (f"; is it what {near[0]!r} means?" if near else ""))
        found = self._values[key]
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            self.fail(f"`{key}` is {_short(found)}, not {' or '.join(_WORDS[kind] for kind in kinds)}")
        return found

    def _there(self, key: str, default: object) -> bool:
        """Whether to read the key; False: take the default."""
        self._asked.append(key)
        return key in self._values or default is None

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty."""
        if not self._there(key, default):
            return default or ""
        found: str = self.value(key, str)
        if not found:
            self.fail(f"`{key}` is empty")
        return found

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """One of `choices`."""
        found = self.text(key, default)
        if found not in choices:
            self.fail(f"`{key}` is {found!r}, not {' or '.join(choices)}")
        return found

    def flag(self, key: str) -> bool:
        """True or false; false where nothing is said."""
        return bool(self.value(key, bool)) if self._there(key, False) else False

    def number(self, key: str, default: int | None = None, *, least: int = 0, most: int) -> int:
        """A whole number in these bounds."""
        if not self._there(key, default):
            return default or 0
        found: int = self.value(key, int)
        if not least <= found <= most:
            self.fail(f"`{key}` is {found}, not between {least} and {most}")
        return found

    def numbers(self, key: str, default: tuple[int, ...] | None = None, *, most: int) -> tuple[int, ...]:
        """One whole number, or a list of them."""
        if not self._there(key, default):
            return default or ()
        found = self.value(key, list, int)
        items = tuple(found) if isinstance(found, list) else (found,)
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= most:
                self.fail(f"`{key}` has {_short(item)}, which is no whole number between 0 and {most}")
        return items

    def names(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """One text, or a list of them."""
        if not self._there(key, default):
            return default or ()
        found = self.value(key, list, str)
        items = tuple(found) if isinstance(found, list) else (found,)
        for item in items:
            if not isinstance(item, str) or not item:
                self.fail(f"`{key}` has {_short(item)}, which is no text")
        return items

    def table(self, key: str, *, required: bool = False) -> StrictTable:
        """A table; an empty one where there is none and it need not be."""
        there = self._there(key, None if required else {})
        return StrictTable(self.value(key, dict) if there else {}, f"{self.where}, {key}")

    def tables(self, key: str, called: Callable[[Mapping[str, Any]], object]) -> Iterator[StrictTable]:
        """Each table of a list; `called` says its name for errors, where it has one."""
        for number, item in enumerate(self.value(key, list)):
            if not isinstance(item, dict):
                self.fail(f"`{key}` has {_short(item)}, which is no table")
            name = called(item)
            yield StrictTable(item, f"{self.where}, {key}[{number}]" + (f" {name!r}" if isinstance(name, str) else ""))

    def ranks(self, key: str, world: int) -> tuple[int, ...]:
        """The ranks that a key of this table stands for."""
        try:
            return rank_numbers(key, world)
        except ValueError as error:
            self.fail(str(error))

    def known_axes(self, key: str, axes: Iterable[str], known: Mapping[str, int]) -> None:
        """Refuse an axis that there is not, and one that stands there twice."""
        listed = list(axes)
        for axis in listed:
            if axis not in known:
                self.fail(f"`{key}` names {axis!r}, which is no axis of `axes`{nearest(axis, known)}")
        if len(set(listed)) < len(listed):
            self.fail(f"`{key}` names an axis twice")

    def done(self) -> None:
        """Refuse keys that nobody asked for."""
        for key in self._values:
            if key not in self._asked:
                self.fail(f"there is no key {key!r}{nearest(key, dict.fromkeys(self._asked))}")


def rank_numbers(text: str, world: int) -> tuple[int, ...]:
    """Ranks from "3", "0-7" or "0,2,4-6". Raises ValueError with a reason."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if match is None:
            raise ValueError(f"{text!r} names no ranks: write 3, 0-7 or 0,2,4-6")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= world:
            raise ValueError(f"{text!r} is outside of ranks 0 to {world - 1}")
        found.extend(range(first, last + 1))
    if len(set(found)) < len(found):
        raise ValueError(f"{text!r} names a rank twice")
    return tuple(found)


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a word that is not known: the nearest one, or all of them."""
    listed = list(known)
    found = difflib.get_close_matches(word, listed, n=1)
    if found:
        return f"; did you mean {found[0]!r}?"
    return f" (there is {named(listed)})" if listed else ""


def named(names: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(names) or "none"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
