"""Plain numpy arrays: the few lines of the example, restored in place, and what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import baft_client
from baft_client import ArrayCheckpointer, OutcomeKind, attach_arrays
from baftd.errors import JobNameError, ModelMismatch, UnsupportedTensor, UsageError
from baftd.pipeline.events import EventKind
from baftd.wire.messages import Finish, Leave, Restored, ResumePlan, Save, Seal, Timings, WireToken
from tests.support.daemon import ROOT, Daemon, wait_until
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import INCARNATION, Places

Array = npt.NDArray[Any]


def attach(where: Places, arrays: dict[str, Array], **options: Any) -> ArrayCheckpointer:
    options.setdefault("incarnation", INCARNATION)
    return attach_arrays("job", arrays, settings=where.settings(), **options)


def some() -> dict[str, Array]:
    return {"w": np.arange(1000.0), "m": np.zeros((3, 4), dtype=np.float32)}


def resume_from(scripted: ScriptedDaemon, step: int) -> None:
    image = scripted.image()
    scripted.plan = lambda request: ResumePlan(
        token=WireToken(2, INCARNATION), step=step, updates=step, epoch=1, source=image, tier="memory"
    )


def train(ckpt: ArrayCheckpointer, arrays: dict[str, Array], start: int, stop: int) -> None:
    for step in range(start, stop):
        with ckpt.update():
            for array in arrays.values():
                array += step + 1
        ckpt.step()


def test_the_loop_of_the_documentation(where: Places, scripted: ScriptedDaemon) -> None:
    arrays = some()
    with attach(where, arrays, extra=lambda: {"seed": 7}) as ckpt:
        assert ckpt.resume() == 0
        train(ckpt, arrays, 0, 3)
        expected = {name: array.copy() for name, array in arrays.items()}
    assert scripted.wait_for(Finish)[0].step == 3
    assert scripted.wait_for(Seal)[-1].step == 3, "finish takes the last step even if it found no slot at first"
    resume_from(scripted, 3)
    again = some()
    seen: list[dict[str, Any]] = []
    with attach(where, again, load_extra=seen.append) as ckpt:
        assert ckpt.resume() == 3
        assert seen == [{"seed": 7}] == [ckpt.extra_restored]
        for name, array in again.items():
            np.testing.assert_array_equal(array, expected[name])
        with ckpt.update():
            again["w"] += 1
        ckpt.step()
    assert scripted.wait_for(Seal)[-1].step == 4
    assert scripted.wait_for(Seal)[-1].updates == 4


def test_an_exception_keeps_the_slots(where: Places, scripted: ScriptedDaemon) -> None:
    with pytest.raises(RuntimeError, match="diverged"), attach(where, some()) as ckpt:  # noqa: PT012
        ckpt.resume()
        ckpt.step()
        raise RuntimeError("diverged")
    assert scripted.wait_for(Leave)[0].reason == "RuntimeError: diverged"
    assert not [message for message in scripted.received if isinstance(message, Finish)]


def test_finish_takes_a_step_that_the_cadence_left_out(where: Places) -> None:
    with where.daemon(every=10) as scripted:
        arrays = some()
        with attach(where, arrays) as ckpt:
            ckpt.resume()
            train(ckpt, arrays, 0, 13)
        sealed = [message.step for message in scripted.wait_for(Seal)]
        assert sealed[-1] == 13
        assert set(sealed) <= {1, 10, 13}
        again = some()
        with attach(where, again) as ckpt:
            ckpt.resume()
            train(ckpt, again, 0, 4)
            assert ckpt.save().step == 4
            with ckpt.update():
                again["w"] += 1
        assert [m.step for m in scripted.wait_for(Save)] == [4]
        assert scripted.wait_for(Seal)[-1].step == 4, "a state in mid-step is no state(5)"


def test_what_changes_outside_an_update_is_torn(where: Places, scripted: ScriptedDaemon) -> None:
    arrays = some()
    with attach(where, arrays, audit=1) as ckpt:
        ckpt.resume()
        ckpt.step()
        arrays["w"][500] += 1
        assert ckpt.fence().kind is OutcomeKind.TORN
        ckpt.session.settle(5)
        ckpt.step()
        arrays["m"].resize((5, 5), refcheck=False)
        assert ckpt.fence().name == "m"
        ckpt.close()


def test_volatile_arrays_are_copied_at_once(where: Places, scripted: ScriptedDaemon) -> None:
    arrays = some()
    with attach(where, arrays, volatile=("w",), audit=1) as ckpt:
        ckpt.resume()
        ckpt.step()
        arrays["w"][:] = -1
        assert ckpt.fence().kind is OutcomeKind.SEALED
        ckpt.session.settle(5)
        resume_from(scripted, 1)
        again = some()
        with attach(where, again, volatile=("w",)) as second:
            second.resume()
            np.testing.assert_array_equal(again["w"], np.arange(1000.0))
            second.close()
        ckpt.close()
    with pytest.raises(UsageError, match=r"\['nope'\]"):
        attach(where, arrays, volatile=("nope",))


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_every_number_comes_back_bit_for_bit(where: Places, scripted: ScriptedDaemon, dtype: str) -> None:
    bits = np.random.default_rng(1).integers(0, 256, 16 * 33, dtype=np.uint8)
    value = (bits % 2).astype(bool) if dtype == "?" else bits.view(np.dtype(dtype)).copy()
    with attach(where, {"x": value}) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.fence()
        assert ckpt.session.settle(5)
        resume_from(scripted, 1)
        again = np.zeros_like(value)
        with attach(where, {"x": again}) as second:
            second.resume()
            assert again.tobytes() == value.tobytes()
            second.close()
        ckpt.close()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(["a"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (np.zeros(3, dtype=">f4"), "dtype >f4"),
        (np.zeros((4, 4))[:, ::2], "not C-contiguous"),
        (np.broadcast_to(np.zeros(1), (4,)), "not"),
        (np.frombuffer(b"12345678"), "not writable"),
    ],
)
def test_arrays_that_cannot_be_restored_in_place_are_refused_by_name(where: Places, array: Array, words: str) -> None:
    with pytest.raises(UnsupportedTensor, match=f"'bad'.*{re.escape(words)}"):
        attach(where, {"good": np.zeros(3), "bad": array})


def test_another_model_is_refused_with_all_differences(where: Places, scripted: ScriptedDaemon) -> None:
    with attach(where, {"a": np.zeros(3), "b": np.zeros(4), "c": np.zeros(5), "same": np.zeros(1)}) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.fence()
        assert ckpt.session.settle(5)
        resume_from(scripted, 1)
        other = {"a": np.full(9, 7.0), "b": np.zeros(4, dtype=np.float32), "d": np.zeros(1), "same": np.zeros(1)}
        with pytest.raises(ModelMismatch) as caught, attach(where, other) as second:
            second.resume()
        ckpt.close()
    text = str(caught.value)
    for words in ("a: shape (9,) here, (3,) in", "b: F32 here, F64 in", "c: only in the checkpoint", "d: not in the"):
        assert words in text
    assert (other["a"] == 7).all(), "nothing was loaded"
    assert not scripted.wait_for(Restored, count=2)[1].ok


def test_job_names_that_are_no_directories_are_refused(where: Places) -> None:
    for name in ("a/b", "..", "", "x" * 65, "-a", "a..b"):
        with pytest.raises(JobNameError):
            attach_arrays(name, some(), settings=where.settings())


def test_the_package_offers_what_it_says() -> None:
    for name in baft_client.__all__:
        assert getattr(baft_client, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        baft_client.nonsense  # noqa: B018


def test_snapshots_are_copied_in_the_waits_of_the_loop(where: Places, scripted: ScriptedDaemon) -> None:
    arrays: dict[str, Array] = {"w": np.arange(1 << 18, dtype=np.float32)}
    with attach(where, arrays, audit=1) as ckpt:
        ckpt.resume()
        for step in range(1, 5):
            wait_until(lambda: step == 1 or ckpt.session._standing.granted > 0, "a slot")  # noqa: B023
            ckpt.step()
            with ckpt.window(), ckpt.windows.waiting(EventKind.WAIT_DATA):
                assert ckpt.session._layout.writer is not None
                wait_until(lambda: ckpt.session._layout._engine.progress() == 1 << 20, "the copy")  # type: ignore[union-attr]
            with ckpt.update():
                arrays["w"] += 1
        assert ckpt.counters.sealed == 4
        ckpt.session._link._wake()
        told = scripted.wait_for(Timings, count=3)
    assert [message.in_windows for message in told] == [0, 1 << 20, 1 << 20], "from the second boundary on"
    assert [message.at_fence for message in told] == [0, 0, 0]


# ---------------------------------------------------------------- with the real daemon

EXAMPLE = ROOT / "scripts" / "examples" / "numpy_job.py"


def losses(text: str) -> dict[int, str]:
    """step -> loss, as the example prints them."""
    return {int(m[1]): m[2] for m in re.finditer(r"step (\d+) loss (\S+)", text)}


def test_the_example_killed_and_started_again_has_the_same_losses(daemon: Daemon) -> None:
    steps = 120
    plain = subprocess.run(
        [sys.executable, "-c", WITHOUT_BAFTD, str(EXAMPLE), str(steps)],
        env=daemon.environ(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    expected = losses(plain.stdout)
    assert len(expected) == steps
    out = daemon.dirs.base / "first.txt"
    with (
        out.open("w") as file,
        subprocess.Popen([sys.executable, str(EXAMPLE), str(steps * 50)], env=daemon.environ(), stdout=file) as killed,
    ):
        try:
            wait_until(lambda: len(losses(out.read_text())) > 40, "40 steps", timeout=60)
        finally:
            killed.kill()
    before = losses(out.read_text())
    again = subprocess.run(
        [sys.executable, str(EXAMPLE), str(max(before) + steps)],
        env=daemon.environ(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    after = losses(again.stdout)
    assert min(after) > 1, f"it began anew: {again.stderr}"
    assert min(after) <= max(before) + 1, "no step may be missing"
    for step, loss in {**before, **after}.items():
        if step in expected:
            assert loss == expected[step]
        if step in before and step in after:
            assert before[step] == after[step]


WITHOUT_BAFTD = """
import contextlib, sys, types
class Nothing:
    def resume(self): return 0
    def step(self): pass
    update = contextlib.nullcontext
fake = types.ModuleType("baft_client")
fake.attach_arrays = lambda *a, **k: contextlib.nullcontext(Nothing())
sys.modules["baft_client"] = fake
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
