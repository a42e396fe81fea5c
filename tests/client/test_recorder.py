"""The recorder of events: what comes out is what went in, from every thread, and what has no room is counted."""

from __future__ import annotations

import threading

import pytest

from baft_client.recorder import Recorder
from baftd.pipeline.events import EVENT_BYTES, Event, EventKind, unpack_events


def test_events_come_out_in_order_and_once() -> None:
    recorder = Recorder()
    events = [
        Event(EventKind.FORWARD, 3, 7, 10, 20),
        Event(EventKind.WAIT_RECV, -1, -1, 20, 25, 4096),
        Event(EventKind.WINDOW, int(EventKind.WAIT_RECV), 0, (1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 1),
    ]
    for event in events:
        recorder.add(*event)
    batch, lost = recorder.take()
    assert list(unpack_events(batch)) == events
    assert lost == 0
    assert recorder.take() == (b"", 0), "a batch is taken once"
    recorder.add(*events[1])
    assert list(unpack_events(recorder.take()[0])) == events[1:2]


def test_what_has_no_room_is_counted() -> None:
    recorder = Recorder(room=4)
    for number in range(7):
        recorder.add(EventKind.FORWARD, 0, number, 1, 2)
    assert recorder.lost == 3
    batch, lost = recorder.take()
    assert ([event.micro for event in unpack_events(batch)], lost) == ([0, 1, 2, 3], 3)
    recorder.add(EventKind.FORWARD, 0, 9, 1, 2)
    batch, lost = recorder.take()
    assert ([event.micro for event in unpack_events(batch)], lost) == ([9], 0)


@pytest.mark.parametrize(
    ("kind", "stage", "micro", "begin"),
    [(EventKind.FORWARD, 0, 0, -1), (EventKind.FORWARD, 1 << 15, 0, 1), (EventKind.FORWARD, 0, 1 << 31, 1)],
)
def test_what_is_no_event_is_counted_and_does_not_raise(kind: EventKind, stage: int, micro: int, begin: int) -> None:
    recorder = Recorder()
    recorder.add(kind, stage, micro, begin, 2)
    recorder.add(EventKind.BACKWARD, 0, 0, 1, 2)
    batch, lost = recorder.take()
    assert [event.kind for event in unpack_events(batch)] == [EventKind.BACKWARD]
    assert lost == 1


def test_threads_have_a_place_each() -> None:
    recorder, each = Recorder(room=4000), 1000
    ready = threading.Barrier(4)

    def work(stage: int) -> None:
        ready.wait(10)
        for micro in range(each):
            recorder.add(EventKind.BACKWARD, stage, micro, micro, micro + 1)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    batch, lost = recorder.take()
    assert (len(batch), lost) == (4 * each * EVENT_BYTES, 0)
    for stage in range(4):
        assert [event.micro for event in unpack_events(batch) if event.stage == stage] == list(range(each))
