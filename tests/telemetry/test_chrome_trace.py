"""The trace: what viewers need of it holds for whatever records come in, and what happened can be read off it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.pipeline.events import Event, EventKind
from baftd.telemetry.chrome_trace import NO_LIMIT, NodeTrace, Period, chrome_trace
from baftd.telemetry.spans import Span

MS = 1_000_000
START = 4_000_000_000_000

moments = st.integers(0, 1 << 62)
near = st.integers(START, START + 200 * MS)
events = st.builds(
    Event,
    st.sampled_from(EventKind),
    st.integers(-1, 40),
    st.integers(-1, 9),
    near | moments,
    near | moments,
    st.integers(0, (1 << 64) - 1),
)
periods = st.builds(
    Period,
    st.integers(0, 3),
    st.integers(0, 1 << 40),
    near | moments,
    st.integers(0, 100 * MS),
    st.lists(events, max_size=25),
    st.booleans(),
    st.integers(0, 9),
)
spans = st.builds(
    Span,
    st.sampled_from(["digest", "durable", "commit", 'a "strange" one\n']),
    near | moments,
    st.integers(0, 100 * MS),
    st.integers(-1, 3),
    st.integers(0, 99),
    st.integers(0, 1 << 40),
)
nodes = st.builds(NodeTrace, st.text(max_size=8), st.lists(periods, max_size=6), st.lists(spans, max_size=6))


@given(st.text(max_size=8), st.lists(nodes, max_size=3))
def test_the_document_is_what_viewers_open_whatever_the_records_say(job: str, found: list[NodeTrace]) -> None:
    document = json.loads(json.dumps(chrome_trace(job, found), allow_nan=False))
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    named: set[tuple[int, int]] = set()
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    last = 0.0
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "C")
        assert isinstance(event["name"], str)
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                assert where not in named
                named.add(where)
            continue
        assert event["ts"] >= last, "in the order of time"
        last = event["ts"]
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) and value >= 0 for value in event["args"].values())
            assert (event["pid"], 0) in named
            continue
        assert event["dur"] >= 0
        assert where in named
        tracks[where].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    for found_slices in tracks.values():
        if found_slices[-1][0] < 1 << 50:  # beyond it, microseconds as floats are no longer exact
            _nested(found_slices)


def _nested(slices: list[tuple[int, int]]) -> None:
    """Slices of one track, in the order of their begin and then the longest first, lie inside or beside one another."""
    ends: list[int] = []
    for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1]
        ends.append(end)


# ---------------------------------------------------------------- what can be read off


def at(milliseconds: float) -> int:
    return START + round(milliseconds * MS)


def one_step(**changes: Any) -> NodeTrace:
    """F0, a wait of 4 ms with a window over it, B0; 3 MB copied in the window, 1 MB outside, 1 MB at the fence."""
    seen = [
        Event(EventKind.SCHEDULE, -1, -1, at(1), at(15)),
        Event(EventKind.FORWARD, 2, 0, at(1), at(3)),
        Event(EventKind.WAIT_RECV, 2, 0, at(4), at(8)),
        Event(EventKind.WINDOW, int(EventKind.WAIT_RECV), 0, at(4), at(8), 4_000_000),
        Event(EventKind.COPY_INSIDE, -1, 0, at(4), at(7), 3_000_000),
        Event(EventKind.BACKWARD, 2, 0, at(9), at(14)),
        Event(EventKind.COPY_OUTSIDE, -1, -1, at(9), at(10), 1_000_000),
        Event(EventKind.WAIT_COLLECTIVE, -1, -1, at(16), at(17), 64),
        Event(EventKind.FENCE, -1, -1, at(18), at(19), 1_000_000),
        Event(EventKind.COPY_FENCE, -1, -1, at(18), at(19), 1_000_000),
    ]
    period = Period(3, 41, START, 20 * MS, seen, True, 7)._replace(**changes)
    return NodeTrace("n0", [period], [Span("digest", at(19), 5 * MS, 3, 41, 5_000_000)])


def slices(document: Any) -> dict[str, list[Any]]:
    """Slices by the name of their track."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    found = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            found[names[(event["pid"], event["tid"])]].append(event)
    return found


def test_a_rank_has_tracks_for_steps_operations_gaps_windows_and_copying() -> None:
    document = chrome_trace("gpt", [one_step()])
    found = slices(document)
    assert sorted(found) == [
        "daemon: digest", "rank 3", "rank 3: between operations", "rank 3: copy engine", "rank 3: steps",
        "rank 3: windows",
    ]  # fmt: skip
    (step,) = found["rank 3: steps"]
    assert (step["name"], step["ts"], step["dur"], step["args"]) == (
        "step 41", 0.0, 20_000.0, {"copied": True, "copy_plan": 7},
    )  # fmt: skip
    doing = [one["name"] for one in found["rank 3"]]
    assert doing == ["schedule", "F0 s2", "wait: receive", "B0 s2", "wait: collective", "fence"]
    assert document["otherData"] == {"job": "gpt", "first_step": 41, "last_step": 41}
    (digest,) = found["daemon: digest"]
    assert (digest["name"], digest["args"]) == (
        "digest step 41 rank 3", {"rank": 3, "step": 41, "bytes": 5_000_000, "MB/s": 1000.0},
    )  # fmt: skip


def test_gaps_are_the_time_without_an_operation_and_say_how_much_was_waited() -> None:
    found = slices(chrome_trace("gpt", [one_step()]))["rank 3: between operations"]
    assert [(one["name"], one["ts"], one["dur"], one["args"]["waited_us"]) for one in found] == [
        ("fill", 0.0, 1000.0, 0.0),
        ("steady", 3000.0, 6000.0, 4000.0),
        ("after the last operation", 14_000.0, 6000.0, 1000.0),
    ]
    assert found[1]["args"]["before"] == "B0 s2"


def test_a_window_says_what_was_granted_used_and_left() -> None:
    found = slices(chrome_trace("gpt", [one_step()]))
    (window,) = found["rank 3: windows"]
    assert window["name"] == "window 0: receive"
    expected = {"step": 41, "window": 0, "used": 3_000_000, "granted": 4_000_000, "left": 1_000_000}
    assert window["args"] == expected
    assert [(one["name"], one["args"]["bytes"]) for one in found["rank 3: copy engine"]] == [
        ("copy in window", 3_000_000), ("copy outside windows", 1_000_000), ("copy at the fence", 1_000_000),
    ]  # fmt: skip
    fence = next(one for one in found["rank 3"] if one["name"] == "fence")
    assert fence["args"]["bytes_left"] == 1_000_000


@pytest.mark.parametrize("amount", [NO_LIMIT, (1 << 53) - 1, (1 << 64) - 1])
def test_no_limit_is_said_in_words(amount: int) -> None:
    seen = [Event(EventKind.WINDOW, int(EventKind.WAIT_RECV), 0, at(4), at(8), amount)]
    (window,) = slices(chrome_trace("gpt", [one_step(events=seen)]))["rank 3: windows"]
    assert window["args"] == {"step": 41, "window": 0, "used": 0, "granted": "no limit"}


def test_an_overrun_window_is_named_so() -> None:
    seen = [
        Event(EventKind.WINDOW, int(EventKind.WAIT_COLLECTIVE), 2, at(4), at(8), NO_LIMIT),
        Event(EventKind.COPY_INSIDE, -1, 2, at(4), at(9), 3_000_000),
        Event(EventKind.COPY_INSIDE, -1, 1, at(1), at(3), 1_000_000),
    ]
    (window,) = slices(chrome_trace("gpt", [one_step(events=seen)]))["rank 3: windows"]
    assert window["name"] == "window 2: collective (overrun)"
    assert (window["args"]["overrun_us"], window["args"]["granted"], window["args"]["used"]) == (
        1000.0, "no limit", 3_000_000,
    )  # fmt: skip


def test_what_overlaps_gets_a_further_track_of_the_same_name() -> None:
    seen = [
        Event(EventKind.BACKWARD, 0, 0, at(1), at(6)),
        Event(EventKind.REDUCE, 0, -1, at(4), at(9)),  # of another thread
        Event(EventKind.WAIT_RECV, 0, 0, at(2), at(3)),
    ]
    document = chrome_trace("gpt", [one_step(events=seen)])
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("operation", "wait"):
            tracks[event["tid"]].append(event["name"])
    assert sorted(tracks.values()) == [["B0 s0", "wait: receive"], ["reduce"]]


def test_the_copy_rate_is_a_counter_that_comes_down_again() -> None:
    counters = [event for event in chrome_trace("gpt", [one_step()])["traceEvents"] if event["ph"] == "C"]
    assert [(event["ts"], event["args"]["MB/s"]) for event in counters] == [
        (4000.0, 1000.0), (7000.0, 0.0), (9000.0, 1000.0), (10_000.0, 0.0), (18_000.0, 1000.0), (19_000.0, 0.0),
    ]  # fmt: skip


def test_each_node_is_a_process() -> None:
    document = chrome_trace("gpt", [one_step(), one_step()._replace(node="n1")])
    names = [(e["pid"], e["args"]["name"]) for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == [(1, "node n0"), (2, "node n1")]
    assert chrome_trace("gpt", [])["traceEvents"] == []
