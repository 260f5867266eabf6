"""Greedy placement: a portfolio of orders, stopped by the first whose peak equals the lower bound.

Buffers are placed in a given order, each at the lowest (or the tightest) gap among those already placed that live at
the same time. On real layers one of the first orders reaches the lower bound, within milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from ds_memo.plan.dsa import MAX_TOTAL, Buffer, Offset, lower_bound, peak, sections

NO_CEILING = 2 * MAX_TOTAL - 1  # the largest address in 64 bits


def portfolio(
    buffers: Sequence[Buffer],
    deadline: float = float("inf"),
    last_deadline: float = float("inf"),
    target: int | None = None,
) -> tuple[list[Offset], str]:
    """The best placement the portfolio finds, and the name of the order that found it.

    Args:
        deadline: `time.monotonic()` after which no order is begun and an unfinished one is dropped.
        last_deadline: Where none finished, `in_time` is tried until then; and where that does not finish either, the
            buffers are stacked without any reuse, under the name "stacked".
        target: Stop at this peak; the lower bound where not given.
    """
    if not buffers:
        return [], "empty"
    target = lower_bound(buffers) if target is None else target
    ends = list(accumulate(b.size for b in buffers))
    best, name, height = [0, *ends[:-1]], "stacked", ends[-1]
    for other, offsets in _orders(buffers, deadline):
        if offsets is not None and (top := peak(buffers, offsets)) < height:
            best, name, height = offsets, other, top
        if height <= target or time.monotonic() > deadline:
            break
    if name == "stacked" and height > target:
        offsets = in_time(buffers, last_deadline)
        if offsets is not None:
            return offsets, "in time"
    return best, name


def _orders(buffers: Sequence[Buffer], deadline: float) -> Iterator[tuple[str, list[Offset] | None]]:
    first, last, _ = sections(buffers)
    crowd = _contention(buffers, first, last)
    orders: dict[str, Callable[[int], tuple]] = {
        "contention": lambda i: (-crowd[i], first[i] - last[i], -buffers[i].size),
        "size": lambda i: (-buffers[i].size, first[i] - last[i]),
        "width": lambda i: (first[i] - last[i], -buffers[i].size),
        "birth": lambda i: (buffers[i].lifespan.lower, -buffers[i].lifespan.upper),
        "area": lambda i: (-buffers[i].area,),
        "contention, size": lambda i: (-crowd[i], -buffers[i].size),
        "death": lambda i: (-buffers[i].lifespan.upper, buffers[i].lifespan.lower),
    }
    for best in (False, True):
        for name, key in orders.items():
            order = sorted(range(len(buffers)), key=key)
            yield name + (", best fit" if best else ""), first_fit(buffers, order, best, deadline)


def first_fit(
    buffers: Sequence[Buffer], order: Sequence[int], best: bool = False, deadline: float = float("inf")
) -> list[Offset] | None:
    """Buffers in `order`, each at the lowest gap (`best`: the tightest) among those placed; None past the deadline."""
    n = len(buffers)
    offsets = [0] * n
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)  # addresses of the placed ones, sorted by start
    lower, upper = np.empty(n, np.int64), np.empty(n, np.int64)
    for placed, i in enumerate(order):
        if placed % 64 == 63 and time.monotonic() > deadline:
            return None
        (born, dead), size = buffers[i].lifespan, buffers[i].size
        together = (lower[:placed] < dead) & (upper[:placed] > born)
        starts = start[:placed][together]
        floors = np.empty(len(starts) + 1, np.int64)
        floors[0] = 0
        np.maximum.accumulate(end[:placed][together], out=floors[1:])
        gaps = np.append(starts, NO_CEILING) - floors  # above the last one there is always room
        fitting = np.flatnonzero(gaps >= size)
        at = offsets[i] = int(floors[fitting[np.argmin(gaps[fitting])] if best else fitting[0]])
        k = int(np.searchsorted(start[:placed], at, "right"))
        for column, value in ((start, at), (end, at + size), (lower, born), (upper, dead)):
            column[k + 1 : placed + 1] = column[k:placed]
            column[k] = value
    return offsets


def in_time(buffers: Sequence[Buffer], deadline: float = float("inf")) -> list[Offset] | None:
    """Buffers in order of birth, each into the tightest gap between those alive; None past the deadline.

    Only buffers that are alive are looked at, so this is fast where thousands follow each other.
    """
    offsets = [0] * len(buffers)
    start, end, death = (np.empty(0, np.int64) for _ in range(3))  # of those alive, sorted by address
    order = sorted(range(len(buffers)), key=lambda i: (buffers[i].lifespan.lower, -buffers[i].lifespan.upper))
    for step, i in enumerate(order):
        if step % 64 == 63 and time.monotonic() > deadline:
            return None
        (born, dead), size = buffers[i].lifespan, buffers[i].size
        alive = death > born
        if not alive.all():
            start, end, death = start[alive], end[alive], death[alive]
        floors = np.concatenate(([0], end))
        gaps = np.append(start, NO_CEILING) - floors
        fitting = np.flatnonzero(gaps >= size)
        k = int(fitting[np.argmin(gaps[fitting])])
        at = offsets[i] = int(floors[k])
        start, end, death = np.insert(start, k, at), np.insert(end, k, at + size), np.insert(death, k, dead)
    return offsets


def _contention(buffers: Sequence[Buffer], first: list[int], last: list[int]) -> list[int]:
    """For each buffer the most units alive at once during its life."""
    alive = np.zeros(max(last) + 2, np.int64)
    for b, lo, hi in zip(buffers, first, last, strict=True):
        alive[lo] += b.size
        alive[hi + 1] -= b.size
    alive = np.cumsum(alive)
    return [int(alive[lo : hi + 1].max()) for lo, hi in zip(first, last, strict=True)]
