"""Offline dynamic storage allocation: the types that all solvers share, and the lower bound.

A `Problem` is a list of `Buffer`s, each with a size and a half-open `Lifespan`. A solution is one offset per buffer, such
that no two buffers overlap in both time and address. `peak` is the highest address used, `lower_bound` the most units
alive at once. No solution has a smaller peak, so one that equals the bound is proven optimal.

Sizes are in units (a power-of-two number of bytes, or the byte itself), times in any increasing integer.
After google/minimalloc's `minimalloc.h` (Moffitt, ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_memo.plan.errors import TooLarge

MAX_TOTAL = 2**62
Offset = int  # address of a buffer's first unit
TimeValue = int  # index of a request, or any other clock
Column = NDArray[np.int64]  # one entry per buffer


class Lifespan(NamedTuple):
    """Half-open: alive at t with lower <= t < upper."""

    lower: TimeValue
    upper: TimeValue

    def overlaps(self, other: Lifespan) -> bool:
        return self.lower < other.upper and other.lower < self.upper


class Buffer(NamedTuple):
    id: str  # for messages and files
    lifespan: Lifespan
    size: int  # units, > 0

    @property
    def area(self) -> int:
        return self.size * (self.lifespan.upper - self.lifespan.lower)


@dataclass(frozen=True)
class Problem:
    buffers: tuple[Buffer, ...]

    def __post_init__(self):
        if (total := sum(b.size for b in self.buffers)) >= MAX_TOTAL:
            raise TooLarge(f"the sizes add up to {total}, expected less than 2^62")

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, int, int]]) -> Problem:
        """Make a problem from (id, lower, upper, size) rows."""
        return cls(tuple(Buffer(i, Lifespan(lo, up), size) for i, lo, up, size in rows))

    def __len__(self) -> int:
        return len(self.buffers)

    def scaled(self) -> tuple[Problem, int]:
        """Return the same problem in the largest unit that divides all sizes, and that unit."""
        unit = gcd(*(b.size for b in self.buffers)) if self.buffers else 1
        return Problem(tuple(b._replace(size=b.size // unit) for b in self.buffers)), unit


def columns(buffers: Sequence[Buffer]) -> tuple[Column, Column, Column]:
    """Return lower ends, upper ends and sizes of the buffers, each of shape (n,), int64."""
    n = len(buffers)
    lower = np.fromiter((b.lifespan.lower for b in buffers), np.int64, n)
    upper = np.fromiter((b.lifespan.upper for b in buffers), np.int64, n)
    return lower, upper, np.fromiter((b.size for b in buffers), np.int64, n)


class LiveUnits:
    """Units alive over time: `alive[k]` from `times[k]` to the next one. O(n log n)."""

    def __init__(self, lower: Column, upper: Column, size: Column):
        times, at = np.unique(np.concatenate((lower, upper)), return_inverse=True)
        change = np.zeros(len(times), np.int64)
        np.add.at(change, at, np.concatenate((size, -size)))
        self.times, self.alive = times, np.cumsum(change)

    def most(self, lower: Column, upper: Column) -> Column:
        """Return the most units alive at once during each lifespan."""
        first = np.searchsorted(self.times, lower, "right")
        end = np.searchsorted(self.times, upper, "left") + 1
        return most_between(np.append(0, self.alive), first, end)  # entry 0 is before all times


def most_between(values: Column, first: Column, end: Column) -> Column:
    """Return the largest value from each `first` to before `end`. O(n log n)."""
    out = np.empty(len(first), np.int64)
    levels = np.frexp((end - first).astype(float))[1] - 1  # of the largest power of two within
    table = values  # table[k]: the most of the 2^j entries from k
    for j in range(int(levels.max(initial=-1)) + 1):
        here = np.flatnonzero(levels == j)
        out[here] = np.maximum(table[first[here]], table[end[here] - 2**j])
        table = np.maximum(table[: -(2**j)], table[2**j :])
    return out


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """Return the most units alive at any one time. O(n log n)."""
    return int(LiveUnits(*columns(buffers)).alive.max(initial=0))


def peak(buffers: Sequence[Buffer], offsets: Sequence[Offset]) -> int:
    """Return the highest address in use, in units."""
    return max((o + b.size for b, o in zip(buffers, offsets, strict=True)), default=0)


def sections(buffers: Sequence[Buffer]) -> tuple[list[int], list[int], int]:
    """Return the first and last section of each buffer, and the number of sections.

    A section is a maximal set of buffers that are alive together: two buffers overlap in time exactly if they share
    a section. A section ends only where a death follows a birth, so there are usually far fewer sections than events.
    """
    births = {b.lifespan.lower for b in buffers}
    deaths = {b.lifespan.upper for b in buffers}
    index: dict[TimeValue, int] = {}  # time -> number of sections that end at or before it
    count, born = 0, False
    for t in sorted(births | deaths):
        if t in deaths and born:
            count, born = count + 1, False
        index[t] = count
        born = born or t in births
    return [index[b.lifespan.lower] for b in buffers], [index[b.lifespan.upper] - 1 for b in buffers], count
