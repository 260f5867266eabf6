"""Parts in the order in which tiles mix tokens: tile i of all ranks, one after another, is one stretch of the sequence.

    two ranks, tiles of 2     parts     rank 0: 0 1 2 3    rank 1: 4 5 6 7
                              striped   rank 0: 0 1 4 5    rank 1: 2 3 6 7     tile 0 of both: 0 1 2 3, tile 1: 4 5 6 7

So a scan goes on from stretch to stretch, and each rank carries the states of its own heads. Attention sees the same tokens
whatever their order: around a ring it gets a piece of each stretch, and by heads alone the whole sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ds_memo.sequence.exchange import move
from ds_memo.sequence.parts import Pieces, SequenceParts
from ds_memo.spans import Span


class Striped(SequenceParts):
    """Parts of which each tile is next to the other ranks' tiles of its number.

    Args:
        parts: as the sequences lie outside of such a layer.
        tile: tokens of a rank's tile; the last has what is left.
        rows: sequences, if fewer than `parts` has.
    """

    def __init__(self, parts: SequenceParts, tile: int, rows: int | None = None) -> None:
        super().__init__(parts.ranks, parts.length, parts.documents[:rows], zigzag=False)
        self.unpadded = parts.unpadded
        self._outside = parts.all_pieces
        self._tile = tile
        self._stretches: dict[tuple[int, ...], SequenceParts] = {}
        self._arguments: Any = WeakTensorKeyDictionary()

    def pieces_of(self, number: int) -> Pieces:
        return self._pieces(number, 1)

    def pieces_of_ring(self, number: int) -> Pieces:
        return ((0, self.length),) if self.ranks.ring == 1 else self._pieces(number, self.ranks.ulysses)

    def _pieces(self, number: int, ranks: int) -> Pieces:
        """Return the pieces of so many neighbouring ranks."""
        tiles = itertools.pairwise([*range(0, self.own, self._tile), self.own])
        pieces = ((self.ranks.size * start + number * ranks * (stop - start), ranks * (stop - start)) for start, stop in tiles)
        return tuple((first, first + tokens) for first, tokens in pieces)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens (b, n, …) of those that all ranks have as their parts."""
        return move(x, self._outside, self.all_pieces, self.ranks.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`enter`."""
        return move(x, self.all_pieces, self._outside, self.ranks.group)

    def argument(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Do what :meth:`enter` does with tokens along any dimension, once for all layers that get the same tensor.

        For a trained leaf each time: it may come again in the next forward, when the graph from here to it is gone.
        """
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        state = mode, None if x.is_inference() else x._version
        was, found = self._arguments.get(x, (None, x))
        if was != state:
            first = (x.byte() if x.dtype == torch.bool else x).movedim(dim, 0)[None]  # gloo sends no bool
            found = self.enter(first)[0].movedim(0, dim).to(x.dtype)
            if not (x.is_leaf and x.requires_grad):
                self._arguments[x] = state, found
        return found

    def is_packed(self, span: Span) -> bool:
        """Return True if what mixers do on a stretch depends on documents: one begins in it, or they began apart in its rows."""
        documents = self.stretch(span).documents
        within = any(len(row) > 1 or (row[0] == 0 and span.tokens.start > 0) for row in documents)
        return within or len(set(documents)) > 1

    def stretch(self, span: Span, packed: bool = True) -> SequenceParts:
        """Return the parts of a stretch, whose tokens count from its begin. A document that began before it begins below 0.

        Args:
            packed: False: as if its tokens were of one document.
        """
        start, stop = span.tokens.start * self.ranks.size, span.tokens.stop * self.ranks.size
        key = start, stop, span.rows.start, span.rows.stop, packed
        if key not in self._stretches:
            rows = self.documents[span.rows] if len(self.documents) > 1 else self.documents
            documents = [_within(row, start, stop) for row in rows] if packed else [(-start,)]
            self._stretches[key] = SequenceParts(self.ranks, stop - start, documents, zigzag=False)
        return self._stretches[key]


def striped(parts: SequenceParts, tile: int) -> Striped:
    """Return the same sequences in tiles; the same object for each layer of a forward."""
    if tile not in parts.striped:
        parts.striped[tile] = Striped(parts, tile)
    return parts.striped[tile]


def _within(documents: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return where documents begin, counted from `start`: the one that `start` is in, and those that begin up to `stop`."""
    first = max(border for border in documents if border <= start)
    return tuple(border - start for border in (first, *(border for border in documents if start < border < stop)))
