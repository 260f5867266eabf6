"""Parts in the order in which tiles mix tokens: tile i of all ranks, one after another, is one stretch of the sequence.

    two ranks, tiles of 2     parts     rank 0: 0 1 2 3    rank 1: 4 5 6 7
                              striped   rank 0: 0 1 4 5    rank 1: 2 3 6 7     tile 0 of both: 0 1 2 3, tile 1: 4 5 6 7

So a scan goes on from stretch to stretch, and each rank carries the states of its own heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ds_memo.sequence.parts import Parts, Pieces
from ds_memo.spans import Span


class Striped(Parts):
    """Parts of which each tile is next to the other ranks' tiles of its number.

    Args:
        parts: as the sequences lie outside of such a layer.
        tile: tokens of a rank's tile; the last has what is left.
        rows: sequences, if fewer than `parts` has.
    """

    def __init__(self, parts: Parts, tile: int, rows: int | None = None) -> None:
        super().__init__(parts.ranks, parts.length, parts.documents[:rows], zigzag=False)
        self._tile = tile
        self._stretches: dict[tuple[int, ...], Parts] = {}

    def pieces_of(self, number: int) -> Pieces:
        size, cuts = self.ranks.size, [*range(0, self.own, self._tile), self.own]
        firsts = ((size * start + number * (stop - start), stop - start) for start, stop in itertools.pairwise(cuts))
        return tuple((first, first + tokens) for first, tokens in firsts)

    def stretch(self, span: Span, packed: bool = True) -> Parts:
        """Return the parts of a stretch, whose tokens count from its begin. A document that began before it begins below 0.

        Args:
            packed: False: as if its tokens were of one document.
        """
        start, stop = span.tokens.start * self.ranks.size, span.tokens.stop * self.ranks.size
        key = start, stop, span.rows.start, span.rows.stop, packed
        if key not in self._stretches:
            rows = self.documents[span.rows] if len(self.documents) > 1 else self.documents
            documents = [_within(row, start, stop) for row in rows] if packed else [(-start,)]
            self._stretches[key] = Parts(self.ranks, stop - start, documents, zigzag=False)
        return self._stretches[key]


def striped(parts: Parts, tile: int) -> Striped:
    """Return the same sequences in tiles; the same object for each layer of a forward."""
    if tile not in parts.striped:
        parts.striped[tile] = Striped(parts, tile)
    return parts.striped[tile]


def _within(documents: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return where documents begin, counted from `start`: the one that `start` is in, and those that begin up to `stop`."""
    first = max(border for border in documents if border <= start)
    return tuple(border - start for border in (first, *(border for border in documents if start < border < stop)))
