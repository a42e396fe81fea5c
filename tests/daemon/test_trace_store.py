"""What is kept of the newest steps, within bounds, and what a trace request gets of it."""

from __future__ import annotations

import threading

import pytest

from baftd.daemon import trace_store
from baftd.daemon.trace_store import KEPT_BYTES, KEPT_STEPS, TraceStore
from baftd.pipeline.events import EVENT_BYTES, Event, EventKind, pack_event
from baftd.telemetry.spans import Spans
from baftd.wire.codec import decode_reply, encode
from baftd.wire.messages import RankStep, TraceReply, TraceRequest

EVENT = pack_event(Event(EventKind.FORWARD, 0, 0, 10, 20))


def step(rank: int, number: int, events: bytes = EVENT) -> RankStep:
    return RankStep(rank=rank, step=number, begun=1000 * number, period=1000, events=events)


def ask(store: TraceStore, first: int = 0, last: int = 1 << 30, spans: Spans | None = None) -> TraceReply:
    reply = store.reply(TraceRequest(job="j", first=first, last=last), "node-a", 3, spans or Spans())
    assert decode_reply([encode(reply)]) == reply
    return reply


def test_the_newest_steps_of_each_rank_are_kept_and_asked_for_by_number() -> None:
    store = TraceStore()
    for number in range(KEPT_STEPS + 10):
        for rank in (1, 0):
            store.add(step(rank, number))
    assert store.kept() == (10, KEPT_STEPS + 9)
    reply = ask(store, 12, 13)
    assert [(one.step, one.rank) for one in reply.steps] == [(12, 0), (12, 1), (13, 0), (13, 1)]
    assert (reply.node, reply.epoch, reply.kept) == ("node-a", 3, (10, KEPT_STEPS + 9))
    assert ask(store, 0, 9).steps == []


def test_bytes_are_bounded_whatever_ranks_send() -> None:
    store = TraceStore()
    large = EVENT * ((1 << 20) // EVENT_BYTES)
    for number in range(40):
        for rank in range(4):
            store.add(step(rank, number, large))
    assert store.nbytes <= KEPT_BYTES
    assert {one.rank for one in ask(store).steps} == {0, 1, 2, 3}
    store.forget([0])
    assert {one.rank for one in ask(store).steps} == {1, 2, 3}
    store.forget()
    assert store.kept() == (0, 0)


def test_an_answer_keeps_the_newest_that_fit_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "REPLY_BYTES", 3 * (len(EVENT) + 64))
    store = TraceStore()
    for number in range(5):
        store.add(step(0, number))
    assert [one.step for one in ask(store).steps] == [2, 3, 4]


def test_the_daemons_own_work_in_these_steps_comes_along() -> None:
    store, spans = TraceStore(), Spans(kept=3)
    for number in (5, 6):
        store.add(step(0, number))
    assert ask(store, spans=spans).spans == []
    spans.add("digest", 0, rank=0, step=4, bytes=7)  # began at boot, and ends now: it was under way
    with spans.span("durable", rank=0, step=5):
        pass  # long after these steps, which were in the first microseconds of this machine
    assert [(one.what, one.rank, one.step, one.bytes) for one in ask(store, spans=spans).spans] == [("digest", 0, 4, 7)]


def test_spans_are_kept_of_work_that_fails_and_from_any_thread() -> None:
    spans = Spans(kept=100)

    def work() -> None:
        for _ in range(50):
            try:
                with spans.span("digest"):
                    raise ValueError
            except ValueError:
                continue

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(spans.newest()) == 100
