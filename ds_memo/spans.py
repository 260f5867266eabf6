"""Spans: which tokens of a call make a tile. No torch."""

from __future__ import annotations

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

    @property
    def size(self) -> tuple[int, int]:
        """Sequences and positions."""
        return self.rows.stop - self.rows.start, self.tokens.stop - self.tokens.start


def spans(batch: int, length: int, tile_tokens: int) -> list[Span]:
    """Divide (batch, length) tokens into tiles of at most `tile_tokens`, all but the last of a sequence equally long.

    A tile is a part of one sequence, or several whole sequences, so that its memory has no gaps.
    """
    if tile_tokens >= length:
        rows = math.ceil(batch / math.ceil(batch / (tile_tokens // length)))
        return [Span(slice(i, min(i + rows, batch)), slice(0, length)) for i in range(0, batch, rows)]
    even = math.ceil(length / math.ceil(length / tile_tokens))
    step = min(round_up(even, EVEN), tile_tokens) if even > EVEN else even
    starts = range(0, length, step)
    return [Span(slice(i, i + 1), slice(j, min(j + step, length))) for i in range(batch) for j in starts]
