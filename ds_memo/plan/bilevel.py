"""From a trace to a plan: greedy over everything, the paper's two levels (levels.py) and a flat plan; the smallest wins.

Greedy's sweep through all tensors comes first and always finishes, so no trace or time limit gives a worse answer. If the
sweep reaches the lower bound, greedy alone solves the levels, for the report.

A long trace that repeats its requests (layers in tiles) is shortened before that (repetition.py), if its plan comes close to the
lower bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from ds_memo.errors import warn
from ds_memo.plan import verify
from ds_memo.plan.dsa import MAX_TOTAL, Buffer, Lifespan, LiveUnits, Problem
from ds_memo.plan.levels import Levels, PhaseReport, share
from ds_memo.plan.repetition import shorten
from ds_memo.plan.search import too_large
from ds_memo.plan.solver import PlanSolution, Progress, Warn, solve
from ds_memo.plan.trace import UNIT, Trace, rounded

_MANY = 10_000
"""Requests. A trace of more is looked through for requests that it repeats."""
_WASTE = 0.005
"""Share of the lower bound that a plan of one copy may take more, before all copies are planned one by one."""


class Slot(NamedTuple):
    """A planned address for the k-th request of a phase."""

    id: str
    phase: int
    k: int
    birth: int  # index of the malloc in the trace
    death: int  # index of the free
    death_phase: int
    requested: int  # bytes; the slot has them rounded up to UNIT
    offset: int  # bytes from the arena's start, a multiple of UNIT

    @property
    def size(self) -> int:
        return rounded(self.requested)

    @property
    def transient(self) -> bool:
        return self.phase == self.death_phase

    def buffer(self) -> Buffer:
        return Buffer(self.id, Lifespan(self.birth, self.death), self.size)


@dataclass(frozen=True)
class Plan:
    """An address for every tensor of an iteration that has bytes. Bytes, seconds."""

    slots: tuple[Slot, ...]
    phases: tuple[PhaseReport, ...]
    peak: int  # the arena's size
    lower_bound: int  # most bytes alive at once
    proven: bool  # no plan is smaller
    kind: str  # "bilevel", "flat" or "rescaled"
    method: str
    block_bound: int  # level 2's lower bound with every pseudo block packed: the paper's form reaches no less
    unpacked: tuple[str, ...]  # phases whose transient tensors were planned at level 2
    bilevel_peak: int
    flat_peak: int | None  # None if the bi-level plan was proven and no flat one was needed
    seconds: float
    notes: tuple[str, ...] = field(default=())


def plan_trace(
    trace: Trace,
    *,
    solver: str = "cbc",
    seconds: float = 60.0,
    progress: Progress | None = None,
    warn: Warn = warn,
) -> Plan:
    """Plan one iteration.

    Args:
        solver: One of solver.SOLVERS.
        seconds: Time limit, kept to a tenth and 0.2 s. A plan takes at least some 15 µs a request; if that is more than the
            limit, a note says so.
        progress: See solver.solve.
        warn: Called with one line when a stage fails; the plan's notes say it too.

    Raises:
        TooLarge: All sizes together reach 2^62 bytes.
    """
    began = time.monotonic()
    plan = _repeated(trace, solver, seconds / 2, progress, warn) if len(trace.requests) > _MANY else None
    if plan is None or plan.peak > (1 + _WASTE) * plan.lower_bound:
        one_by_one = _plan(trace, solver, max(0.0, began + seconds - time.monotonic()), progress, warn)
        plan = one_by_one if plan is None or one_by_one.peak <= plan.peak else plan
    notes = plan.notes
    if (took := time.monotonic() - began) > 1.1 * seconds + 0.2:
        notes = (*notes, f"{len(plan.slots)} tensors took {took:.1f} s, the time limit is {seconds:g} s")
    return replace(plan, seconds=took, notes=notes)


def _repeated(trace: Trace, solver: str, seconds: float, progress: Progress | None, warn: Warn) -> Plan | None:
    """Plan one copy of what the trace repeats; None: it repeats nothing."""
    tensors = trace.columns()
    short = shorten(trace, tensors) if sum(tensors.sizes) < MAX_TOTAL else None
    if short is None:
        return None
    plan = _plan(short.trace, solver, seconds, progress, warn)
    birth, death, size = (np.array(column, np.int64) for column in (tensors.births, tensors.deaths, tensors.sizes))
    size = -(-size // UNIT) * UNIT
    offsets = short.offsets({slot.id: slot.offset for slot in plan.slots}, size)
    slots = map(
        Slot, tensors.ids, tensors.birth_phases, tensors.ks, tensors.births, tensors.deaths, tensors.death_phases,
        tensors.sizes, offsets,
    )  # fmt: skip
    bound = int(LiveUnits(birth, death, size).alive.max(initial=0))
    born_in = np.array(tensors.birth_phases, np.int64)
    inside = np.bincount(born_in[born_in == np.array(tensors.death_phases)], minlength=len(trace.phases)).tolist()
    reports = zip(plan.phases, trace.phases, inside, strict=True)
    return replace(
        plan,
        slots=tuple(slot for slot in slots if slot.offset >= 0),
        phases=tuple(replace(report, first=phase.first, end=phase.end, tensors=n) for report, phase, n in reports),
        lower_bound=bound,
        proven=plan.peak == bound,
        notes=(f"{short.copies} copies of the same requests are planned as one", *plan.notes),
    )


def _plan(trace: Trace, solver: str, seconds: float, progress: Progress | None, warn: Warn) -> Plan:
    began = time.monotonic()
    planned = [tensor for tensor in trace.tensors() if tensor.size]
    problem = Problem(tuple(Buffer(t.id, Lifespan(t.birth, t.death), rounded(t.size)) for t in planned))
    warn_once = cache(warn)

    def solved(problem: Problem, solver: str, end: float, start: PlanSolution | None = None) -> PlanSolution:
        left = end - time.monotonic()
        return solve(problem, solver=solver, seconds=left, start=start, progress=progress, warn=warn_once)

    levels = Levels(trace, planned, problem, solved)
    bound = levels.bound
    # Greedy first, over everything: no answer is worse than one sweep's, however little time there is.
    flat = solved(problem, "greedy", began)
    deadline = began + seconds - 1.5 * flat.seconds  # what the verifier and the slots take, in times of the sweep
    greedy_end = deadline if solver == "greedy" or too_large(problem.buffers) else share(deadline, 0.4)
    stages = [("greedy", greedy_end)] if solver == "greedy" else [("greedy", greedy_end), (solver, deadline)]
    if flat.proven:  # then the levels are for the report alone
        stages = [("greedy", share(deadline, 0.2))]
    one_phase = levels.of_one_phase(flat)
    bilevel: PlanSolution | None = None
    for stage, end in stages:
        if not one_phase:
            bilevel = _least(bilevel, levels.solve(stage, share(end, 0.6)))
            if bilevel.peak == bound:
                break
        flat = solved(problem, stage, end, flat)
        if flat.proven:
            break
    if bilevel is None:
        levels.of_one_phase(flat)
        bilevel = levels.solve("greedy", began)
    best = _least(bilevel, flat)
    verify.require(problem.buffers, best.offsets, peak=best.peak, lower_bound=bound, alignment=UNIT)
    slots = tuple(
        Slot(t.id, t.birth_phase, t.k, t.birth, t.death, t.death_phase, t.size, o)
        for t, o in zip(planned, best.offsets, strict=True)
    )
    notes = [*trace.notes, *bilevel.notes, *flat.notes]
    return Plan(
        slots=slots,
        phases=tuple(levels.reports()),
        peak=best.peak,
        lower_bound=bound,
        proven=best.peak == flat.bound,
        kind="flat" if best is flat else "bilevel",
        method=best.method,
        block_bound=levels.block_bound,
        unpacked=tuple(str(trace.phases[p].name) for p in levels.unpacked),
        bilevel_peak=bilevel.peak,
        flat_peak=None if bilevel.peak == bound else flat.peak,
        seconds=time.monotonic() - began,
        notes=tuple(dict.fromkeys(notes)),
    )


def _least(one: PlanSolution | None, other: PlanSolution) -> PlanSolution:
    return one if one is not None and one.peak <= other.peak else other
