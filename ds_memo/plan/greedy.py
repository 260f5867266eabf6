"""Greedy placement: a portfolio of orders, stopped by the first whose peak equals the lower bound.

Buffers are placed in a given order, each at the lowest (or the tightest) gap among the placed buffers of the same time.
On real layers one of the first orders reaches the lower bound within milliseconds. An order takes O(n²), 1 s for 20,000
buffers. So above FIRST_FIT_MOST only the two sweeps run, through time and back, in O(n log n).
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from ds_memo.plan.dsa import MAX_TOTAL, Buffer, LiveUnits, Offset, columns, lower_bound, peak, sections

NO_CEILING = 2 * MAX_TOTAL - 1  # the largest address in 64 bits
FIRST_FIT_MOST = 20_000  # buffers
SWEEPING = 2e-5  # seconds a buffer, twice the measured time
IN_TIME = "in time"


def portfolio(
    buffers: Sequence[Buffer], deadline: float = float("inf"), target: int | None = None, swept: list[Offset] | None = None
) -> tuple[list[Offset], str]:
    """Return the best placement that the portfolio finds, and the name of its order.

    Args:
        deadline: `time.monotonic()` after which no order begins and an unfinished one is dropped. The first sweep
            through time always runs, so that there is an answer.
        target: Stop at this peak; None: at the lower bound.
        swept: Offsets that this sweep, `in_time`, has found before.
    """
    if not buffers:
        return [], "empty"
    target = lower_bound(buffers) if target is None else target
    best: list[Offset] = []
    name, height = "", NO_CEILING
    orders = _orders(buffers, deadline) if len(buffers) <= FIRST_FIT_MOST else iter(())
    for other, offsets in chain(orders, _sweeps(buffers, deadline, swept)):
        if offsets is not None and (top := peak(buffers, offsets)) < height:
            best, name, height = offsets, other, top
        if height <= target:
            break
    return best, name


def _sweeps(buffers: Sequence[Buffer], deadline: float, swept: list[Offset] | None) -> Iterator[tuple[str, list[Offset]]]:
    yield IN_TIME, in_time(buffers) if swept is None else swept
    if time.monotonic() + SWEEPING * len(buffers) < deadline:
        yield "back in time", in_time(buffers, back=True)


def _orders(buffers: Sequence[Buffer], deadline: float) -> Iterator[tuple[str, list[Offset] | None]]:
    if time.monotonic() > deadline:
        return
    first, last, _ = sections(buffers)
    lower, upper, size = columns(buffers)
    crowd = LiveUnits(lower, upper, size).most(lower, upper).tolist()
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
            if time.monotonic() > deadline:
                return
            order = sorted(range(len(buffers)), key=key)
            yield name + (", best fit" if best else ""), first_fit(buffers, order, best, deadline)


def first_fit(
    buffers: Sequence[Buffer], order: Sequence[int], best: bool = False, deadline: float = float("inf")
) -> list[Offset] | None:
    """Place buffers in `order`, each at the lowest gap (`best`: the tightest) among those placed; None past the deadline."""
    n = len(buffers)
    offsets = [0] * n
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)  # addresses of the placed ones, sorted by start
    lower, upper = np.empty(n, np.int64), np.empty(n, np.int64)
    for placed, i in enumerate(order):
        if placed % 64 == 63 and time.monotonic() > deadline:
            return None
        (born, dead), size = buffers[i].lifespan, buffers[i].size
        overlapping = (lower[:placed] < dead) & (upper[:placed] > born)
        starts = start[:placed][overlapping]
        floors = np.empty(len(starts) + 1, np.int64)
        floors[0] = 0
        np.maximum.accumulate(end[:placed][overlapping], out=floors[1:])
        gaps = np.append(starts, NO_CEILING) - floors  # above the last one there is always room
        fitting = np.flatnonzero(gaps >= size)
        at = offsets[i] = int(floors[fitting[np.argmin(gaps[fitting])] if best else fitting[0]])
        k = int(np.searchsorted(start[:placed], at, "right"))
        for column, value in ((start, at), (end, at + size), (lower, born), (upper, dead)):
            column[k + 1 : placed + 1] = column[k:placed]
            column[k] = value
    return offsets


def in_time(buffers: Sequence[Buffer], back: bool = False) -> list[Offset]:
    """Place buffers in order of birth, each into the tightest gap between live ones, the lowest of equal gaps. O(n log n).

    Args:
        back: In order of death, from the last to the first.
    """
    lower, upper, size = columns(buffers)
    if back:
        lower, upper = -upper, -lower
    births = np.lexsort((-upper, lower)).tolist()
    deaths = iter(np.argsort(upper, kind="stable").tolist())
    born, dead, sizes = lower.tolist(), upper.tolist(), size.tolist()
    offsets = [0] * len(buffers)
    gaps: list[tuple[int, Offset]] = []  # sorted (size, start) of the gaps below `top`; above it there is always room
    starts: dict[Offset, Offset] = {}  # end of a gap -> its start
    ends: dict[Offset, Offset] = {}  # start of a gap -> its end
    top = 0
    dying = next(deaths, -1)  # read only while buffers are alive
    for i in births:
        while dead[dying] <= born[i]:
            start = offsets[dying]
            end = start + sizes[dying]
            if (below := starts.pop(start, None)) is not None:
                del gaps[bisect_left(gaps, (start - below, below))]
                start = below
            if (above := ends.pop(end, None)) is not None:
                del gaps[bisect_left(gaps, (above - end, end))]
                end = above
            if end == top:
                top = start
                ends.pop(start, None)
            else:
                insort(gaps, (end - start, start))
                starts[end], ends[start] = start, end
            dying = next(deaths)
        if (at := bisect_left(gaps, (sizes[i], 0))) == len(gaps):
            offsets[i] = top
            top += sizes[i]
            continue
        room, start = gaps.pop(at)
        end = ends.pop(start)
        del starts[end]
        offsets[i] = start
        if room > sizes[i]:
            insort(gaps, (room - sizes[i], start + sizes[i]))
            starts[end], ends[start + sizes[i]] = start + sizes[i], end
    return offsets
