"""Hypothesis strategies for tensor entries of every kind."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from hypothesis import strategies as st

from baftd.checkpoint.shard import LARGE, NATIVE_DTYPES, Kind, TensorEntry

FOREIGN = {"C32": 4, "C64": 8, "C128": 16, "QINT8": 1, "QINT32": 4, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F4_X2": 1, "X3": 3}

_letters = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
names = _letters.filter(lambda name: not name.startswith(("baft.", ".pad.", "__metadata__")))
dtypes = st.sampled_from(sorted(NATIVE_DTYPES) + sorted(FOREIGN))


@st.composite
def _one(draw: st.DrawFn, name: str) -> list[TensorEntry]:
    dtype = draw(dtypes)
    size = NATIVE_DTYPES.get(dtype) or FOREIGN[dtype]
    kind: Kind = "stable" if draw(st.booleans()) else "volatile"
    form = draw(st.sampled_from(["plain", "plain", "large", "strided", "sharded", "flat", "parts"]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    if form == "large":
        shape = (draw(st.integers(LARGE // size, LARGE // size + 40)),)
    if form == "strided" and shape:
        order = draw(st.permutations(range(len(shape))))
        strides = [0] * len(shape)
        step = 1
        for dimension in order:
            strides[dimension] = step
            step *= max(shape[dimension], 1)
        return [TensorEntry(name, dtype, shape, size * prod(shape), kind, strides=tuple(strides))]
    if form == "sharded":
        starts = [draw(st.integers(0, 3)) for _ in shape]
        whole = tuple(start + length + draw(st.integers(0, 3)) for start, length in zip(starts, shape, strict=True))
        ranges = tuple((start, start + length) for start, length in zip(starts, shape, strict=True))
        return [TensorEntry(name, dtype, shape, size * prod(shape), kind, whole, ranges)]
    if form in ("flat", "parts"):
        whole = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        cuts = sorted(draw(st.sets(st.integers(0, prod(whole)), min_size=2, max_size=2 if form == "flat" else 5)))
        return [
            TensorEntry(name, dtype, (stop - start,), size * (stop - start), kind, whole, ((start, stop),))
            for start, stop in pairwise(cuts)
        ]
    return [TensorEntry(name, dtype, shape, size * prod(shape), kind)]


@st.composite
def entry_lists(draw: st.DrawFn) -> list[TensorEntry]:
    """Entries that can be declared together: every dtype, foreign ones, 0-dim, empty, large, strided, sharded, several
    ranges of one tensor, aliases."""
    all_names = draw(st.lists(names, unique=True, max_size=8))
    split = draw(st.integers(0, len(all_names)))
    owners, spare = all_names[:split], all_names[split:]
    entries = [one for name in owners for one in draw(_one(name))]
    taken = {f"{e.name}@{','.join(f'{a}:{b}' for a, b in e.ranges or ())}" for e in entries}
    entries = [one for one in entries if one.name not in taken]
    for at, alias in enumerate(name for name in spare if name not in taken):
        if at < len(entries) and draw(st.booleans()):
            e = entries[at]
            entries[at] = TensorEntry(
                e.name, e.dtype, e.shape, e.nbytes, e.kind, e.global_shape, e.ranges, (*e.aliases, alias), e.strides
            )
    return entries
