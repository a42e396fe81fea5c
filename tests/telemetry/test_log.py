"""Log lines: one an event, readable by people and programs, harmless whatever is logged."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baftd.telemetry import JOB_COUNTERS, Counters, configure, get_logger
from tests.support.daemon import RunDirs


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The package's logger, left as it was."""
    root = logging.getLogger("baftd")
    before = (list(root.handlers), root.level, root.propagate)
    yield root
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def logged(format: str, level: str = "debug") -> io.StringIO:
    stream = io.StringIO()
    configure(level=level, format=format, stream=stream)
    return stream


def test_logfmt(root_logger: logging.Logger) -> None:
    out = logged("logfmt")
    log = get_logger("daemon").bind(rank=3, job="gpt")
    log.info("sealed", bytes=4096, held_ms=0.25, step=7, note='say "a b"', nothing=None, ok=True)
    line = out.getvalue()
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z")
    assert len(stamp) == len("2025-01-31T12:00:00.123Z")
    assert rest == (
        "level=info room=daemon event=sealed job=gpt rank=3 step=7 bytes=4096 held_ms=0.25 "
        'note="say \\"a b\\"" ok=true\n'
    )


def test_json(root_logger: logging.Logger) -> None:
    out = logged("json")
    log = get_logger("wire")
    log.warning("refused", field="step", reason="a\nb", path=Path("/x"), ranks=(1, 2), odd={1: {2}}, level="x")
    document = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert document["level"] == "warning"
    assert document["field_level"] == "x"
    assert document["reason"] == "a\nb"
    assert document["path"] == "/x"
    assert document["ranks"] == [1, 2]
    assert document["odd"] == {"1": [2]}


def test_one_line_an_event_whatever_is_in_it(root_logger: logging.Logger) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no")

    for format in ("logfmt", "json"):
        out = logged(format)
        get_logger("x").error("odd", a="x\ny\r\x00\x1b[2J", b=float("nan"), c=Hostile(), d="", e="k=v", f=1e300)
        text = out.getvalue()
        assert text.count("\n") == 1
        assert "\x1b" not in text
        assert "RuntimeError" in text


def test_levels(root_logger: logging.Logger) -> None:
    out = logged("logfmt", level="warning")
    log = get_logger("daemon")
    log.info("quiet")
    log.event("loud", level="error")
    assert not log.enabled("info")
    assert log.enabled("error")
    assert "quiet" not in out.getvalue()
    assert "event=loud" in out.getvalue()
    with pytest.raises(ValueError, match="level"):
        configure(level="loud")


def test_traceback_is_one_field(root_logger: logging.Logger) -> None:
    out = logged("json")
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        get_logger("daemon").exception("failed", job="j")
    document = json.loads(out.getvalue())
    assert "RuntimeError: inside" in document["traceback"]
    assert document["level"] == "error"


def test_foreign_records_are_events_too(root_logger: logging.Logger) -> None:
    out = logged("json")
    logging.getLogger("baftd.elsewhere").warning("hello %s", "you")
    assert json.loads(out.getvalue())["text"] == "hello you"


def test_a_training_process_hears_warnings_without_configuring(run_dirs: RunDirs) -> None:
    code = "import baftd.telemetry as t; g = t.get_logger('client'); g.info('quiet'); g.warning('loud', job='j')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=run_dirs.environ(), capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == "room=client event=loud job=j\n"
    assert done.stdout == ""


def test_the_users_own_logging_gets_the_events(root_logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    root_logger.propagate = True
    with caplog.at_level(logging.INFO, logger="baftd"):
        get_logger("client").info("sealed", step=1)
    assert caplog.messages == ["room=client event=sealed step=1"]


def test_threads_write_whole_lines(root_logger: logging.Logger) -> None:
    out = logged("json")

    def write(number: int) -> None:
        for step in range(50):
            get_logger("daemon").info("sealed", rank=number, step=step)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 200


FILE_LOG = """
import os, sys
from pathlib import Path
from baftd.telemetry import configure, get_logger
configure(path=Path(sys.argv[1]), max_bytes=2000)
for step in range(60):
    get_logger("daemon").info("sealed", step=step, pad="x" * 20)
print("stdout follows", flush=True)
os.write(2, b"stderr follows\\n")
"""


def test_a_log_file_is_rotated_and_stderr_follows(run_dirs: RunDirs) -> None:
    path = run_dirs.base / "baftd.log"
    command = [sys.executable, "-c", FILE_LOG, str(path)]
    subprocess.run(command, env=run_dirs.environ(), timeout=30, check=True, stdin=subprocess.DEVNULL)
    newest, older = path.read_text(), Path(f"{path}.1").read_text()
    assert "step=59" in newest or "step=59" in older
    assert newest.endswith("stdout follows\nstderr follows\n")
    assert len(older) < 2400
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_full_log_file_does_not_raise(root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it flushes, and fails
        handler = configure(stream=full)
        get_logger("daemon").info("sealed")
        get_logger("daemon").info("sealed")
        logging.getLogger("baftd").removeHandler(handler)
    assert capfd.readouterr().err.count("--- Logging error ---") <= 1


def test_counters() -> None:
    counters = Counters(JOB_COUNTERS)
    counters.add("skipped")
    counters.add("skipped", 2)
    assert counters["skipped"] == 3
    assert list(counters.as_dict()) == list(JOB_COUNTERS)
    with pytest.raises(KeyError):
        counters.add("skiped")
    with pytest.raises(ValueError, match="down"):
        counters.add("skipped", -1)
