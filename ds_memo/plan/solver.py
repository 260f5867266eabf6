"""Solve one allocation problem: greedy, exact search, MIP, search again; verified.

The first stage whose peak equals the best known lower bound ends the work, since that is a proof. `solver` sets the
stages:

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
from functools import cached_property

from ds_memo import compiled
from ds_memo.plan import greedy, milp, native, verify
from ds_memo.plan.dsa import Offset, Problem, lower_bound, peak
from ds_memo.plan.search import search, too_large

SOLVERS = ("greedy", "search", "cbc", "highs")
VERIFYING = 2e-5  # seconds a buffer, kept for the verifier: twice the measured time
COMPILING = 0.5  # share of the time limit after which the search's compilation is stopped
MAX_PAIRS = 4000  # overlapping pairs, one binary each; above it CBC has never improved a plan within minutes
Progress = Callable[[str, int, int, float, float], None]  # stage, best peak, bound, seconds used, seconds allowed


@dataclass(frozen=True)
class Solution:
    """A verified placement.

    Args:
        offsets: One per buffer, in the problem's unit.
        peak: The highest address used.
        lower_bound: The most units alive at once.
        bound: The best proven bound, at least lower_bound: the search can prove that lower_bound cannot be reached.
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


class Shared:
    """What the problems of one plan share: the compiled search, and where progress and warnings go.

    Args:
        deadline: `time.monotonic()` at which a compilation is stopped.
        progress: See solve.
        warn: Called once when the search cannot be compiled, and when the MIP fails.
    """

    def __init__(self, deadline: float, progress: Progress | None = None, warn: Callable[[str], None] = compiled.warn):
        self.deadline, self.progress, self.warn = deadline, progress, warn

    @cached_property
    def no_search(self) -> str:
        """Why the exact search cannot be used, or an empty string. Compiles it if necessary."""
        try:
            native.load(self.deadline)
        except compiled.Unavailable as error:
            self.warn(f"addresses are planned by greedy and MIP alone, without the exact search: {error}")
            return str(error)
        return ""


class _Run:
    """The state that the stages share: the best plan, the best bound, the clock."""

    def __init__(self, problem: Problem, seconds: float, shared: Shared):
        self.buffers, self.limit, self.shared = problem.buffers, seconds, shared
        self.began = time.monotonic()
        self.lower_bound = self.bound = lower_bound(problem.buffers)
        self.offsets: list[Offset] = []
        self.peak = sum(buffer.size for buffer in problem.buffers) + 1  # worse than any plan
        self.method = "none"
        self.notes: list[str] = []
        self.unit = 1

    @property
    def left(self) -> float:
        return self.began + self.limit - time.monotonic()

    @property
    def done(self) -> bool:
        return self.peak == self.bound or self.left <= 0.05

    def scale(self) -> None:
        """Go on in the largest unit that divides all sizes."""
        problem, self.unit = Problem(self.buffers).scaled()
        self.buffers = problem.buffers
        self.offsets = [offset // self.unit for offset in self.offsets]  # sums of sizes
        self.peak, self.bound = self.peak // self.unit, -(-self.bound // self.unit)

    def offer(self, offsets: list[Offset] | None, method: str) -> None:
        if offsets is not None and (height := peak(self.buffers, offsets)) < self.peak:
            self.offsets, self.peak, self.method = offsets, height, method

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def tell(self, stage: str) -> None:
        if self.shared.progress:
            self.shared.progress(stage, self.peak * self.unit, self.bound * self.unit, self.limit - self.left, self.limit)

    def solution(self) -> Solution:
        found, top = [o * self.unit for o in self.offsets], self.peak * self.unit
        seconds = time.monotonic() - self.began
        return Solution(found, top, self.lower_bound, self.bound * self.unit, self.method, seconds, tuple(self.notes))


def solve(problem: Problem, *, solver: str = "cbc", seconds: float = 60.0, progress: Progress | None = None) -> Solution:
    """Return the smallest plan that `solver` finds in `seconds`, verified.

    The limit is kept to 0.2 s if it suffices for one sweep and the verifier: some 15 µs a buffer.

    Args:
        progress: Called with stage, best peak, bound (the problem's unit), seconds used and allowed, at every change.

    Raises:
        ValueError: `solver` is not one of SOLVERS.
    """
    shared = Shared(time.monotonic() + COMPILING * seconds, progress)
    found = place(problem, shared, solver=solver, seconds=seconds - VERIFYING * len(problem))
    verify.require(problem.buffers, found.offsets, peak=found.peak, lower_bound=found.lower_bound)
    return found


def place(problem: Problem, shared: Shared, *, solver: str, seconds: float, start: Solution | None = None) -> Solution:
    """Solve like `solve`, but without the verifier.

    Args:
        start: A solution to go on from. Greedy does not run again, or only its other orders if this is a sweep's.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver {solver!r}, expected one of {', '.join(SOLVERS)}")
    run = _Run(problem, seconds, shared)
    if start is not None:
        run.offer(start.offsets, start.method)
    swept = start.offsets if start is not None and start.method == f"greedy ({greedy.IN_TIME})" else None
    if start is None or (swept is not None and not run.done):
        # Greedy gets a third of a short limit and leaves the rest to the other stages.
        fraction = 0.9 if solver == "greedy" else 0.33
        offsets, order = greedy.portfolio(run.buffers, run.began + fraction * seconds, run.bound, swept)
        run.offer(offsets, f"greedy ({order})")
        if run.peak > run.bound and len(problem) > greedy.FIRST_FIT_MOST:
            run.note(f"first fit left out: {len(problem)} buffers, more than {greedy.FIRST_FIT_MOST}")
    run.tell("greedy")
    if solver != "greedy" and not run.done:
        _exact(run, solver)
    return run.solution()


def _exact(run: _Run, solver: str) -> None:
    run.scale()
    why = too_large(run.buffers)
    if why or run.shared.no_search:
        run.note(f"exact search left out: {why or run.shared.no_search}")
        if not run.done and (solver != "search" or not why):
            _mip(run, solver, run.left)
        return
    if solver != "search":
        _search(run, 0.2 * run.left)
        if not run.done:
            _mip(run, solver, 0.7 * run.left)
    if not run.done:
        _search(run, run.left)


def fit(
    problem: Problem, capacity: int, *, solver: str = "cbc", seconds: float = 60.0, progress: Progress | None = None
) -> Solution | None:
    """Return any placement below `capacity`, or None if none was found.

    This is MiniMalloc's question. It is easier than the smallest plan, because the search gets the capacity at once.
    Every solver but "greedy" does the same here, unless the search cannot be compiled.

    Args:
        progress: See solve.
    """
    run = _Run(problem, seconds - VERIFYING * len(problem), Shared(time.monotonic() + COMPILING * seconds, progress))
    offsets, order = greedy.portfolio(run.buffers, run.began + run.limit / 4, capacity)
    run.offer(offsets, f"greedy ({order})")
    if run.peak > capacity and solver != "greedy":
        run.scale()
        _exact_fit(run, solver, capacity // run.unit)
    found = run.solution()
    if found.peak > capacity:
        return None
    verify.require(problem.buffers, found.offsets, peak=found.peak, lower_bound=found.lower_bound, capacity=capacity)
    return found


def _exact_fit(run: _Run, solver: str, capacity: int) -> None:
    if why := too_large(run.buffers):
        run.shared.warn(f"exact search left out: {why}")
    elif run.shared.no_search:
        run.note(f"exact search left out: {run.shared.no_search}")
        _mip(run, solver, run.left)
    else:
        run.tell("search")
        run.offer(search(run.buffers, capacity, run.left).offsets, "search")


def _search(run: _Run, seconds: float) -> None:
    """Search at the bound; if that fails, halfway between it and the best plan, in half of the remaining time."""
    end = time.monotonic() + min(seconds, run.left)
    target = run.bound
    while not run.done and target < run.peak and (left := end - time.monotonic()) > 0.02:
        run.tell("search")
        answer = search(run.buffers, target, left / 2)
        if answer.offsets is not None:
            run.offer(answer.offsets, "search")
            target = (run.bound + run.peak - 1) // 2
            continue
        if answer.proven:
            run.bound = max(run.bound, target + 1)
        target += max(1, (run.peak - target) // 2)
    run.tell("search")


def _mip(run: _Run, solver: str, seconds: float) -> None:
    solver = "cbc" if solver == "search" else solver  # in the search's place
    count = milp.count_pairs(run.buffers)
    if count > MAX_PAIRS:
        run.note(f"MIP left out: {count} overlapping pairs, more than {MAX_PAIRS}")
        return
    run.tell(f"mip ({solver})")

    def heard(best: float, bound: float) -> None:
        if run.shared.progress:
            best_unit, bound_unit = (int(v * run.unit) if abs(v) < 1e40 else -1 for v in (best, bound))
            run.shared.progress(f"mip ({solver})", best_unit, bound_unit, run.limit - run.left, run.limit)

    try:
        answer = milp.solve_milp(run.buffers, seconds, solver=solver, start=run.offsets, progress=heard)
    except milp.MilpFailed as e:
        run.note(f"MIP ({solver}) failed: {e}")
        run.shared.warn(f"MIP ({solver}) failed, the plan is from {run.method}: {e}")
        return
    run.offer(answer.offsets, f"mip ({solver})")
    if answer.bound <= run.peak:
        run.bound = max(run.bound, answer.bound)
    run.tell(f"mip ({solver})")
