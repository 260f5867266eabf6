"""Spans: which tokens of a call make a tile. No torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ds_memo.units import round_up

EVEN = 128
"""Tokens. Longer tiles are multiples of it, so that a batch has tiles of two lengths at most and GEMMs are aligned."""


@dataclass(frozen=True)
class Span:
    """Tokens of one tile: sequences `rows` of the batch, and of these the positions `tokens`."""

    rows: slice
    tokens: slice

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Sequences and positions."""
        return self.rows.stop - self.rows.start, self.tokens.stop - self.tokens.start


def spans(batch: int, length: int, tile_tokens: int) -> list[Span]:
    """Divide (batch, length) tokens into tiles of at most `tile_tokens`, all but the last of a sequence equally long.

    A tile is a part of one sequence, or several whole sequences, so that its memory has no gaps.
    """
    rows, step = longest(batch, length, tile_tokens)
    return [
        Span(slice(i, min(i + rows, batch)), slice(j, min(j + step, length)))
        for i in range(0, batch, rows)
        for j in range(0, length, step)
    ]


def number_of_spans(batch: int, length: int, tile_tokens: int) -> int:
    """Return ``len(spans(…))`` without making them: an estimate asks for hundreds of thousands."""
    rows, step = longest(batch, length, tile_tokens)
    return math.ceil(batch / rows) * math.ceil(length / step)


def longest(batch: int, length: int, tile_tokens: int) -> tuple[int, int]:
    """Return sequences and positions of the first span: no other is longer."""
    if tile_tokens >= length:
        return math.ceil(batch / math.ceil(batch / (tile_tokens // length))), length
    even = math.ceil(length / math.ceil(length / tile_tokens))
    return 1, min(round_up(even, EVEN), tile_tokens) if even > EVEN else even
