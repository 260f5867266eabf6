"""Offline dynamic storage allocation: the words every solver here speaks, and the lower bound.

A `Problem` is a list of `Buffer`s, each with a size and a half-open `Lifespan`; a solution is one offset per buffer
such that no two buffers overlap in both time and address. `peak` is the highest address used, `lower_bound` the most
units alive at once: no solution has a smaller peak, one that equals it is proven optimal.

Sizes are in units (a power-of-two number of bytes, or the byte itself), times in any increasing integer.
After google/minimalloc's `minimalloc.h` (Moffitt, ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from ds_memo.plan.errors import TooLarge

MAX_TOTAL = 2**62
Offset = int  # address of a buffer's first unit
TimeValue = int  # index of a request, or any other clock


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
        """From (id, lower, upper, size) rows."""
        return cls(tuple(Buffer(i, Lifespan(lo, up), size) for i, lo, up, size in rows))

    def __len__(self) -> int:
        return len(self.buffers)

    def scaled(self) -> tuple[Problem, int]:
        """The same problem in the largest unit that divides all sizes, and that unit."""
        unit = gcd(*(b.size for b in self.buffers)) if self.buffers else 1
        return Problem(tuple(b._replace(size=b.size // unit) for b in self.buffers)), unit


def worst_moment(buffers: Iterable[Buffer]) -> tuple[TimeValue, int]:
    """The first time at which most units are alive, and how many. O(n log n)."""
    events = []
    for b in buffers:
        events.append((b.lifespan.lower, b.size))
        events.append((b.lifespan.upper, -b.size))
    events.sort()  # at equal times the negative ones, the frees, come first
    alive = when = most = 0
    for time, size in events:
        alive += size
        if alive > most:
            when, most = time, alive
    return when, most


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """The most units alive at any one time."""
    return worst_moment(buffers)[1]


def peak(buffers: Sequence[Buffer], offsets: Sequence[Offset]) -> int:
    """The highest address in use, in units."""
    return max((o + b.size for b, o in zip(buffers, offsets, strict=True)), default=0)


def sections(buffers: Sequence[Buffer]) -> tuple[list[int], list[int], int]:
    """First and last section of each buffer, and the number of sections.

    A section is a maximal set of buffers that are alive together: two buffers overlap in time exactly if they share
    one. Only moments where a death follows a birth open one, so there are usually far fewer sections than events.
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
