"""A job of numpy arrays that are cut anew by the number of ranks, run as a script: one process is one rank.

Every element changes by itself, so the state after k steps is known here whatever the layout. The script writes one
JSON line: where it resumed, whether its parts were what they must be, and what it ended with.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from baft_client.arrays import Part, attach_arrays
from baftd.errors import BaftError

Array = npt.NDArray[Any]

WHOLES = {"rows": (37, 8), "columns": (6, 25), "flat": (11, 7), "moment": (11, 7), "shared": (5,)}


def whole_state(steps: int) -> dict[str, Array]:
    """All wholes after `steps` steps."""
    state = {name: np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 7 for name, shape in WHOLES.items()}
    for step in range(steps):
        change(state, step)
    return state


def change(state: dict[str, Array], step: int) -> None:
    """One update, in place."""
    for array in state.values():
        array *= 0.999
        array += (step + 1) * 0.01


def cut(length: int, rank: int, world: int) -> tuple[int, int]:
    """Uneven: later ranks have more; of a small length the first ones have nothing."""
    bounds = [length * i * i // (world * world) for i in range(world + 1)]
    return bounds[rank], bounds[rank + 1]


def parts_of(rank: int, world: int, *, swapped: bool = False) -> dict[str, Part]:
    """What a rank holds. swapped: rows and columns the other way round."""
    (h, w), (r, c) = WHOLES["rows"], WHOLES["columns"]
    flat = cut(77, rank, world)
    parts = {
        "rows": Part((h, w), (cut(h, rank, world), (0, w))),
        "columns": Part((r, c), ((0, r), cut(c, rank, world))),
        "flat": Part(WHOLES["flat"], (flat,)),
        "shared": Part((5,), ((0, 5),)),
        # Two arrays of one whole: the first three rows, and this rank's part of the others.
        "moment.head": Part((11, 7), ((0, 3), (0, 7)), name="moment"),
        "moment.tail": Part((11, 7), ((3, 11), cut(7, rank, world)), name="moment"),
    }
    if swapped:
        parts["rows"] = Part((h, w), ((0, h), cut(w, rank, world)))
        parts["columns"] = Part((r, c), (cut(r, rank, world), (0, c)))
    return parts


def arrays_of(parts: dict[str, Part], state: dict[str, Array]) -> dict[str, Array]:
    """Copies of these parts of the wholes."""
    found = {}
    for name, part in parts.items():
        whole = state[part.name or name]
        if len(part.ranges) != whole.ndim:
            whole = whole.reshape(-1)
        found[name] = np.array(whole[tuple(slice(start, stop) for start, stop in part.ranges)])
    return found


def main() -> int:
    """Options as JSON: steps to run, job, swapped, and those of `resume`."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parts = parts_of(rank, world, swapped=options.get("swapped", False))
    arrays = arrays_of(parts, whole_state(0))
    count = np.zeros((), dtype=np.int64)  # undeclared, and the same on every rank
    extra: dict[str, object] = {"lr": 0.5, "seed": rank}
    ckpt = attach_arrays("arrays", {**arrays, "count": count}, parts=parts, volatile=("count",), extra=extra)
    try:
        first = ckpt.resume(**options.get("resume", {}))
    except BaftError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
        ckpt.close()
        return error.exit_code
    expected = arrays_of(parts, whole_state(first))
    wrong = [name for name, array in arrays.items() if not np.array_equal(array, expected[name])]
    if count != first:
        wrong.append("count")
    for step in range(first, first + options["steps"]):
        with ckpt.update():
            change(arrays, step)
            count += 1
        ckpt.session.settle(20)  # a slot for the step to come
        ckpt.step()
    ckpt.fence()
    settled = ckpt.session.settle(20)
    said = {
        "step": first,
        "wrong": wrong,
        "extra": ckpt.extra_restored,
        "not_carried": list(ckpt.not_carried),
        "committed": ckpt.counters.committed_memory if settled else None,
    }
    print(json.dumps(said), flush=True)
    ckpt.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
