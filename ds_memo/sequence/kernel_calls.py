"""From the bands of a plan to calls of kernels: which parts of the tensors each call is given, and what it is told of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ds_memo.sequence import masks
from ds_memo.sequence.masks import Band

Interval = tuple[int, int]
Limits = tuple[int | None, int | None]
Borders = tuple[tuple[int, ...], tuple[int, ...]]


class KernelCall(NamedTuple):
    """One call of a kernel, and the part of the tensors that it is given. Each of its queries sees a key."""

    row: int | None
    """None: all rows of the batch."""
    queries: Interval
    keys: Interval
    limits: Limits
    """`before` and `after` of a band; for :class:`Flash` its windows."""
    borders: Borders | None = None
    """Borders along queries and keys of bands side by side, where rows of the batch lie end to end. None: it is one band."""


def joined(bands: Iterable[Band], bottom_right: bool = False) -> list[Band]:
    """Return fewer bands: one for neighbours that see all keys, as around a ring in zigzag.

    Args:
        bottom_right: join keys that all queries see to a triangle behind them, too.
    """
    found: list[Band] = []
    for band in bands:
        last = found[-1] if found else None
        if last and (last.row, last.before, last.after, band.before) == (band.row, None, None, None):
            both = (last.queries[0], band.queries[1]), (last.keys[0], band.keys[1])
            if (last.queries, last.keys[1]) == (band.queries, band.keys[0]) and (band.after is None or bottom_right):
                found[-1] = Band(band.row, *both, None, None if band.after is None else band.after + band.keys[0] - last.keys[0])
                continue
            if (last.keys, last.queries[1], band.after) == (band.keys, band.queries[0], None):
                found[-1] = Band(band.row, *both, None, None)
                continue
        found.append(band)
    return found


def cut(band: Band, block: int, first: int | None = None, keys: int | None = None) -> Iterator[Band]:
    """Yield a band's blocks of queries, each with the keys that it can see. The first may be of another size.

    Args:
        keys: of a block at most; None: all.
    """
    q0, q1 = band.queries
    moved = q0 - band.keys[0]
    before = None if band.before is None else band.before + moved
    after = None if band.after is None else band.after - moved
    borders = sorted({0, q0, q1, *range(q0 + (first or block), q1, block)})
    run = masks.MaskRun(band.queries, band.keys, before, after)
    of_keys = [0, band.keys[1]] if keys is None else sorted({0, band.keys[1], *range(band.keys[0], band.keys[1], keys)})
    return masks.bands(band.row, [run], tuple(itertools.pairwise(borders)), tuple(itertools.pairwise(of_keys)))


def side_by_side(bands: Iterable[Band], s: int, t: int) -> list[KernelCall]:
    """Return calls of flash attention. One takes bands that follow each other, in queries and keys, and can have equal windows.

    Its query i of n sees key j of m if i + m - n - left <= j <= i + m - n + right.
    """
    groups: list[tuple[list[int], list[int], list[tuple[float, float]]]] = []
    for band in bands:
        (q0, q1), (k0, k1) = ([(band.row or 0) * size + x for x in span] for size, span in ((s, band.queries), (t, band.keys)))
        n, m = q1 - q0, k1 - k0
        # windows that will do: one, or all from the least that limits nothing
        left = (m - 1, math.inf) if band.before is None else (band.before + m - n,) * 2
        right = (n - 1, math.inf) if band.after is None else (band.after - m + n,) * 2
        if groups:
            queries, keys, windows = groups[-1]
            both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(windows, (left, right), strict=True)]
            if (queries[-1], keys[-1]) == (q0, k0) and all(low <= high for low, high in both):
                queries.append(q1)
                keys.append(k1)
                windows[:] = both
                continue
        groups.append(([q0, q1], [k0, k1], [left, right]))
    calls = []
    for queries, keys, windows in groups:
        before, after = (None if high == math.inf else int(low) for low, high in windows)
        borders = tuple(x - queries[0] for x in queries), tuple(x - keys[0] for x in keys)
        calls.append(KernelCall(None, (queries[0], queries[-1]), (keys[0], keys[-1]), (before, after), borders))
    return calls


def within_windows(band: Band) -> Iterator[Band]:
    """Cut off the queries that see all keys if there are many: flash attention takes a right window of all keys for none."""
    n, m = (stop - start for start, stop in (band.queries, band.keys))
    many = band.after is not None and band.after - m + n >= m
    return cut(band, n, max(0, m - band.after) if many else None)
