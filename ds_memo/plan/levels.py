"""The paper's two levels. Level 1 plans the transient tensors of one phase by themselves, level 2 the whole iteration.

Phases with the same requests have the same level-1 plan, so a model of 32 equal layers costs two solutions: a forward
and a backward. Level 2 has all tensors that outlive their phase, and one pseudo block per phase, as high as the phase's
level-1 peak.

A pseudo block is that high during its whole phase, although transient and skeletal tensors may peak at different times.
If that would raise the overall peak, the block is *unpacked*: its transient tensors enter level 2 themselves. The last
layer's backward is such a phase, since every layer's skeletal tensors are still alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_memo.plan.dsa import Buffer, Lifespan, LiveUnits, Problem, columns, lower_bound, peak
from ds_memo.plan.solver import PlanSolution
from ds_memo.plan.trace import Tensor, Trace

Solved = Callable[[Problem, str, float, PlanSolution | None], PlanSolution]  # (problem, solver, deadline, start) -> solution


@dataclass(frozen=True)
class PhaseReport:
    """A phase and its level-1 solution. Bytes, seconds."""

    name: str
    first: int
    end: int
    shape: int  # phases of the same number have the same transient tensors, solved once
    tensors: int  # transient ones
    peak: int
    lower_bound: int
    proven: bool
    method: str
    seconds: float  # 0 if it reuses the solution of an earlier phase of this shape


def share(deadline: float, fraction: float) -> float:
    """Return the time at which this fraction of the time until `deadline` is over."""
    now = time.monotonic()
    return now + fraction * max(0.0, deadline - now)


class Levels:
    """Both levels of one trace. A second solve(), by another solver, goes on from the first one's solutions.

    Args:
        planned: The trace's tensors that get an address, in order of birth.
        problem: Their buffers.
    """

    def __init__(self, trace: Trace, planned: Sequence[Tensor], problem: Problem, solved: Solved):
        self.bound = lower_bound(problem.buffers)
        self.block_bound = 0  # level 2's lower bound with every pseudo block packed
        self.unpacked: list[int] = []  # phases
        self._trace, self._problem, self._solved = trace, problem, solved
        self._columns = columns(problem.buffers)
        self._loose = [i for i, t in enumerate(planned) if not t.transient]
        self._inside: list[list[int]] = [[] for _ in trace.phases]  # transient ones, by phase
        for i, t in enumerate(planned):
            if t.transient:
                self._inside[t.birth_phase].append(i)
        self._shapes: list[int] = []  # by phase
        self._problems: list[Problem] = []  # by shape
        self._number_shapes()
        self._solutions: list[PlanSolution | None] = [None] * len(self._problems)
        self._level2: tuple[Problem, PlanSolution] | None = None

    def _number_shapes(self) -> None:
        lower, upper, size = self._columns
        shapes: dict[bytes, int] = {}
        for phase, inside in zip(self._trace.phases, self._inside, strict=True):
            rows = np.stack((lower[inside] - phase.first, upper[inside] - phase.first, size[inside])).tobytes()
            self._shapes.append(shapes.setdefault(rows, len(shapes)))
            if len(shapes) > len(self._problems):
                self._problems.append(Problem(tuple(self._problem.buffers[i] for i in inside)))

    def of_one_phase(self, flat: PlanSolution) -> bool:
        """Return True if one phase has all tensors: `flat`, a plan of all, is its level-1 solution, too."""
        whole = next((k for k, part in enumerate(self._problems) if len(part) == len(self._problem)), None)
        if whole is not None:
            self._solutions[whole] = flat
        return whole is not None

    def solve(self, solver: str, deadline: float) -> PlanSolution:
        """Plan the whole iteration: level 1 in half of the time, level 2 in the rest. Each is swept at least."""
        began = time.monotonic()
        self._solve_shapes(solver, share(deadline, 0.5))
        problem, blocks, loose = self._pack()
        start = self._level2[1] if self._level2 and self._level2[0] == problem else None
        level2 = self._solved(problem, solver, deadline, start)
        self._level2 = problem, level2
        offsets = [0] * len(self._problem)
        for i, o in zip(loose, level2.offsets, strict=False):  # the blocks' come after them
            offsets[i] = o
        for p, base in zip(blocks, level2.offsets[len(loose) :], strict=True):
            for i, o in zip(self._inside[p], self._solution(p).offsets, strict=True):
                offsets[i] = base + o
        notes = [note for s in self._solutions if s for note in s.notes] + list(level2.notes)
        top = peak(self._problem.buffers, offsets)
        method = f"level 2: {level2.method}"
        seconds = time.monotonic() - began
        return PlanSolution(offsets, top, self.bound, self.bound, method, seconds, tuple(dict.fromkeys(notes)))

    def _solution(self, phase: int) -> PlanSolution:
        solution = self._solutions[self._shapes[phase]]
        assert solution is not None  # solve() has run
        return solution

    def _solve_shapes(self, solver: str, deadline: float) -> None:
        """Solve level 1 for every shape without a proof, each in its tensors' share of the time."""
        unproven = [k for k, s in enumerate(self._solutions) if s is None or not s.proven]
        tensors = sum(len(self._problems[k]) for k in unproven)
        for k in unproven:
            before, problem = self._solutions[k], self._problems[k]
            if before is not None and time.monotonic() > deadline:
                break
            s = self._solved(problem, solver, share(deadline, len(problem) / max(1, tensors)), before)
            tensors -= len(problem)
            self._solutions[k] = s if before is None else replace(s, seconds=before.seconds + s.seconds)

    def _pack(self) -> tuple[Problem, list[int], list[int]]:
        """Return level 2's problem, the phases that are blocks in it, and the tensors outside blocks, which come first."""
        lower, upper, size = self._columns
        filled = [p for p, inside in enumerate(self._inside) if inside]
        born = np.array([lower[self._inside[p]].min() for p in filled], np.int64)
        dead = np.array([upper[self._inside[p]].max() for p in filled], np.int64)
        height = np.array([self._solution(p).peak for p in filled], np.int64)
        # Phases follow each other, so no two blocks are alive together, and each is compared at its own worst moment.
        loose = np.array(self._loose, np.int64)
        skeletal = LiveUnits(lower[loose], upper[loose], size[loose])
        most = skeletal.most(born, dead) + height
        self.block_bound = int(max(most.max(initial=0), skeletal.alive.max(initial=0)))
        fits = most <= self.bound
        blocks = [p for p, packed in zip(filled, fits, strict=True) if packed]
        self.unpacked = [p for p, packed in zip(filled, fits, strict=True) if not packed]
        outside = self._loose + [i for p in self.unpacked for i in self._inside[p]]
        phases, rows = self._trace.phases, zip(born[fits].tolist(), dead[fits].tolist(), height[fits].tolist(), strict=True)
        packed = [Buffer(f"block {phases[p].name}", Lifespan(lo, up), h) for p, (lo, up, h) in zip(blocks, rows, strict=True)]
        return Problem((*(self._problem.buffers[i] for i in outside), *packed)), blocks, outside

    def reports(self) -> list[PhaseReport]:
        out, told = [], set()
        for p, phase in enumerate(self._trace.phases):
            s, shape = self._solution(p), self._shapes[p]
            seconds = 0.0 if shape in told else s.seconds
            told.add(shape)
            out.append(
                PhaseReport(
                    str(phase.name), phase.first, phase.end, shape, len(self._inside[p]),
                    s.peak, s.lower_bound, s.proven, s.method, seconds,
                )
            )  # fmt: skip
        return out
