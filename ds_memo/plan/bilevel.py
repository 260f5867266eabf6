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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_memo.plan import verify
from ds_memo.plan.dsa import Buffer, Lifespan, Problem, lower_bound, peak, worst_moment
from ds_memo.plan.solver import Progress, Solution, solve
from ds_memo.plan.trace import UNIT, Tensor, Trace, rounded, varying_phases


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

    reports, solutions, inside = _level1(trace, planned, varying, solver, deadline, progress)
    notes = [n for s in solutions.values() for n in s.notes]
    bilevel, method, seen, block_bound, unpacked = _level2(planned, reports, inside, bound, solver, deadline, progress)
    notes += seen
    best = bilevel_peak = peak(buffers, bilevel)
    offsets, kind, flat_peak, proven_bound = bilevel, "bilevel", None, bound
    if bilevel_peak > bound:
        left_s = max(0.1, deadline - time.monotonic())
        flat = solve(problem, solver=solver, seconds=left_s, progress=progress)
        notes += flat.notes
        flat_peak, proven_bound = flat.peak, flat.bound
        if flat.peak < best:
            best, offsets, kind, method = flat.peak, flat.offsets, "flat", flat.method
    verify.require(buffers, offsets, peak=best, lower_bound=bound, alignment=UNIT)
    slots = tuple(
        Slot(t.id, t.birth_phase, t.k, t.birth, t.death, t.death_phase, t.size, o) for t, o in zip(planned, offsets, strict=True)
    )
    return Plan(
        slots, tuple(reports), best, bound, best == proven_bound, kind, method, block_bound,
        unpacked, bilevel_peak, flat_peak,
        time.monotonic() - began, tuple(left), tuple(dict.fromkeys([*trace.notes, *notes])),
    )  # fmt: skip


def _buffer(t: Tensor) -> Buffer:
    return Buffer(t.id, Lifespan(t.birth, t.death), rounded(t.size))


def _level1(trace, planned, varying, solver, deadline, progress):
    """Solves the transient tensors of each phase, once per shape. Times are relative to the phase."""
    inside: dict[int, list[int]] = defaultdict(list)  # phase -> its transient tensors, as indices into `planned`
    for i, t in enumerate(planned):
        if t.transient:
            inside[t.birth_phase].append(i)
    shapes: dict[tuple, int] = {}
    solutions: dict[int, Solution] = {}
    reports, members = [], {}
    for p, phase in enumerate(trace.phases):
        mine = [planned[i] for i in inside[p]]
        rows = tuple((t.birth - phase.first, t.death - phase.first, rounded(t.size)) for t in mine)
        shape = shapes.setdefault(rows, len(shapes))
        fresh = shape not in solutions
        if fresh:
            problem = Problem(tuple(Buffer(t.id, Lifespan(a, b), z) for t, (a, b, z) in zip(mine, rows, strict=True)))
            # A shape may use half of the time that is left; real layers need milliseconds.
            allowed = max(0.1, (deadline - time.monotonic()) / 2)
            solutions[shape] = solve(problem, solver=solver, seconds=allowed, progress=progress)
        s = solutions[shape]
        members[p] = (inside[p], s.offsets)
        reports.append(
            PhaseReport(
                phase.name, phase.first, phase.end, shape, len(mine), s.peak, s.lower_bound, s.proven, s.method,
                s.seconds if fresh else 0.0, p in varying,
            )
        )  # fmt: skip
    return reports, solutions, members


def _level2(planned, reports, inside, bound, solver, deadline, progress):
    """Plans pseudo blocks beside the tensors that outlive their phase; returns one offset per planned tensor."""
    blocks: dict[int, Buffer] = {}
    for p, (members, _) in inside.items():
        if members:
            alive = [planned[i] for i in members]
            span = Lifespan(min(t.birth for t in alive), max(t.death for t in alive))
            blocks[p] = Buffer(f"block {reports[p].name}", span, reports[p].peak)
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
            loose += inside[p][0]
            unpacked.append(p)
    left = deadline - time.monotonic()
    solution = solve(Problem(tuple(buffers)), solver=solver, seconds=max(0.1, left / 2), progress=progress)
    offsets = [0] * len(planned)
    for i, o in zip(loose, solution.offsets, strict=False):
        offsets[i] = o
    for p, base in zip(blocks, solution.offsets[len(loose) :], strict=True):
        for i, o in zip(*inside[p], strict=True):
            offsets[i] = base + o
    names = tuple(reports[p].name for p in sorted(unpacked))
    return offsets, f"level 2: {solution.method}", solution.notes, block_bound, names
