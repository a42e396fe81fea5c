"""The part of its tensors that a rank saves, where replicated ranges are divided among the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baft_client.source import Source
from baftd.checkpoint.cutting import cut_entry
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import ProtocolError
from baftd.wire.messages import Share

__all__ = ["Cutting", "Recheck"]

Recheck: TypeAlias = "Callable[[], Iterable[tuple[int, ...]]]"
"""Reads the identities of all stable sources again, in order."""


@dataclass
class _Piece:
    """place: of the source in what the rank holds. source: what is saved of it; None: all of it."""

    place: int
    source: Source | None = None
    offset: int = 0


class Cutting:
    """Makes of all sources of a rank those that it saves. Only addresses and witnesses are taken anew at a boundary."""

    def __init__(self, held: Sequence[TensorEntry], shares: Sequence[Share]) -> None:
        """`held`: what was declared, `shares`: the daemon's answer. Raises ProtocolError for one that does not fit."""
        self._held = list(held)
        self._pieces: list[_Piece] = []
        for share in shares:
            if share.entry >= len(held):
                what = f"the daemon has this rank save tensor {share.entry} of {len(held)}."
                raise ProtocolError(what, field="shares")
            piece = _Piece(share.entry)
            if share.ranges is not None:
                entry, piece.offset = cut_entry(held[share.entry], tuple(share.ranges))
                piece.source = Source(entry, 0, None)
            self._pieces.append(piece)
        stable = [place for place, entry in enumerate(held) if entry.kind == "stable"]
        number = {place: i for i, place in enumerate(stable)}
        self._count = len(stable)
        self._stable = [number[piece.place] for piece in self._pieces if piece.place in number]

    def same_tree(self, sources: Sequence[Source]) -> bool:
        """Whether these are the tensors that were declared."""
        return [source.entry for source in sources] == self._held

    def of(self, sources: Sequence[Source]) -> list[Source]:
        """What the rank saves of its sources, where they lie now."""
        found: list[Source] = []
        for piece in self._pieces:
            whole, part = sources[piece.place], piece.source
            if part is not None:
                part.address, part.keep, part.itemsize = whole.address + piece.offset, whole.keep, whole.itemsize
                part.identity, part.witness = whole.identity, whole.witness
            found.append(whole if part is None else part)
        return found

    def recheck(self, recheck: Recheck | None) -> Recheck | None:
        """Of what reads the identities of all stable sources: what reads those that are saved."""
        if recheck is None:
            return None

        def of_saved() -> list[tuple[int, ...]]:
            now = list(recheck())
            return [now[number] for number in self._stable] if len(now) == self._count else []

        return of_saved
