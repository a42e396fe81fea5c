"""A job of numpy arrays that its ranks hold alike, run as a script: one process is one rank.

Every element changes by itself, so the state after k steps is known whatever was saved by whom. One JSON line says
where the rank resumed and what was wrong, one each time that it waits for a line of input, one what it ended with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from baft_client.arrays import ArrayCheckpointer, Part, _pointer, _source, attach_arrays
from baftd.checkpoint.ranges import whole
from baftd.errors import BaftError

Array = npt.NDArray[Any]

REPLICATED = {"w1": (301, 64), "w2": (7, 5, 97), "bias": (64,), "scale": ()}
ROWS = (64, 33)
"""Of `moment`, which is cut by rank."""


def state_of(
    steps: int, rank: int, world: int, *, grown: bool = False, own: bool = True, crossing: bool = False
) -> tuple[dict[str, Array], dict[str, Part]]:
    """What a rank has after `steps` steps, and which parts of wholes that is."""
    shapes = {**REPLICATED, **({"more": (50, 3)} if grown else {})}
    arrays = {name: np.array(np.arange(np.prod(shape)).reshape(shape) / 7) for name, shape in shapes.items()}
    parts = {name: Part(shape, whole(shape)) for name, shape in shapes.items()}
    rows = (ROWS[0] * rank // world, ROWS[0] * (rank + 1) // world)
    arrays["moment"] = np.arange(np.prod(ROWS), dtype=np.float32).reshape(ROWS)[slice(*rows)].copy()
    parts["moment"] = Part(ROWS, (rows, (0, ROWS[1])))
    arrays["stat"] = np.ones(9)
    parts["stat"] = Part((9,), ((0, 9),))
    if own:
        arrays["count"] = np.full((), rank)
    if crossing:  # half of one rank's rows are half of the next one's
        arrays["crossed"] = np.zeros((4, 3))
        parts["crossed"] = Part((2 * world + 2, 3), ((2 * rank, 2 * rank + 4), (0, 3)))
    for step in range(steps):
        change(arrays, step)
    return arrays, parts


def change(arrays: dict[str, Array], step: int) -> None:
    """One update, in place."""
    for name, array in arrays.items():
        array += 1 if name == "count" else 0.25 * (step + 1)


def grow(ckpt: ArrayCheckpointer, name: str, array: Array, part: Part) -> None:
    """Another array from now on, as a new parameter of an optimizer would be."""
    at = ckpt._stable
    ckpt._sources.insert(at, _source(name, array, False, part))
    ckpt._in_order.insert(at, array)
    ckpt._pointers.insert(at, _pointer(array))
    ckpt._stable += 1


def bytes_of(ckpt: ArrayCheckpointer, arrays: dict[str, Array]) -> dict[str, int | None]:
    """Of the tensors in a slot, and of all that the rank holds."""
    writer = ckpt.session._layout.writer
    return {
        "saved_bytes": None if writer is None else writer.nbytes,
        "held_bytes": sum(array.nbytes for array in arrays.values()),
    }


def say(**fields: Any) -> None:
    """One line of output."""
    print(json.dumps(fields), flush=True)


def main() -> int:
    """Options as JSON: steps to run; steps at which to grow_at and save_at, lists of those at which to wait_at and
    room_at (the small state of the ranks room_of grows); grown, own, crossing: kinds of state; kill at the end; and
    those of `resume`.
    """
    options: dict[str, Any] = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = {name: options[name] for name in ("grown", "own", "crossing") if name in options}
    arrays, parts = state_of(0, rank, world, **kind)
    extra: dict[str, object] = {"lr": 0.5, "seed": rank}
    ckpt = attach_arrays("divided", arrays, parts=parts, volatile=("stat",), extra=extra, audit=1)
    try:
        first = ckpt.resume(**options.get("resume", {}))
    except BaftError as error:
        say(error=type(error).__name__, text=str(error))
        ckpt.close()
        return error.exit_code
    expected, _ = state_of(first, rank, world, **kind)
    say(
        step=first,
        wrong=[name for name, array in arrays.items() if not np.array_equal(array, expected[name])],
        extra={name: value for name, value in ckpt.extra_restored.items() if name != "grown"},
        not_carried=list(ckpt.not_carried),
    )
    settled = True
    for step in range(first, first + options["steps"]):
        with ckpt.update():
            change(arrays, step)
        # Steps that die while plans change are not waited for.
        settled = ckpt.session.settle(5 if step + 2 >= first + options["steps"] else 0.3)
        if options.get("grow_at") == step + 1:
            state, named = state_of(step + 1, rank, world, grown=True)
            arrays["more"] = state["more"]
            grow(ckpt, "more", arrays["more"], named["more"])
        if step + 1 in options.get("room_at", ()) and rank in options.get("room_of", [rank]):
            # More than the room for small state: slots are laid out anew.
            extra["grown"] = b"x" * (3 * len(cast(bytes, extra.get("grown", b""))) or 3 << 20)
        ckpt.step()
        if step + 1 in options.get("wait_at", ()):
            ckpt.fence()
            ckpt.session.settle(options.get("patience", 10))
            say(waits=step + 1, **bytes_of(ckpt, arrays))
            sys.stdin.readline()
        if options.get("save_at") == step + 1:
            say(saved=ckpt.save(timeout=20).tier)
    ckpt.fence()
    settled = ckpt.session.settle(10)
    say(
        committed=ckpt.counters.committed_memory if settled else None,
        counters=ckpt.counters.__dict__,
        **bytes_of(ckpt, arrays),
    )
    if options.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
