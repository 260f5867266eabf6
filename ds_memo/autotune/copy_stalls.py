"""Stalls: whether compute waits for copies longer than predicted, looked at over a few optimizer steps at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solution import Solution
from ds_memo.swap.stream_protocol import Streams

SETTLING = 3
"""Optimizer steps before the first window: layers are analysed in them, and addresses planned."""
WINDOW = 4
"""Optimizer steps that are looked at together."""
TOLERATED = 0.05
"""Share of a pass that compute may wait longer than predicted before the copies count as slower than profiled."""


@dataclass(frozen=True)
class Window:
    """What a window saw on this rank."""

    passes: int
    seconds: float
    stalled_s: float
    mixed: bool
    """Passes were of several kinds, which cannot be compared with one prediction."""

    def share(self, run: RunCosts, solution: Solution) -> float:
        """Return the share of the profiled bandwidth that copies reached, if it can be told: 1 if they are as predicted."""
        if self.mixed or self.passes <= 0 or solution.no_recompute:
            return 1.0
        return slowdown(run, solution, self.stalled_s / self.passes, self.seconds / self.passes)


class StallWatch:
    """Gives a window after every few optimizer steps.

    Ranks make their optimizer steps together, but what they pass through may differ, in length above all. So windows end after
    as many steps on every rank, whatever each has seen.

    Args:
        streams: as training uses them.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._steps = -SETTLING
        self._passes = 0
        self._began = self._stalled = 0.0
        self._mixed = False

    def another_kind(self) -> None:
        """The next pass is of another kind than the last, or has another solution."""
        self._mixed = True

    def stepped(self, passes: int, now: float) -> Window | None:
        """An optimizer step is over.

        Args:
            passes: training passes so far.
            now: the time, in seconds.
        """
        self._steps += 1
        if self._steps <= 0:
            self._begin(passes, now)
            return None
        if self._steps < WINDOW:
            return None
        seen = Window(passes - self._passes, now - self._began, self._stalled_s() - self._stalled, self._mixed)
        self._begin(passes, now)
        return seen

    def _begin(self, passes: int, now: float) -> None:
        self._steps = min(self._steps, 0)
        self._passes, self._began, self._stalled, self._mixed = passes, now, self._stalled_s(), False

    def _stalled_s(self) -> float:
        return sum(self._streams.stall_s().values())


def slower(run: RunCosts, share: float) -> RunCosts:
    """The run with copies at a share of their bandwidth."""
    return replace(run, d2h_bytes_per_s=run.d2h_bytes_per_s * share, h2d_bytes_per_s=run.h2d_bytes_per_s * share)


def slowdown(run: RunCosts, solution: Solution, stalled_s: float, pass_s: float) -> float:
    """The share of the profiled bandwidth at which the schedule would stall as much as was measured; 1 if it is as predicted.

    Args:
        stalled_s, pass_s: measured seconds of one pass.
    """
    if stalled_s <= solution.d2h_stall_s + solution.h2d_stall_s + TOLERATED * pass_s:
        return 1.0
    low, high = 0.01, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        step = Schedule(slower(run, middle), solution.kinds).at(solution.alpha)
        if step.d2h_stall_s + step.h2d_stall_s > stalled_s:
            low = middle
        else:
            high = middle
    return high
