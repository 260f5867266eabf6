"""Plans of traces that make the same requests over and over: layers that run in tiles.

A *run* is a part of a phase that repeats the same sizes, malloc for malloc and free for free. Its *copies* (tiles) are planned as
one: the trace is shortened to one copy of each run, planned, and every tensor gets the address of its counterpart.

    dies in its own copy            lives in the kept copy as in its own
    crosses into another copy       lives through the whole kept copy
    lives through d - 1 more        d blocks side by side, which the copies take in turn

So a tensor's life and bytes lie within those of its counterpart, at each moment of the shorter trace: if no two of these
overlap, no two tensors do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_memo.plan import verify
from ds_memo.plan.dsa import Column
from ds_memo.plan.trace import UNIT, Columns, Phase, Request, Trace

LEAST_COPIES = 4
"""Fewer copies than these are planned one by one."""
_GRAM = 16
"""Neighbouring requests whose like ones show how far apart copies are."""
_PERIODS = 6
"""Distances that are tried in a phase."""


class Repetition(NamedTuple):
    """Copies of the same requests, as indices of requests."""

    first: int
    period: int
    """Requests of one copy."""
    copies: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.copies


@dataclass(frozen=True)
class Shortened:
    """A trace with one copy of each run."""

    trace: Trace
    counterpart: Column
    """For each tensor of the longer trace, the id in `trace` of the tensor that stands for it, as a number."""
    block: Column
    """Which of the counterpart's blocks the tensor has."""
    copies: int
    """Copies of all runs."""

    def offsets(self, planned: dict[str, int], size: Column) -> list[int]:
        """Return the offset of each tensor of the longer trace, or -1 where its counterpart has none.

        Args:
            planned: offsets of the shorter trace's tensors, by id.
            size: whole bytes of each tensor of the longer trace.
        """
        of = np.full(int(self.counterpart.max(initial=-1)) + 1, -1, np.int64)
        for id_, offset in planned.items():
            of[int(id_)] = offset
        found = of[self.counterpart]
        return np.where(found < 0, -1, found + self.block * size).tolist()


def shorten(trace: Trace, tensors: Columns) -> Shortened | None:
    """Return the trace with one copy of each run, or None if it has no runs."""
    total = len(trace.requests)
    birth, death, sizes = (np.array(column, np.int64) for column in (tensors.births, tensors.deaths, tensors.sizes))
    changes = np.zeros(total + 1, np.int64)
    changes[birth] = sizes + 1
    changes[death] = -(sizes + 1)  # the last entry is of those that are not freed
    runs = list(_runs(trace.phases, changes[:total]))
    if not runs:
        return None
    clock = _Clock(runs, total)
    first, last = clock.during(birth, death)
    run, copy, place = clock.run[birth], clock.copy[birth], clock.tick[birth]
    # Tensors with the same tick of birth have one counterpart; outside runs each has its own.
    born = np.zeros(clock.total + 1, np.int64)
    born[place] = 1
    n, group = int(born.sum()), (np.cumsum(born) - 1)[place]
    start, end = np.full(n, clock.total, np.int64), np.zeros(n, np.int64)
    np.minimum.at(start, group, first)
    np.maximum.at(end, group, last)
    period, copies = (np.array([*column, 1])[run] for column in ([r.period for r in runs], [r.copies for r in runs]))
    blocks = np.ones(n, np.int64)
    np.maximum.at(blocks, group, _turns(death - birth, period, copies - copy))
    size = np.zeros(n, np.int64)
    size[group] = sizes
    size = np.where(blocks > 1, blocks * -(-size // UNIT) * UNIT, size)
    block = copy % blocks[group]
    turns = (np.cumsum(blocks) - blocks)[group] + block
    verify.require_within(start[group], end[group], clock.tick[:total], birth, death, turns)
    shorter = _trace(trace.phases, clock.tick, start, end, size)
    return Shortened(Trace(*shorter, notes=trace.notes), group, block, sum(run.copies for run in runs))


def _turns(life: Column, period: Column, left: Column) -> Column:
    """Return how many copies begin before a tensor dies, of those that are left from its own on."""
    return np.minimum(-(-life // period), left)


class _Clock:
    """Time of the shorter trace: a tick for each request that it keeps, and one for the end of each run."""

    def __init__(self, runs: list[Repetition], total: int) -> None:
        self.run = np.full(total + 1, len(runs))
        """Number of each request's run; len(runs): none."""
        self.copy = np.zeros(total + 1, np.int64)
        kept = np.ones(total + 1, np.int64)
        for number, run in enumerate(runs):
            self.run[run.first : run.end] = number
            self.copy[run.first : run.end] = np.repeat(np.arange(run.copies), run.period)
            kept[run.first + run.period : run.end] = 0
            kept[run.end] += 1
        self.tick = np.cumsum(kept) - 1
        """By request; the last entry is the trace's end."""
        for run in runs:
            again = self.tick[run.first : run.first + run.period]
            self.tick[run.first : run.end] = np.tile(again, run.copies)
        self.total = int(self.tick[-1])
        self._begin = np.array([*(self.tick[run.first] for run in runs), 0])
        self._end = np.array([*(self.tick[run.first] + run.period for run in runs), 0])
        self._last = np.array([*(run.copies - 1 for run in runs), 0])

    def during(self, birth: Column, death: Column) -> tuple[Column, Column]:
        """Return the ticks between which tensors live, whole copies of those that cross into another."""
        into, out = self.run[birth], self.run[death]
        inside = (into == out) & (self.copy[birth] == self.copy[death])
        first = np.where(inside | (self.copy[birth] == self._last[into]), self.tick[birth], self._begin[into])
        last = np.where(inside | (self.copy[death] == 0), self.tick[death], self._end[out])
        return first, last


def _trace(
    phases: tuple[Phase, ...], tick: Column, start: Column, end: Column, size: Column
) -> tuple[tuple[Request, ...], tuple[Phase, ...]]:
    """Return requests and phases of tensors with these lives. At equal ticks frees come first."""
    n, total = len(start), int(tick[-1])
    freed = np.flatnonzero(end < total)
    at = np.concatenate((end[freed], start))
    which = np.concatenate((freed, np.arange(n)))
    malloc = np.concatenate((np.zeros(len(freed), bool), np.ones(n, bool)))
    order = np.lexsort((which, malloc, at))
    ids = [str(i) for i in range(n)]
    sizes = size.tolist()
    rows = zip(which[order].tolist(), malloc[order].tolist(), strict=True)
    requests = tuple(Request(ids[i], sizes[i] if born else None) for i, born in rows)
    borders = np.searchsorted(at[order], [tick[phase.first] for phase in phases] + [total])
    shorter = (Phase(phase.name, int(a), int(b)) for phase, a, b in zip(phases, borders, borders[1:], strict=False))
    return requests, tuple(shorter)


def _runs(phases: tuple[Phase, ...], changes: Column) -> Iterator[Repetition]:
    """Yield the runs in order. `changes`: bytes of each request, less than 0 for frees."""
    known: dict[bytes, list[Repetition]] = {}
    for phase in phases:
        requests = changes[phase.first : phase.end]
        if (key := requests.tobytes()) not in known:
            known[key] = sorted(_runs_of(requests)) if len(requests) > LEAST_COPIES * _GRAM else []
        yield from (run._replace(first=phase.first + run.first) for run in known[key])


def _runs_of(changes: Column) -> Iterator[Repetition]:
    """Yield runs of one phase that do not overlap, longest first."""
    found = []
    for period in _periods(changes):
        alike = np.concatenate(([False], changes[period:] == changes[:-period], [False]))
        borders = np.flatnonzero(alike[1:] != alike[:-1])
        found += [(int(b - a), period, int(a)) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    free = np.ones(len(changes), bool)
    for length, period, first in sorted(found, reverse=True):
        end = first + length + period
        first += _least_alive(changes[first : first + period])
        run = Repetition(first, period, (end - first) // period)
        if run.copies >= LEAST_COPIES and free[run.first : run.end].all():
            free[run.first : run.end] = False
            yield run


def _periods(changes: Column) -> list[int]:
    """Return the commonest distances between like neighbourhoods of requests."""
    grams = changes[: len(changes) - _GRAM + 1].copy()
    for k in range(1, _GRAM):  # wraps around: a hash
        grams = grams * 1_000_003 + changes[k : len(changes) - _GRAM + 1 + k]
    order = np.argsort(grams, kind="stable")
    like = grams[order[1:]] == grams[order[:-1]]
    distances, counts = np.unique((order[1:] - order[:-1])[like], return_counts=True)
    return distances[np.argsort(-counts * distances, kind="stable")][:_PERIODS].tolist()


def _least_alive(changes: NDArray[np.int64]) -> int:
    """Return the request of a copy before which the least of it is alive."""
    return int(np.argmin(np.concatenate(([0], np.cumsum(changes)[:-1]))))
