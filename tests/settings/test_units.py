"""Sizes, durations and intervals: what is read, what is refused, and that shown text reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.settings import (
    Every,
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_every,
    parse_share,
    parse_size,
    parse_steps,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4 GiB", 4 << 30),
        ("4GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("1.5 KiB", 1536),
        ("10 B", 10),
        ("1_000 bytes", 1000),
        ("0", 0),
        (0, 0),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("4", "no unit"),
        (4096, "no unit"),
        ("4 min", "'min'"),
        ("4 Gb/s", "not a number"),
        ("four GiB", "not a number"),
        ("-1 GiB", "not between"),
        ("0.3 B", "whole number of bytes"),
        ("9999 PiB", "not between"),
        (True, "no unit"),
        (None, "no unit"),
        ("", "not a number"),
    ],
)
def test_sizes_that_make_no_sense(text: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10 min", 600.0), ("90 s", 90.0), ("1.5h", 5400.0), ("250 ms", 0.25), ("2 days", 172800.0), ("0", 0.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["10", 10, "10 GiB", "10 minuets", "-5 s", "99 years", "", False, [1]])
def test_durations_that_make_no_sense(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected|between"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("100 steps", Every(steps=100)),
        ("1 step", Every(steps=1)),
        ("every step", Every(steps=1)),
        ("every 100 steps", Every(steps=100)),
        ("10 min", Every(seconds=600.0)),
        ("every 90 s", Every(seconds=90.0)),
        (Every(steps=3), Every(steps=3)),
    ],
)
def test_intervals(text: object, every: Every) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", ["100", 100, "0 steps", "1.5 steps", "0 s", "step", "5 GiB", "-1 steps", "often"])
def test_intervals_that_make_no_sense(text: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_every(text)


def test_an_interval_is_one_of_the_two() -> None:
    for steps, seconds in ((0, 0.0), (1, 1.0), (-1, 0.0), (0, float("inf")), (0, float("nan"))):
        with pytest.raises(ValueError, match="interval"):
            Every(steps=steps, seconds=seconds)


def test_steps() -> None:
    assert parse_steps(5) == parse_steps("5") == parse_steps("5 steps") == 5
    assert parse_steps("every step") == 1
    assert parse_steps("1_000") == 1000
    assert parse_steps((1 << 53) - 1) == (1 << 53) - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5 min", "'5 min' is a time; this interval is counted in steps"),
        ("0", "'0 steps' is not a positive number"),
        (-1, "'-1 steps' is not a positive number"),
        ("2.5", "'2.5 steps' is not a whole number"),
        (2.5, "2.5 is not a whole number"),
        (True, "True is not a whole number"),
        ("five", "'five' is not a number"),
        (1 << 53, "more than 9,007,199,254,740,991 steps"),
        ("9" * 400 + ".5", "more than 9,007,199,254,740,991 steps"),
    ],
)
def test_steps_that_make_no_sense(text: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        parse_steps(text)
    assert "10 min" not in str(refused.value), "no time will do"


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**9).map(lambda ms: ms / 1000))
def test_a_duration_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-9)


INTERVALS = st.integers(1, (1 << 53) - 1).map(lambda steps: Every(steps=steps)) | st.integers(1, 10**6).map(
    lambda seconds: Every(seconds=float(seconds))
)


@given(INTERVALS)
def test_an_interval_reads_back(every: Every) -> None:
    assert parse_every(str(every)) == every


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_garbage_is_a_value_error_or_a_value(value: object) -> None:
    for parse in (parse_size, parse_duration, parse_every, parse_steps):
        try:
            parse(value)
        except ValueError:
            continue


@pytest.mark.parametrize(("text", "share"), [("1 %", 0.01), ("0.5%", 0.005), (" 100 % ", 1.0), ("0.001 %", 1e-5)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)
    assert parse_share(format_share(share)) == pytest.approx(share)


@pytest.mark.parametrize("text", ["1", 0.01, 1, "0 %", "101 %", "-1 %", "one %", "", None, True, "1 % %"])
def test_shares_that_make_no_sense(text: object) -> None:
    with pytest.raises(ValueError, match="%"):
        parse_share(text)
