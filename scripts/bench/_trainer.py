"""The training process of bench/snapshot.py: real steps on numpy arrays, with several ways to checkpoint in turn.

Run by `_training.py` with one JSON argument; speaks JSON lines on stdout, and goes on at each line of stdin.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _copying import pattern
from _report import interleave, timed

from baft_client.arrays import ArrayCheckpointer, attach_arrays
from baftd.errors import UsageError

BLOCK = 16 << 20
Arrays = dict[str, npt.NDArray[np.float32]]


_parent = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print goes with the errors


def say(**fields: object) -> None:
    """One line to the parent."""
    _parent.write(json.dumps(fields) + "\n")
    _parent.flush()


def wait_for_parent() -> None:
    """Until it wrote a line, or is gone."""
    sys.stdin.readline()


def make_arrays(nbytes: int) -> Arrays:
    """`nbytes` in 300 tensors of mixed sizes: a model with its optimizer's moments."""
    weights = [1.0 + 30.0 * (i % 10 == 0) for i in range(300)]
    elements = [max(16, int(nbytes / 4 * weight / sum(weights))) for weight in weights]
    return {f"t{i:03d}": pattern(4 * n).view(np.float32) for i, n in enumerate(elements)}


class Work:
    """Computing on one core for a given time: the step between boundary and fence."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._a = np.random.default_rng(0).random((256, 256), dtype=np.float32)

    def __call__(self) -> None:
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            np.matmul(self._a, self._a)


def change(arrays: Arrays) -> None:
    """The update: some elements of every tensor."""
    for array in arrays.values():
        array.view(np.uint32)[::4096] += 1


# ------------------------------------------------------------------------------------ contestants: held milliseconds


def baftd_turn(ckpt: ArrayCheckpointer, work: Callable[[], None]) -> Callable[[], float]:
    """Boundary, work, fence."""

    def turn() -> float:
        outcomes = []
        held = timed(lambda: outcomes.append(ckpt.step()))
        work()
        held += timed(lambda: outcomes.append(ckpt.fence()))
        kinds = [str(outcome.kind.value) for outcome in outcomes]
        if kinds != ["began", "sealed"] or not ckpt.session.settle(60.0):
            raise RuntimeError(f"no snapshot: {outcomes}")
        return held

    return turn


def memcpy_turn(arrays: Arrays, work: Callable[[], None]) -> Callable[[], float]:
    """One warm copy of everything, in the training thread."""
    copies = {name: array.copy() for name, array in arrays.items()}

    def copy() -> None:
        for name, array in arrays.items():
            np.copyto(copies[name], array)

    def turn() -> float:
        held = timed(copy)
        work()
        return held

    return turn


def torch_turns(arrays: Arrays, work: Callable[[], None], directory: Path) -> dict[str, Callable[[], float]]:
    """torch.save; DCP async_save with a stager that is kept, staging in the call and in its background thread."""
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

    torch.set_num_threads(1)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    target = directory / "peer"

    def forget() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()

    def save() -> float:
        forget()
        held = timed(lambda: torch.save(state, target / "state.pt"))
        work()
        return held

    def async_save(stager: DefaultStager) -> float:
        forget()
        began = time.perf_counter()
        answer: Any = dcp_async_save(state, checkpoint_id=target, async_stager=stager, no_dist=True)
        held = time.perf_counter() - began
        work()
        if hasattr(answer, "staging_completion"):
            held += timed(answer.staging_completion.result)
            answer.upload_completion.result()
        else:
            answer.result()
        return held

    options = {"use_pinned_memory": False, "use_shared_memory": False, "use_non_blocking_copy": False}
    inline = DefaultStager(StagingOptions(use_async_staging=False, **options))
    background = DefaultStager(StagingOptions(use_async_staging=True, **options))
    return {
        "torch_save": save,
        "dcp_async_save": lambda: async_save(inline),
        "dcp_async_save_background": lambda: async_save(background),
    }


def dlrover_turn(arrays: Arrays, work: Callable[[], None], directory: Path) -> Callable[[], float]:
    """dlrover's flash checkpoint into its own shared memory."""
    import torch
    import torch.distributed as dist
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    checkpointer = DdpCheckpointer(str(directory / "dlrover"))
    step = 0

    def turn() -> float:
        nonlocal step
        step += 1
        held = timed(lambda: checkpointer.save_checkpoint(step, {"state": state}, storage_type=StorageType.MEMORY))
        work()
        return held

    return turn


def held(ckpt: ArrayCheckpointer, arrays: Arrays, spec: dict[str, Any]) -> None:
    """Every contestant in turn; one line with the series, one for each that is absent."""
    work = Work(spec["work"])
    scratch = Path(spec["scratch"])
    for _ in range(6):  # every slot once: the daemon makes their pages beside the first steps
        baftd_turn(ckpt, Work(spec["work"] / 4))()
        change(arrays)
    turns: dict[str, Callable[[], float]] = {"baftd": baftd_turn(ckpt, work), "memcpy": memcpy_turn(arrays, work)}
    if importlib.util.find_spec("torch") is None:
        say(absent="torch.save and DCP async_save: torch is not installed")
    else:
        turns.update(torch_turns(arrays, work, scratch))
        if importlib.util.find_spec("dlrover") is None:
            say(absent="dlrover: not installed (pip install dlrover==0.6.1 grpcio tornado psutil)")
        else:
            try:
                turns["dlrover"] = dlrover_turn(arrays, work, scratch)
            except Exception as error:  # noqa: BLE001 - a peer that cannot start here is reported as absent
                say(absent=f"dlrover: {type(error).__name__}: {error}")

    def between(turn: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            seconds = turn()
            change(arrays)
            return seconds

        return run

    say(held=interleave({name: between(turn) for name, turn in turns.items()}, spec["rounds"]))


# ------------------------------------------------------------------------------------ durable


def durable(ckpt: ArrayCheckpointer, arrays: Arrays, spec: dict[str, Any]) -> None:
    """A committed step made durable by the daemon, against a plain O_DIRECT write of as many bytes."""
    directory = Path(spec["durable"])
    nbytes = sum(array.nbytes for array in arrays.values()) // BLOCK * BLOCK or BLOCK
    buffer = mmap.mmap(-1, BLOCK)
    buffer.write(pattern(BLOCK).tobytes())
    direct = os.O_DIRECT
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        direct = 0
        say(absent=f"O_DIRECT: refused by the file system of {directory}; the plain write is buffered")

    def plain() -> float:
        path = directory / "plain"

        def write() -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                for at in range(0, nbytes, BLOCK):
                    os.pwrite(fd, buffer, at)
                os.fsync(fd)
            finally:
                os.close(fd)

        seconds = timed(write)
        path.unlink()
        return seconds / nbytes

    def saved() -> float:
        change(arrays)
        ckpt.step()
        ckpt.fence()
        if not ckpt.session.settle(60.0):
            raise RuntimeError("the step was not committed in memory")
        return timed(lambda: ckpt.save(timeout=300.0)) / sum(array.nbytes for array in arrays.values())

    say(durable=interleave({"plain": plain, "baftd": saved}, spec["rounds"]))


# ------------------------------------------------------------------------------------ restore


def restore(ckpt: ArrayCheckpointer, arrays: Arrays, spec: dict[str, Any]) -> None:
    """From the pinned slot into the arrays, verified, against numpy.copyto between the same memory."""
    resumed = ckpt.session.resume()
    image = resumed.image
    if image is None:
        raise UsageError("nothing to restore: the first trainer left no checkpoint.")
    view = image._slot.image()  # the very pages that are restored from
    places = {p.stored_name: view[p.offset : p.offset + p.nbytes] for p in image.parsed.placements}

    def ours() -> float:
        def copy() -> None:
            for name, array in arrays.items():
                image.copy_into(name, array.ctypes.data, array.nbytes)

        return timed(copy)

    def plain() -> float:
        def copy() -> None:
            for name, array in arrays.items():
                np.copyto(array.view(np.uint8), places[name])

        return timed(copy)

    series = interleave({"plain": plain, "baftd": ours}, spec["rounds"])
    image.verify_rest()
    say(restore=series, step=resumed.step)
    places.clear()
    del view
    ckpt.session.restored()


def main() -> None:
    """Do what the JSON argument says: mode train or restore."""
    os.setpgid(0, 0)  # with all that peers start, so that the parent can end them
    spec = json.loads(sys.argv[1])
    arrays = make_arrays(spec["nbytes"])
    ckpt = attach_arrays("bench", arrays, rank=0, world=1, strict=True)
    if spec["mode"] == "restore":
        restore(ckpt, arrays, spec)
        ckpt.finish()
        return
    ckpt.resume()
    held(ckpt, arrays, spec)
    durable(ckpt, arrays, {**spec, "rounds": spec["durable_rounds"]})
    say(idle=True)
    wait_for_parent()
    ckpt.close()


if __name__ == "__main__":
    main()
