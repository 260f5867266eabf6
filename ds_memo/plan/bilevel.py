"""From a trace to a plan: the paper's two levels, and a flat plan beside them; the smaller one is kept.

Level 1 plans the transient tensors of one phase by themselves. Phases with the same requests have the same plan, so a
model of 32 equal layers costs two solutions: a forward and a backward. Level 2 plans the whole iteration with one
pseudo block per phase, as high as the phase's level-1 peak, beside all tensors that outlive their phase.

A pseudo block is as high during its whole phase as the phase's transients are at their worst moment, which need not
be the moment when most skeletal tensors are alive. Where that alone would raise the peak (the last layer's backward,
when every layer's skeletal tensors are still there), the block is *unpacked*: its transient tensors enter level 2
themselves.

Phases whose requests differ between iterations (MoE with uneven experts) cannot be planned: what is born there is
left to the general allocator, and the plan says so.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ds_memo.plan import verify
from ds_memo.plan.dsa import Buffer, Lifespan, Offset, Problem, lower_bound, peak, worst_moment
from ds_memo.plan.solver import Progress, Solution, solve
from ds_memo.plan.trace import UNIT, Tensor, Trace, rounded, varying_phases

Solved = Callable[[Problem, float], Solution]  # of a problem, in this share of the time that is left


class Slot(NamedTuple):
    """A planned address for the k-th request of a phase."""

    id: str
    phase: int
    k: int
    birth: int  # index of the malloc in the trace
    death: int  # index of the free
    death_phase: int
    requested: int  # bytes asked for; the slot has them rounded up to UNIT
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
class PhaseReport:
    """A phase and its level-1 solution; bytes, seconds."""

    name: str
    first: int
    end: int
    shape: int  # phases of the same number have the same transient tensors, solved once
    tensors: int  # transient ones
    peak: int
    lower_bound: int
    proven: bool
    method: str
    seconds: float  # 0 where the solution of an earlier phase of this shape was reused
    varying: bool = False


@dataclass(frozen=True)
class Plan:
    """An address for every planned tensor of an iteration. Bytes, seconds."""

    slots: tuple[Slot, ...]
    phases: tuple[PhaseReport, ...]
    peak: int  # the arena's size
    lower_bound: int  # most bytes alive at once
    proven: bool  # no plan is smaller
    kind: str  # "bilevel", "flat" or "rescaled"
    method: str
    block_bound: int  # level 2's lower bound with every pseudo block packed: the best that the paper's form could reach
    unpacked: tuple[str, ...]  # phases whose transient tensors were planned at level 2
    bilevel_peak: int
    flat_peak: int | None  # None where the bi-level plan was proven and no flat one was needed
    seconds: float
    left: tuple[tuple[str, int, str], ...] = field(default=())  # (id, bytes, why) of tensors left to the general allocator
    notes: tuple[str, ...] = field(default=())


def plan_trace(
    trace: Trace | Sequence[Trace],
    *,
    solver: str = "cbc",
    seconds: float = 60.0,
    min_bytes: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Plans one iteration.

    Args:
        trace: One iteration, or several of the same run: phases that differ between them are left out.
        solver: One of solver.SOLVERS.
        seconds: Time limit for everything, kept to about a second.
        min_bytes: Smaller tensors are left to the general allocator (its small pool serves them well).
        progress: See solver.solve.

    Raises:
        TracesDiffer: Several traces that are not iterations of one run.
        TooLarge: All sizes together reach 2^62 bytes.
    """
    began = time.monotonic()
    deadline = began + seconds
    iterations = [trace] if isinstance(trace, Trace) else list(trace)
    trace = iterations[0]
    varying = set(varying_phases(iterations))
    deaths = [{(t.birth_phase, t.k): t.death_phase for t in other.tensors()} for other in iterations[1:]]
    planned, left = [], []
    for t in trace.tensors():
        last = max([t.death_phase, *(there.get((t.birth_phase, t.k), 0) for there in deaths)])
        if t.birth_phase in varying:
            left.append((t.id, t.size, f"phase {trace.phases[t.birth_phase].name} varies between iterations"))
        elif t.size == 0:
            left.append((t.id, 0, "empty"))
        elif t.size < min_bytes:
            left.append((t.id, t.size, f"smaller than {min_bytes} bytes"))
        elif last in varying or last > t.death_phase:
            # Where in a varying phase it dies, or in another iteration, is not known: it is kept to the phase's end.
            planned.append(t._replace(death=trace.phases[last].end, death_phase=last))
        else:
            planned.append(t)
    problem = Problem(tuple(_buffer(t) for t in planned))
    buffers, bound = problem.buffers, lower_bound(problem.buffers)

    def solved(problem: Problem, share: float) -> Solution:
        """In a share of the time that is left."""
        left_s = max(0.1, share * (deadline - time.monotonic()))
        return solve(problem, solver=solver, seconds=left_s, progress=progress)

    phases, notes = _level1(trace, planned, solved)
    bilevel = _level2(planned, phases, bound, solved)
    notes += bilevel.notes
    best = bilevel_peak = peak(buffers, bilevel.offsets)
    offsets, kind, method, flat_peak, proven_bound = bilevel.offsets, "bilevel", bilevel.method, None, bound
    if bilevel_peak > bound:
        flat = solved(problem, 1.0)
        notes += flat.notes
        flat_peak, proven_bound = flat.peak, flat.bound
        if flat.peak < best:
            best, offsets, kind, method = flat.peak, flat.offsets, "flat", flat.method
    verify.require(buffers, offsets, peak=best, lower_bound=bound, alignment=UNIT)
    slots = tuple(
        Slot(t.id, t.birth_phase, t.k, t.birth, t.death, t.death_phase, t.size, o) for t, o in zip(planned, offsets, strict=True)
    )
    return Plan(
        slots=slots,
        phases=tuple(replace(phase.report, varying=p in varying) for p, phase in enumerate(phases)),
        peak=best,
        lower_bound=bound,
        proven=best == proven_bound,
        kind=kind,
        method=method,
        block_bound=bilevel.block_bound,
        unpacked=tuple(phases[p].report.name for p in sorted(bilevel.unpacked)),
        bilevel_peak=bilevel_peak,
        flat_peak=flat_peak,
        seconds=time.monotonic() - began,
        left=tuple(left),
        notes=tuple(dict.fromkeys([*trace.notes, *notes])),
    )


def _buffer(t: Tensor) -> Buffer:
    return Buffer(t.id, Lifespan(t.birth, t.death), rounded(t.size))


class _Phase(NamedTuple):
    """A phase with its level-1 plan."""

    report: PhaseReport
    inside: list[int]  # its transient tensors, as indices into the planned ones
    offsets: list[Offset]  # theirs, from the start of the phase's block


class _Level2(NamedTuple):
    offsets: list[Offset]  # of all planned tensors
    method: str
    notes: tuple[str, ...]
    block_bound: int  # see Plan
    unpacked: list[int]  # phases


def _level1(trace: Trace, planned: Sequence[Tensor], solved: Solved) -> tuple[list[_Phase], list[str]]:
    """Solves the transient tensors of each phase, once per shape. Times are relative to the phase."""
    inside: dict[int, list[int]] = defaultdict(list)
    for i, t in enumerate(planned):
        if t.transient:
            inside[t.birth_phase].append(i)
    shapes: dict[tuple, int] = {}
    solutions: list[Solution] = []  # by shape
    phases = []
    for p, phase in enumerate(trace.phases):
        mine = [planned[i] for i in inside[p]]
        rows = tuple((t.birth - phase.first, t.death - phase.first, rounded(t.size)) for t in mine)
        shape = shapes.setdefault(rows, len(shapes))
        fresh = shape == len(solutions)
        if fresh:
            problem = Problem.of((t.id, *row) for t, row in zip(mine, rows, strict=True))
            solutions.append(solved(problem, 0.5))  # real layers need milliseconds
        s = solutions[shape]
        report = PhaseReport(
            name=str(phase.name),
            first=phase.first,
            end=phase.end,
            shape=shape,
            tensors=len(mine),
            peak=s.peak,
            lower_bound=s.lower_bound,
            proven=s.proven,
            method=s.method,
            seconds=s.seconds if fresh else 0.0,
        )
        phases.append(_Phase(report, inside[p], s.offsets))
    return phases, [note for s in solutions for note in s.notes]


def _level2(planned: Sequence[Tensor], phases: Sequence[_Phase], bound: int, solved: Solved) -> _Level2:
    """Plans pseudo blocks beside the tensors that outlive their phase.

    Args:
        bound: the lower bound of all planned tensors. While blocks raise it, those at the worst moment are unpacked.
    """
    blocks: dict[int, Buffer] = {}
    for p, phase in enumerate(phases):
        if phase.inside:
            alive = [planned[i] for i in phase.inside]
            span = Lifespan(min(t.birth for t in alive), max(t.death for t in alive))
            blocks[p] = Buffer(f"block {phase.report.name}", span, phase.report.peak)
    loose = [i for i, t in enumerate(planned) if not t.transient]
    unpacked: list[int] = []
    block_bound = None
    while True:
        buffers = [_buffer(planned[i]) for i in loose] + list(blocks.values())
        when, most = worst_moment(buffers)
        block_bound = most if block_bound is None else block_bound
        guilty = [p for p, b in blocks.items() if b.lifespan.lower <= when < b.lifespan.upper]
        if most <= bound or not guilty:
            break
        for p in guilty:
            del blocks[p]
            loose += phases[p].inside
            unpacked.append(p)
    solution = solved(Problem(tuple(buffers)), 0.5)
    offsets = [0] * len(planned)
    for i, o in zip(loose, solution.offsets, strict=False):  # the blocks' come after them
        offsets[i] = o
    for p, base in zip(blocks, solution.offsets[len(loose) :], strict=True):
        for i, o in zip(phases[p].inside, phases[p].offsets, strict=True):
            offsets[i] = base + o
    return _Level2(offsets, f"level 2: {solution.method}", solution.notes, block_bound, unpacked)
