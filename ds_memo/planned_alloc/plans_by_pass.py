"""Plans: what is known of each kind of pass, and the plan that is made of it.

Of requests     those of a pass that came twice alike
Of lines        two profiled kinds that differ in one length and ask for the same in the same order are as good as one that was
                profiled twice, and every size is a line through theirs. The plan for a third length is made from these lines at
                once (ds_memo/plan/rescale.py), so that a run whose batches have a new length each time is planned too. Requests
                below the op's limit are not seen, and each kind of tensor passes it at a length of its own: between two lengths
                that ask for the same all do; beyond them it is tried, up to where it was seen to be otherwise, for lengths that
                are closest to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_memo.config import PlanConfig
from ds_memo.ops.allocator import MIN_BYTES, NATIVE, Allocator
from ds_memo.plan import Plan, PlanError, plan_trace
from ds_memo.plan.rescale import Lines, fit_sizes, rescale
from ds_memo.plan.trace import UNIT
from ds_memo.planned_alloc.request_log import NEVER, Place, RequestLog
from ds_memo.shapes import Length, PassKind, length_between

_TROUBLE = 0.01
"""Share of a pass's requests that may miss before the pass counts as not fitting its plan."""
_PLANS_PER_KIND = 3
_KINDS = 64
_PATTERNS = 4
"""Kinds, those of the closest lengths, that the plan for another length may be made from."""
_MISFITS = 3
"""Plans made from those of other lengths that may fail, more than do not, until no more are made for a while."""
_PAUSE = 50
"""New kinds until one is made again: in a long run even a few misfits come together once."""
_numbers = itertools.count()
"""The op's keys of plans, of all models."""
_SPARE = 2 * UNIT
"""Bytes that sizes on those lines may be off by: padding inside a tensor to some multiple is no line."""


@dataclass
class Known:
    """What is known of one kind of pass."""

    number: int
    """The op's key of its plan."""
    before: RequestLog | None = None
    """Of the iteration before."""
    now: RequestLog | None = None
    """Of the present iteration, so far."""
    wrapping: set[Place] = field(default_factory=set)
    """Mallocs that wrapped around from one such pass to the next."""
    log: RequestLog | None = None
    """What was planned."""
    plan: Plan | None = None
    fresh: bool = False
    """It was planned from its own passes and not followed since: torch's cache has what they took."""
    plans: int = 0
    """Made of its own requests so far."""
    rescaled: tuple[Lines, int] | None = None
    """What the plan was made from, and for which length; None: from requests of this kind."""
    lines: dict[tuple[tuple[int, int], ...], Lines] = field(default_factory=dict)
    """By a length that stands in these places of the inputs; of a kind that plans for other lengths are made from."""
    trouble: int = 0
    """Passes in a row that did not fit."""

    @property
    def pattern(self) -> RequestLog | None:
        """What passes of this kind were seen to ask for."""
        return None if self.rescaled else self.log or self.before

    @property
    def may_be_planned(self) -> bool:
        """Once more: passes without a plan are worth a profile."""
        return self.plans < _PLANS_PER_KIND

    def forget_plan(self) -> None:
        self.before = self.now = self.log = self.plan = None
        self.lines.clear()
        self.rescaled = None
        self.trouble = 0

    def give_up(self) -> None:
        """It is left to torch's allocator for good."""
        self.forget_plan()
        self.plans = _PLANS_PER_KIND


class Plans:
    """Of one model's training passes, by their kind; in the op, too.

    Args:
        allocator: the op.
        device_type: whose requests it sees.
        warn: says something once and shows it in the report.
    """

    def __init__(self, allocator: Allocator, device_type: str, config: PlanConfig, warn: Callable[[str], None]) -> None:
        self.known: dict[PassKind, Known] = {}
        self._allocator = allocator
        self._least = MIN_BYTES[device_type]
        self._config = config
        self._warn = warn
        self._misfits = self._passed_over = 0

    def of(self, kind: PassKind) -> Known:
        """A kind that comes for the first time has a plan if those of other lengths give one."""
        known = self.known.get(kind)
        if known is not None:
            return known
        while len(self.known) >= _KINDS:  # first those that are made anew in no time
            oldest = next((kind for kind, known in self.known.items() if known.rescaled), next(iter(self.known)))
            self._allocator.forget_plan(self.known.pop(oldest).number)
        known = self.known[kind] = Known(next(_numbers))
        self._plan_from_others(kind, known)
        return known

    def iteration_ended(self) -> None:
        """Plan what has come twice alike."""
        for known in self.known.values():
            if known.now is None:
                continue
            if known.plan is None and known.before is not None and known.before.repeated_by(known.now):
                self._plan(known, known.now)
            known.before, known.now = known.now, None

    def judge(self, known: Known, counts: dict[str, int]) -> None:
        """A pass followed its plan to the end.

        Args:
            counts: of its requests, by what became of them.
        """
        misses = sum(counts[name] for name in ("overlap", "size", "abandoned", "end", "unplanned"))
        fits = misses <= _TROUBLE * (counts["hit"] + counts["native"] + misses)
        known.trouble = 0 if fits else known.trouble + 1
        if known.rescaled:
            lines, length = known.rescaled
            lines.learn(length, fits)
            self._misfits = max(0, self._misfits - 1) if fits else self._misfits + 1
            if not fits:  # the next pass of this kind is profiled
                self._drop(known)
                return
        if known.trouble < 2:
            return
        if not known.may_be_planned:
            self._warn(
                "memory requests differ from pass to pass (experts with uneven loads, work that depends on the data, tensors "
                "that are kept for later): those that do not fit the plan go to PyTorch's allocator; report()['plan'] counts them"
            )
            if misses < counts["hit"]:
                return
        self._drop(known)
        if not any(other.plan is not None or other.may_be_planned for other in self.known.values()):
            self._allocator.reserve(0)  # not before: whatever pins the arena would pin it beside the next one

    # ---- inside

    def _drop(self, known: Known) -> None:
        known.forget_plan()
        self._allocator.forget_plan(known.number)

    def _plan(self, known: Known, log: RequestLog) -> None:
        known.plans += 1
        # Where the first plan did not last, an address that is taken at the begin of a pass may have been in the way.
        wrapping = {p for p in known.wrapping if log.deaths[p[0]][p[1]] == NEVER} if known.plans == 1 else set()
        trace = log.trace(wrapping)
        if not trace.requests:
            return
        try:
            plan = plan_trace(trace, solver=self._config.solver, seconds=self._config.time_limit_s)
        except PlanError as error:
            self._warn(f"no plan of the memory addresses was found ({error}); PyTorch's allocator goes on")
            return
        self._adopt(known, log, plan)
        known.fresh = True

    def _plan_from_others(self, kind: PassKind, known: Known) -> None:
        """From two kinds with a pattern that differ from this one and from each other in one length only."""
        if self._misfits >= _MISFITS:
            self._passed_over += 1
            if self._passed_over < _PAUSE:
                return
            self._passed_over, self._misfits = 0, _MISFITS - 1
        patterns = (other for other, its in self.known.items() if its.pattern is not None)
        others = [(other, length) for other in patterns if (length := length_between(other, kind))]
        others = sorted(others, key=lambda other: abs(other[1].here - other[1].there))[:_PATTERNS]
        found = [(base, to, self._lines(base, to, others)) for base, to in others]
        sure = [(base, to, lines) for base, to, lines in found if lines and lines.hold_at(to.there)]
        tried = [(base, to, lines) for base, to, lines in found[:1] if lines and lines.may_hold_at(to.there, self._least)]
        if not (sure or tried):
            return
        base, to, lines = (sure or tried)[0]
        pattern = self.known[base]
        sizes = {name: size.at(to.there) + _SPARE // 2 for name, size in lines.sizes.items()}
        plan = rescale(pattern.plan, [sizes[slot.id] for slot in pattern.plan.slots])
        self._adopt(known, pattern.log.resized(sizes), plan, _SPARE)
        known.rescaled = lines, to.there

    def _lines(self, base: PassKind, to: Length, others: list[tuple[PassKind, Length]]) -> Lines | None:
        """Of a planned kind, every size by the length; None: no other kind asks for the same in the same order."""
        known = self.known[base]
        if to.dimensions in known.lines:
            return known.lines[to.dimensions]
        for other, _ in others:
            between = length_between(base, other)
            if between is None or between.dimensions != to.dimensions:
                continue
            traces = (known.pattern.trace(escapees=True), self.known[other].pattern.trace(escapees=True))
            try:
                sizes = fit_sizes(traces[0], between.here, traces[1], between.there)
            except PlanError:  # they do not ask for the same after all
                continue
            if known.plan is None:
                self._plan(known, known.pattern)
            if known.plan is None:
                return None
            lines = known.lines[to.dimensions] = Lines(sizes, *sorted((between.here, between.there)))
            return lines
        return None

    def _adopt(self, known: Known, log: RequestLog, plan: Plan, spare: int = 0) -> None:
        offsets = {slot.id: slot.offset for slot in plan.slots}
        self._allocator.load_plan(known.number, log.slots(offsets, NATIVE), spare)
        known.log, known.plan, known.trouble = log, plan, 0
