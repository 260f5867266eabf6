"""Plans by kind of pass, and the logs that they are made from.

from requests    a kind is planned once two iterations in a row make the same requests
from lines       two profiled kinds differ in one length and make the same requests in the same order: every size is a line
                 through their two sizes. The plan for a third length comes from these lines at once (ds_memo/plan/rescale.py),
                 so a run with a new length in every batch is planned too.

The op does not log requests below its limit, and each kind of tensor crosses it at a length of its own. Between two lengths with
the same requests the lines hold. Beyond them they are tried for the closest lengths, up to the first length that did not fit.
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
from ds_memo.planned_alloc.request_log import NEVER, Position, RequestLog
from ds_memo.shapes import Length, PassKind, length_between

_TROUBLE = 0.01
"""Share of a pass's requests that may miss before the pass counts as not fitting its plan."""
_PLANS_PER_KIND = 3
_KINDS = 64
_PATTERNS = 4
"""Kinds of the closest lengths that a plan for another length may be made from."""
_MISFITS = 3
"""Failures among plans from other lengths, less the successes, at which such plans pause."""
_PAUSE = 50
"""New kinds in a pause: in a long run even rare failures coincide once."""
_numbers = itertools.count()
"""The op's keys of plans, of all models."""
_SPARE = 2 * UNIT
"""Bytes that a size may be off its line: a tensor that is padded to a multiple follows no line."""


@dataclass
class PassPlan:
    """The logs and the plan of one kind of pass."""

    number: int
    """The op's key of its plan."""
    before: RequestLog | None = None
    """The log of the iteration before."""
    now: RequestLog | None = None
    """The log of the present iteration, so far."""
    wrapping: set[Position] = field(default_factory=set)
    """Births of the blocks that wrapped around from one such pass to the next."""
    log: RequestLog | None = None
    """The log that was planned."""
    plan: Plan | None = None
    fresh: bool = False
    """True if it was planned from its own passes and not followed since: torch's cache still holds their memory."""
    plans: int = 0
    """Plans made from its own requests so far."""
    rescaled: tuple[Lines, int] | None = None
    """The lines and the length that the plan was made from; None: from requests of this kind."""
    lines: dict[tuple[tuple[int, int], ...], Lines] = field(default_factory=dict)
    """Lines for other lengths, by the dimensions of the inputs, as (tensor, dimension), that have the length."""
    trouble: int = 0
    """Passes in a row that did not fit the plan."""

    @property
    def pattern(self) -> RequestLog | None:
        """The logged requests of this kind."""
        return None if self.rescaled else self.log or self.before

    @property
    def may_be_planned(self) -> bool:
        """True if the kind may be profiled and planned once more."""
        return self.plans < _PLANS_PER_KIND

    def forget_plan(self) -> None:
        self.before = self.now = self.log = self.plan = None
        self.lines.clear()
        self.rescaled = None
        self.trouble = 0

    def give_up(self) -> None:
        """Leave the kind to torch's allocator for good."""
        self.forget_plan()
        self.plans = _PLANS_PER_KIND


class Plans:
    """The plans of one model's training passes, by kind. The op holds the same plans.

    Args:
        allocator: the op.
        device_type: "cpu" or "cuda".
        warn: warns once and shows the text in the report.
    """

    def __init__(self, allocator: Allocator, device_type: str, config: PlanConfig, warn: Callable[[str], None]) -> None:
        self.known: dict[PassKind, PassPlan] = {}
        self.made = 0
        """Plans that were solved for or rescaled so far."""
        self._allocator = allocator
        self._least = MIN_BYTES[device_type]
        self._config = config
        self._warn = warn
        self._misfits = self._passed_over = 0

    def of(self, kind: PassKind) -> PassPlan:
        """Return the entry of a kind. A new kind gets a plan at once if kinds of other lengths give one."""
        known = self.known.get(kind)
        if known is not None:
            return known
        while len(self.known) >= _KINDS:  # rescaled plans first: they are made again within milliseconds
            oldest = next((kind for kind, known in self.known.items() if known.rescaled), next(iter(self.known)))
            self._allocator.forget_plan(self.known.pop(oldest).number)
        known = self.known[kind] = PassPlan(next(_numbers))
        self._plan_from_others(kind, known)
        return known

    def iteration_ended(self) -> None:
        """Plan every kind whose last two iterations made the same requests."""
        for known in self.known.values():
            if known.now is None:
                continue
            if known.plan is None and known.before is not None and known.before.repeated_by(known.now):
                self._plan(known, known.now)
            known.before, known.now = known.now, None

    def judge(self, known: PassPlan, counts: dict[str, int]) -> None:
        """Keep or drop the plan of a pass that followed it to the end.

        Args:
            counts: the pass's requests, by outcome.
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
            self._allocator.reserve(0)  # not before: a block that pins this arena would keep it next to a new one

    # ---- inside

    def _drop(self, known: PassPlan) -> None:
        known.forget_plan()
        self._allocator.forget_plan(known.number)

    def _plan(self, known: PassPlan, log: RequestLog) -> None:
        known.plans += 1
        self.made += 1
        # A wrapping block holds its address from the begin of a pass. If the first plan did not last, that may be why.
        wrapping = {p for p in known.wrapping if log.deaths[p[0]][p[1]] == NEVER} if known.plans == 1 else set()
        trace = log.trace(wrapping)
        if not trace.requests:
            return
        try:
            plan = plan_trace(trace, solver=self._config.solver, seconds=self._config.time_limit_s, warn=self._warn)
        except PlanError as error:
            self._warn(f"no plan of the memory addresses was found ({error}); PyTorch's allocator goes on")
            return
        self._adopt(known, log, plan)
        known.fresh = True

    def _plan_from_others(self, kind: PassKind, known: PassPlan) -> None:
        """Plan a kind from two logged kinds that differ from it, and from each other, in one length only."""
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
        self.made += 1
        self._adopt(known, pattern.log.resized(sizes), plan, _SPARE)
        known.rescaled = lines, to.there

    def _lines(self, base: PassKind, to: Length, others: list[tuple[PassKind, Length]]) -> Lines | None:
        """Return every size of a kind as a line over the length, or None if no other kind makes the same requests."""
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
            except PlanError:  # they do not make the same requests
                continue
            if known.plan is None:
                self._plan(known, known.pattern)
            if known.plan is None:
                return None
            lines = known.lines[to.dimensions] = Lines(sizes, *sorted((between.here, between.there)))
            return lines
        return None

    def _adopt(self, known: PassPlan, log: RequestLog, plan: Plan, spare: int = 0) -> None:
        offsets = {slot.id: slot.offset for slot in plan.slots}
        self._allocator.load_plan(known.number, log.slots(offsets, NATIVE), spare)
        known.log, known.plan, known.trouble = log, plan, 0
