"""What `baftd plan` says of ranks and stages: numbers by stage, and who saves what, added up where they are alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import TYPE_CHECKING

from baftd.cli.render import size

if TYPE_CHECKING:
    from baftd.checkpoint.layout import Layout
    from baftd.checkpoint.savers import Assignment

__all__ = [
    "SaverRow",
    "Spread",
    "StageRow",
    "merged_stage_rows",
    "numbers",
    "saver_rows",
    "share_rows",
    "stage_rows",
    "stages_of",
]


@dataclass(frozen=True)
class Spread:
    """The least, the middle and the most of some ranks, in bytes."""

    least: int
    median: int
    most: int

    @staticmethod
    def of(values: Sequence[int]) -> Spread:
        """Of at least one value."""
        return Spread(min(values), int(statistics.median_low(values)), max(values))

    def __str__(self) -> str:
        ends = list(dict.fromkeys((size(self.least), size(self.median), size(self.most))))
        return " / ".join(ends if len(ends) != 2 else (size(self.least), size(self.median), size(self.most)))


@dataclass(frozen=True)
class StageRow:
    """The ranks of one stage (of several, where ranks hold several). divided: after deduplication; saved: by the mode
    that was chosen."""

    stages: tuple[int, ...]
    ranks: int
    held: Spread
    divided: Spread
    saved: Spread


@dataclass(frozen=True)
class SaverRow:
    """All ranges that lie on equally many ranks, which differ in these axes. copy: bytes, each once. each: what one of
    `ranks` ranks saves of them."""

    stages: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    holders: int
    ranks: int
    copy: int
    each: Spread


def stages_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Stages of a rank; empty where nothing is known."""
    place = layout.place(rank)
    return () if place is None else place.stages


def stage_rows(layout: Layout, divided: Assignment, chosen: Assignment) -> list[StageRow]:
    """One row for each set of stages that ranks hold."""
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        # Of a bidirectional pipeline one rank has stages 0 and 3, another 3 and 0.
        ranks_of.setdefault(tuple(sorted(stages_of(layout, rank))), []).append(rank)
    return [
        StageRow(
            stages,
            len(ranks),
            Spread.of([layout.bytes_of(rank) for rank in ranks]),
            Spread.of([divided.bytes_of(rank) for rank in ranks]),
            Spread.of([chosen.bytes_of(rank) for rank in ranks]),
        )
        for stages, ranks in sorted(ranks_of.items())
    ]


def merged_stage_rows(rows: Sequence[StageRow]) -> list[tuple[str, int, str, str]]:
    """(stages, ranks, held, divided) as text: neighbours that read alike are one row."""

    def read(row: StageRow) -> tuple[object, ...]:
        return len(row.stages), row.ranks, str(row.held), str(row.divided)

    merged = []
    for _, group in groupby(rows, read):
        alike = list(group)
        first = alike[0]
        ranks = sum(row.ranks for row in alike)
        stages = numbers_of([row.stages for row in alike])
        merged.append((stages, ranks, str(first.held), str(first.divided)))
    return merged


def saver_rows(layout: Layout, assignment: Assignment) -> list[SaverRow]:
    """Who saves what. Stages whose rows read alike are one row."""
    places = [layout.place(rank) for rank in range(layout.world)]
    at = [place.coordinates if place is not None else {} for place in places]
    found: dict[tuple[tuple[tuple[int, ...], ...], tuple[str, ...], int], tuple[int, dict[int, int]]] = {}
    for one in assignment.classes:
        stages = tuple(sorted({tuple(sorted(stages_of(layout, rank))) for rank in one.holders}))
        key = stages, _axes(one.holders, at), len(one.holders)
        copy, taken = found.setdefault(key, (0, {}))
        for rank, nbytes in one.taken.items():
            taken[rank] = taken.get(rank, 0) + nbytes
        found[key] = copy + one.nbytes, taken
    rows = [
        SaverRow(stages, axes, holders, len(taken), copy, Spread.of(list(taken.values()) or [0]))
        for (stages, axes, holders), (copy, taken) in found.items()
    ]
    rows.sort(key=lambda row: (row.stages, row.holders, row.axes))
    return rows


def merged_saver_rows(rows: Iterable[SaverRow]) -> list[tuple[str, str, int, str, str]]:
    """(stages, held by, ranks, one copy, each saves) as text; rows of several stages that read alike are one."""
    found: dict[tuple[int, tuple[str, ...], int, int, str, str], list[SaverRow]] = {}
    for row in rows:
        key = len(row.stages), row.axes, row.holders, row.ranks, size(row.copy), str(row.each)
        found.setdefault(key, []).append(row)
    merged = []
    ordered = sorted(found.items(), key=lambda item: (item[0][2], item[0][1], item[1][0].stages))
    for (count, axes, holders, ranks, _, each), alike in ordered:
        if count == 1:
            stages = numbers_of([row.stages[0] for row in alike])
        else:
            stages = "; ".join(" and ".join("+".join(map(str, one)) or "-" for one in row.stages) for row in alike)
        along = f" along {' x '.join(axes)}" if axes else ""
        held = "one rank" if holders == 1 else f"{holders} ranks{along}"
        merged.append((stages, held, ranks * len(alike), size(sum(row.copy for row in alike)), each))
    return merged


def share_rows(layout: Layout, assignment: Assignment, rank: int) -> list[tuple[str, str, int]]:
    """(tensor, range, bytes) of what a rank saves."""
    from baftd.checkpoint.ranges import said, volume

    rows = []
    for share in assignment.of(rank):
        tensor = layout.tensors[share.tensor]
        rows.append((tensor.name, said(share.box), volume(share.box) * tensor.itemsize))
    return rows


def _axes(holders: Sequence[int], at: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """The fewest axes that tell the holders apart and make a full grid of them; none where there are no such axes."""
    if len(holders) == 1 or not at[holders[0]]:
        return ()
    # Expert layers see the same ranks along other axes: they come into play only where the usual ones do not do.
    known = sorted(at[holders[0]], key=lambda axis: (axis in ("ep", "etp", "edp"), axis))
    varying = [axis for axis in known if len({at[rank].get(axis) for rank in holders}) > 1]
    for many in range(1, len(varying) + 1):
        for axes in combinations(varying, many):
            sizes = 1
            for axis in axes:
                sizes *= len({at[rank].get(axis) for rank in holders})
            if sizes == len(holders) == len({tuple(at[rank].get(axis) for axis in axes) for rank in holders}):
                return axes
    return ()


def numbers_of(sets: Sequence[tuple[int, ...]]) -> str:
    """Sets of stages, one a rank: "1-14"; sets of several as "0+4, 1+5"."""
    if all(len(one) == 1 for one in sets):
        return numbers([one[0] for one in sets])
    return ", ".join("+".join(map(str, one)) for one in sets) if any(sets) else "-"


def numbers(listed: Sequence[int]) -> str:
    """Numbers with runs: "0, 2-5"."""
    runs: list[list[int]] = []
    for number in sorted(listed):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"
