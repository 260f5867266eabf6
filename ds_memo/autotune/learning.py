"""Learning while training: what steps show is compared with what was predicted, part by part.

part      predicted                            measured                               learned
kernels   seconds of a layer's parts           the same, by events                    factors on them, once (kernel_seconds.py)
link      seconds that compute waits           the same, by the copy streams          share of the profiled bandwidth
drives    seconds that compute waits           the same, by the files                 bytes per second written and read
memory    none, or that of earlier passes      log of a pass, or CUDA's peak          non-layer memory (budgets.py)

Every part is learned alike: each rank returns what it has `measured` (None: nothing new), and all of them `learn` from all
ranks' answers, the most careful first. A part that the solver is told of can `correct` the solver's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solution import Solution

SETTLING = 2
"""Optimizer steps before the first window: layers are analysed in them."""
WINDOW = 4
"""Optimizer steps of a window."""
TOLERATED = 0.05
"""Share of a pass that compute may wait longer than predicted before a part counts as slower."""


class Totals(NamedTuple):
    """Measurements since training began, or in a window: bytes and seconds of this rank."""

    passes: int = 0
    seconds: float = 0.0
    copy_stall_s: float = 0.0
    """Seconds that compute waited for copies."""
    file_stall_s: float = 0.0
    """Seconds that compute waited for files."""
    written: int = 0
    writing_s: float = 0.0
    read: int = 0
    reading_s: float = 0.0

    def since(self, earlier: Totals) -> Totals:
        return Totals._make(now - before for now, before in zip(self, earlier, strict=True))

    def is_late(self, stall_s: float, predicted_s: float) -> bool:
        """Return True if a stall of these passes is longer than predicted for one of them, by more than TOLERATED."""
        return stall_s > self.passes * predicted_s + TOLERATED * self.seconds


@dataclass
class Link:
    """The link between host and device."""

    share: float = 1.0
    """Share of the profiled bandwidth that copies reach."""

    def measured(self, window: Totals, passed: PassSolution) -> float | None:
        share = slowdown(passed.run, passed.solution, window)
        return share if share < 1 else None

    def learn(self, by_rank: Sequence[float | None]) -> str | None:
        shares = [share for share in by_rank if share is not None]
        if not shares:
            return None
        self.share *= min(shares)
        return f"copies reach {self.share:.0%} of the profiled bandwidth"

    def correct(self, run: RunCosts) -> RunCosts:
        return slower(run, self.share)


class Windows:
    """Measures a few optimizer steps at a time.

    Ranks make their optimizer steps together, but their passes may differ, in length above all. So windows end after as many
    steps on every rank, whatever each has seen.

    Args:
        totals: measures what this rank knows by now, but for passes and seconds.
    """

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals
        self._steps = -SETTLING
        self._began = Totals()
        self._comparable = True

    def another_kind(self) -> None:
        """The next pass has another solution than the last: one prediction does not hold for this window."""
        self._comparable = False

    def stepped(self, passes: int, now: float) -> tuple[Totals, bool] | None:
        """Follow the end of an optimizer step.

        Args:
            passes: training passes so far.
            now: the time, in seconds.

        Returns:
            What a window that ends here has measured, and True if one prediction holds for all of its passes; None: none ends.
        """
        self._steps += 1
        if 0 < self._steps < WINDOW:
            return None
        totals = self._totals()._replace(passes=passes, seconds=now)
        window, comparable = totals.since(self._began), self._comparable
        self._began, self._comparable = totals, True
        if self._steps <= 0:
            return None
        self._steps = 0
        return window, comparable and window.passes > 0


def slower(run: RunCosts, share: float) -> RunCosts:
    """Return the run with copies at a share of their bandwidth."""
    return replace(run, d2h_bytes_per_s=run.d2h_bytes_per_s * share, h2d_bytes_per_s=run.h2d_bytes_per_s * share)


def slowdown(run: RunCosts, solution: Solution, window: Totals) -> float:
    """Return the share of the bandwidth at which the schedule stalls as much as was measured; 1 if copies are as predicted."""
    if solution.no_recompute or not window.is_late(window.copy_stall_s, solution.d2h_stall_s + solution.h2d_stall_s):
        return 1.0
    low, high = 0.01, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        step = Schedule(slower(run, middle), solution.kinds).at(solution.alpha)
        if step.d2h_stall_s + step.h2d_stall_s > window.copy_stall_s / window.passes:
            low = middle
        else:
            high = middle
    return high
