"""Solve one allocation problem: greedy, exact search, MIP, search again.

The first stage whose peak equals the best known lower bound ends the work, since that is a proof. `solver` sets the stages:

| solver | stages |
|---|---|
| greedy | the greedy portfolio |
| search | greedy, then the exact search for the whole time limit |
| cbc, highs | greedy, then a short search, the MIP and a long search |

Where the exact search cannot be compiled, the MIP alone follows greedy (CBC under `search`), with a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_memo.compiled import Unavailable
from ds_memo.errors import warn
from ds_memo.plan import greedy, milp
from ds_memo.plan.dsa import Offset, Problem, lower_bound, peak
from ds_memo.plan.search import load, search, too_large

SOLVERS = ("greedy", "search", *milp.SOLVERS)
COMPILING = 0.5  # share of the remaining time after which the search's compilation is stopped
MAX_PAIRS = 4000  # overlapping pairs, one binary each; above it CBC has never improved a plan within minutes
Progress = Callable[[str, int, int, float, float], None]  # stage, best peak, bound, seconds used, seconds allowed
Warn = Callable[[str], None]


@dataclass(frozen=True)
class PlanSolution:
    """A placement that no verifier has seen yet.

    Args:
        offsets: One per buffer, in the problem's unit.
        peak: The highest address used.
        lower_bound: The most units alive at once.
        bound: The best proven bound, at least lower_bound: search and MIP can prove that lower_bound cannot be reached.
        method: The stage that found the offsets, as "greedy (size)", "search" or "mip (cbc)".
        notes: Every stage that was left out or failed, and why.
    """

    offsets: list[Offset]
    peak: int
    lower_bound: int
    bound: int
    method: str
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def proven(self) -> bool:
        """True if no plan is smaller."""
        return self.peak == self.bound


def solve(
    problem: Problem,
    *,
    solver: str = "cbc",
    seconds: float = 60.0,
    start: PlanSolution | None = None,
    progress: Progress | None = None,
    warn: Warn = warn,
) -> PlanSolution:
    """Return the smallest placement that `solver` finds in `seconds`, kept to 0.2 s if they suffice for one sweep.

    Args:
        start: A solution to go on from. Greedy does not run again, or only its other orders if this is a sweep's.
        progress: Called with stage, best peak, bound (the problem's unit), seconds used and allowed, at every change.
        warn: Called with one line if the search cannot be compiled, or the MIP fails.

    Raises:
        ValueError: `solver` is not one of SOLVERS.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver {solver!r}, expected one of {', '.join(SOLVERS)}")
    run = _Run(problem, seconds, progress)
    if start is not None:
        run.offer(start.offsets, start.method)
    swept = start.offsets if start is not None and start.method == f"greedy ({greedy.IN_TIME})" else None
    if start is None or (swept is not None and not run.done):
        # Greedy gets a third of a short limit and leaves the rest to the other stages.
        fraction = 0.9 if solver == "greedy" else 0.33
        offsets, order = greedy.portfolio(problem.buffers, run.began + fraction * seconds, run.bound, swept)
        run.offer(offsets, f"greedy ({order})")
        if run.peak > run.bound and len(problem) > greedy.FIRST_FIT_MOST:
            run.notes.append(f"first fit left out: {len(problem)} buffers, more than {greedy.FIRST_FIT_MOST}")
    run.tell("greedy")
    if solver != "greedy" and not run.done:
        _exact(run, solver, warn)
    return run.solution()


class _Run:
    """The best placement, the best bound and the clock, which the stages share."""

    def __init__(self, problem: Problem, seconds: float, progress: Progress | None):
        self.problem, self.limit, self._progress = problem, seconds, progress
        self.began = time.monotonic()
        self.lower_bound = self.bound = lower_bound(problem.buffers)
        self.offsets: list[Offset] = []
        self.peak = sum(buffer.size for buffer in problem.buffers) + 1  # worse than any plan
        self.method = "none"
        self.notes: list[str] = []

    @property
    def left(self) -> float:
        return self.began + self.limit - time.monotonic()

    @property
    def done(self) -> bool:
        return self.peak == self.bound or self.left <= 0.05

    def offer(self, offsets: list[Offset], method: str) -> None:
        if (height := peak(self.problem.buffers, offsets)) < self.peak:
            self.offsets, self.peak, self.method = offsets, height, method

    def tell(self, stage: str) -> None:
        if self._progress:
            self._progress(stage, self.peak, self.bound, self.limit - self.left, self.limit)

    def solution(self) -> PlanSolution:
        seconds = time.monotonic() - self.began
        return PlanSolution(self.offsets, self.peak, self.lower_bound, self.bound, self.method, seconds, tuple(self.notes))


def _exact(run: _Run, solver: str, warn: Warn) -> None:
    why = too_large(run.problem.buffers)
    if not why:
        try:
            load(time.monotonic() + COMPILING * run.left)
        except Unavailable as error:
            why = str(error)
            warn(
                f"addresses are planned by greedy and MIP alone, without the exact search: {why}. "
                "Install a C++20 compiler, if it is that"
            )
    problem, unit = run.problem.scaled()
    if why:
        run.notes.append(f"exact search left out: {why}")
        if solver != "search" or not too_large(run.problem.buffers):
            _mip(run, problem, unit, solver, run.left, warn)
        return
    if solver != "search":
        _search(run, problem, unit, 0.2 * run.left)
        if not run.done:
            _mip(run, problem, unit, solver, 0.7 * run.left, warn)
    if not run.done:
        _search(run, problem, unit, run.left)


def _search(run: _Run, problem: Problem, unit: int, seconds: float) -> None:
    """Search at the bound; if that fails, halfway between it and the best plan, in half of the remaining time.

    Args:
        problem: The run's in units of this many of its own.
    """
    end = time.monotonic() + min(seconds, run.left)
    target = -(-run.bound // unit)
    while not run.done and target * unit < run.peak and (left := end - time.monotonic()) > 0.02:
        run.tell("search")
        answer = search(problem.buffers, target, left / 2)
        if answer.offsets is not None:
            run.offer([offset * unit for offset in answer.offsets], "search")
            target = (-(-run.bound // unit) + run.peak // unit - 1) // 2
            continue
        if answer.proven:
            run.bound = max(run.bound, (target + 1) * unit)
        target += max(1, (run.peak // unit - target) // 2)
    run.tell("search")


def _mip(run: _Run, problem: Problem, unit: int, solver: str, seconds: float, warn: Warn) -> None:
    solver = "cbc" if solver == "search" else solver  # in the search's place
    if (count := milp.count_pairs(problem.buffers)) > MAX_PAIRS:
        run.notes.append(f"MIP left out: {count} overlapping pairs, more than {MAX_PAIRS}")
        return
    stage = f"mip ({solver})"
    run.tell(stage)
    start = [offset // unit for offset in run.offsets]  # sums of sizes
    try:
        answer = milp.solve_milp(problem.buffers, seconds, solver=solver, start=start)
    except milp.MilpFailed as e:
        run.notes.append(f"MIP ({solver}) failed: {e}")
        warn(f"MIP ({solver}) failed, the plan is from {run.method}, which is used: {e}")
        return
    if answer.offsets is not None:
        run.offer([offset * unit for offset in answer.offsets], stage)
    if answer.bound * unit <= run.peak:
        run.bound = max(run.bound, answer.bound * unit)
    run.tell(stage)
