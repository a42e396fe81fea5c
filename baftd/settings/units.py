"""Values with units, as pure functions: sizes ("4 GiB"), durations ("10 min"), intervals ("100 steps"), shares ("1 %").

Every function takes what a flag, a variable or a TOML file holds and raises `ValueError` with a sentence that says what
was expected. A bare number is refused wherever more than one unit could be meant.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from baftd.limits import LARGEST

__all__ = ["Every", "format_duration", "format_share", "format_size", "parse_duration", "parse_every", "parse_share",
           "parse_size", "parse_steps"]  # fmt: skip

_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-zµ]*)\s*")

_SIZE_UNITS = {"b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE_UNITS[f"{_letter}b"] = 1000**_power
    _SIZE_UNITS[f"{_letter}ib"] = 1024**_power

_TIME_UNITS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}

_MAX_SIZE = 1 << 60
_MAX_SECONDS = 10 * 365 * 86400.0
_MAX_STEPS = LARGEST


def _split(value: object, expected: str) -> tuple[int | float, str]:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} has no unit; expected {expected}")
    match = _NUMBER_AND_UNIT.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a number with a unit; expected {expected}")
    number = match[1].replace("_", "")
    return (float(number) if "." in number else int(number)), match[2]


def parse_size(value: object) -> int:
    """Bytes from "4 GiB", "512MB", "0"; 0 is the only number that needs no unit."""
    expected = 'a size such as "4 GiB" or "512 MB"'
    if (value == 0 or value == "0") and not isinstance(value, bool):
        return 0
    number, unit = _split(value, expected)
    if unit == "":
        raise ValueError(f"{value!r} has no unit; expected {expected}")
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{value!r}: there is no unit of size {unit!r}; expected {expected}")
    size = number * factor
    if size < 0 or size > _MAX_SIZE:
        raise ValueError(f"{value!r} is not between 0 and {format_size(_MAX_SIZE)}")
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def parse_duration(value: object) -> float:
    """Seconds from "10 min", "90 s", "1.5 h", "0"; 0 is the only number that needs no unit."""
    expected = 'a duration such as "90 s", "10 min" or "24 h"'
    if (value == 0 or value == "0") and not isinstance(value, bool):
        return 0.0
    number, unit = _split(value, expected)
    if unit == "":
        raise ValueError(f"{value!r} has no unit; expected {expected}")
    factor = _TIME_UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{value!r}: there is no unit of time {unit!r}; expected {expected}")
    seconds = number * factor
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ValueError(f"{value!r} is not between 0 and 10 years")
    return seconds


@dataclass(frozen=True)
class Every:
    """An interval, counted either in steps or in seconds; the other one is 0."""

    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.seconds > 0) or self.steps < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(f"an interval is steps or seconds and positive, not {self.steps} and {self.seconds}")

    def __str__(self) -> str:
        if self.seconds:
            return format_duration(self.seconds)
        return "every step" if self.steps == 1 else f"{self.steps} steps"


def parse_every(value: object) -> Every:
    """An interval from "100 steps", "10 min" or "every step"."""
    return _every(value, '"100 steps", "10 min" or "every step"')


def _every(value: object, expected: str) -> Every:
    if isinstance(value, Every):
        return value
    text = re.sub(r"^\s*every\s+", "", value) if isinstance(value, str) else value
    if isinstance(value, str) and isinstance(text, str) and text.strip() == "step" and text != value:
        return Every(steps=1)
    number, unit = _split(text, expected)
    if unit in ("step", "steps"):
        return Every(steps=_steps(value, number))
    if unit == "":
        raise ValueError(f"{value!r} has no unit: steps or time? Expected {expected}")
    if unit.lower() not in _TIME_UNITS:
        raise ValueError(f"{value!r}: there is no interval in {unit!r}; expected {expected}")
    seconds = parse_duration(text)
    if seconds == 0:
        raise ValueError(f"{value!r} is no interval; expected {expected}")
    return Every(seconds=seconds)


def _steps(value: object, number: int | float) -> int:
    if number > _MAX_STEPS:
        raise ValueError(f"{value!r} is more than {_MAX_STEPS:,} steps, the most that can be said")
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number of steps")
    if number < 1:
        raise ValueError(f"{value!r} is not a positive number of steps")
    return int(number)


def parse_steps(value: object) -> int:
    """A positive number of steps from 100, "100", "100 steps" or "every step"; no time is meant: no unit is needed."""
    expected = 'a number of steps such as "100 steps"'
    if isinstance(value, bool | float):
        raise ValueError(f"{value!r} is not a whole number of steps; expected {expected}")
    text = value
    if isinstance(value, int):
        text = f"{value} steps"
    elif isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9][0-9_]*(?:\.[0-9]+)?\s*", value):
        text = f"{value.strip()} steps"
    every = _every(text, expected)
    if not every.steps:
        raise ValueError(f"{value!r} is a time; this interval is counted in steps")
    return every.steps


def parse_share(value: object) -> float:
    """A part of a whole (0.01) from "1 %", "0.5%". Above 0, at most 100 %."""
    expected = 'a share such as "1 %"'
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*%\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a share of something; expected {expected}")
    percent = float(match[1])
    if not 0 < percent <= 100:
        raise ValueError(f"{value!r} is not above 0 % and at most 100 %")
    return percent / 100


def format_share(share: float) -> str:
    """Text that `parse_share` reads back to the same number."""
    return f"{100 * share:.10g} %"


def format_size(size: int) -> str:
    """Text that `parse_size` reads back to the same number; the shortest exact form in binary units."""
    if size == 0:
        return "0"
    for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if size % 1024**power == 0:
            return f"{size // 1024**power} {letter}iB"
    return f"{size} B"


def format_duration(seconds: float) -> str:
    """Text that `parse_duration` reads back to the same number."""
    if seconds == 0:
        return "0"
    for unit, factor in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds % factor == 0:
            return f"{int(seconds // factor)} {unit}"
    text = f"{seconds:.9f}".rstrip("0").rstrip(".")
    return f"{text} s"
