"""Device memory of lazy logits and their loss, by rule. No torch."""

from __future__ import annotations

from typing import NamedTuple

from ds_memo.units import GIB

BYTES_PER_LOGIT = 20
"""At the peak of a tile: the head's bfloat16, its cast to float32, log-probabilities, and the gradients of the three."""
TILE_BYTES = 1 * GIB
DEVICE_SHARE = 1 / 64
"""The most of a device that a tile takes, where GEMMs are full with that."""
LEAST_ROWS, MOST_ROWS = 256, 4096
"""A GEMM is full from about 256 rows on."""
_BYTES_PER_ROW = 64
"""Maps of rows, labels, losses."""


class HeadBytes(NamedTuple):
    """``fixed + tokens * per_token`` bytes."""

    rows: int
    """Tokens up to which logits are whole."""
    fixed: int
    per_token: int


def tile_rows(vocabulary: int, device_bytes: float) -> int:
    """Return the rows of a tile: as many as a share of the device holds."""
    rows = int(min(TILE_BYTES, device_bytes * DEVICE_SHARE)) // (BYTES_PER_LOGIT * vocabulary) // 128 * 128
    return min(max(rows, LEAST_ROWS), MOST_ROWS)


def head_bytes(rows: int, vocabulary: int, hidden: int, parameters: int, itemsize: int) -> HeadBytes:
    """Return what head and loss take.

    Args:
        rows: of a tile.
        parameters: their number in the head.
        itemsize: bytes of a parameter, and of a hidden state's element.
    """
    sums = parameters * (4 + 2 * itemsize)  # in float32, rounded, and under ZeRO-3 the gathered weight
    return HeadBytes(rows, rows * vocabulary * BYTES_PER_LOGIT + sums, 2 * hidden * itemsize + _BYTES_PER_ROW)
