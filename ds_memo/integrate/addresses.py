"""Addresses: profile the requests of a pass, plan them, give them their planned addresses from then on.

A *pass* is a training forward with everything until the next one; an *iteration* is the passes up to an optimizer step (one
pass, where there are no steps). Passes share a plan if the model's inputs have the same shapes and they have the same place in
the accumulation of gradients. Per such *kind* of pass:

    profiled ─► profiled with the same requests as in the iteration before ─► planned ─► followed
       ▲                                                                                   │
       └───────────────────── two passes in a row did not fit the plan ◄───────────────────┘

The third plan is the last: it is followed while it serves most requests, else the kind is left to torch's allocator. While a pass
is profiled, that one splits no large block: the memory is full, and what splitting loses would be missing.

Lengths: two profiled kinds that differ in one length and ask for the same in the same order are as good as one that was profiled
twice, and every size is a line through theirs. The plan for a third length is made from these lines at once
(ds_memo/plan/rescale.py), so that a run whose batches have a new length each time is planned too. Requests below the op's limit
are not seen, and each kind of tensor passes it at a length of its own: between two lengths that ask for the same all do; beyond
them it is tried, up to where it was seen to be otherwise, for lengths that are closest to them.
"""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable

from ds_memo.config import PlanConfig
from ds_memo.errors import MemoError
from ds_memo.ops.allocator import MIN_BYTES, MISSES, NATIVE, Allocator, Request
from ds_memo.plan import Plan, PlanError, plan_trace
from ds_memo.plan.rescale import Lines, fit_sizes, rescale
from ds_memo.plan.trace import UNIT
from ds_memo.profile.device_memory import keep_blocks_whole
from ds_memo.profile.lengths import Length, PassKind, Shapes, length_between
from ds_memo.profile.requests import NEVER, Most, Place, RequestLog, most_in, read_log

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
_PATIENCE = 4
"""Iterations without a plan in which torch's allocator keeps blocks whole: for requests that never repeat it would have to ask
for new ones each time."""
_SPARE = 2 * UNIT
"""Bytes that sizes on those lines may be off by: padding inside a tensor to some multiple is no line."""

_owners: weakref.WeakValueDictionary[tuple[str, int], Addresses] = weakref.WeakValueDictionary()


@dataclass
class _Known:
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
    plans: int = 0
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

    def forget_plan(self) -> None:
        self.before = self.now = self.log = self.plan = None
        self.lines.clear()
        self.rescaled = None
        self.trouble = 0


def _end(allocator: Allocator, place: tuple[str, int]) -> None:
    """The last one of a kind of device leaves torch's allocator as it was."""
    allocator.reset()
    if not any(kind == place[0] for kind, _ in _owners):
        allocator.uninstall()
        keep_blocks_whole(torch.device(*place), False)


def _make_workspaces(device: torch.device) -> None:
    """cuBLAS has one of some 32 MiB for this thread and one for autograd's, and keeps them: born among the activations of the
    first pass, each would hold back a whole segment that the arena should get."""
    with torch.enable_grad():
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()


@functools.cache
def _let_backward_end_before_exit() -> None:
    """Autograd's thread lets go of the callbacks of a backward a moment after that has returned, and needs the interpreter for
    it. A script whose last line is a training step would be gone by then, and the process abort."""
    atexit.register(time.sleep, 0.05)


class Addresses:
    """The addresses of one model's training passes on one device.

    Nothing happens before claim().

    Args:
        device: where the layers run.
        config: the "plan" section.
        warn: says something once and shows it in the report.

    Raises:
        RuntimeError: the op cannot be built here; says why.
    """

    def __init__(self, device: torch.device, config: PlanConfig, warn: Callable[[str], None]) -> None:
        self._config = config
        self._warn = warn
        self._allocator = Allocator(device)
        self._place = (device.type, device.index or 0)
        self._device = device
        self._last_layer = -1
        self._known: dict[PassKind, _Known] = {}
        self._kind: PassKind | None = None
        """Of the running pass."""
        self._numbers = 0
        self._misfits = self._passed_over = 0
        self._waited = 0
        """Iterations that began without a plan since one that followed one."""
        self._good = False
        """Whether the running pass got to the end of its forward, and of its backward if it began one."""
        self._in_backward = False
        self._escaped: dict[int, Place] = {}
        """Blocks of the last profiled pass that outlived it."""
        self._escaped_from: PassKind | None = None
        self.steps_happen = False
        """Whether step_ends() is called; not known before the first time, unless somebody who knows sets it."""
        self._stepped = True
        self.claimed = False
        self._stats = self._at_start = dict.fromkeys(("hit", "gave_way", *MISSES), 0)
        self._events: list[Request] = []
        """Of the running pass, as far as they were looked at."""

    def claim(self) -> None:
        """Have the device's addresses planned by this one from now on.

        Raises:
            MemoError: another model's are.
            RuntimeError: the op cannot be installed here; says why.
        """
        if self._place in _owners:
            raise MemoError(f"another attached model has those on {self._device} planned, and one allocator follows one plan")
        if self._device.type == "cuda":
            _make_workspaces(self._device)
            _let_backward_end_before_exit()
        self._allocator.install()
        _owners[self._place] = self
        self._end = weakref.finalize(self, _end, self._allocator, self._place)
        self._end.atexit = False
        self._stats = self._at_start = self._allocator.stats()
        self.claimed = True

    # ---- what the run says; once claimed

    def pass_begins(self, shapes: Shapes, last_layer: int, last: bool, settings: Any = None) -> None:
        """A training forward begins.

        Args:
            shapes: of its inputs.
            last_layer: number of the layer behind which the head begins.
            last: it is known to be the last micro-batch of an optimizer step.
            settings: what of each layer's setting the requests depend on.
        """
        first = self._next_pass()
        self._last_layer = last_layer
        self._kind = kind = PassKind(shapes, first, last, settings)
        known = self._known.get(kind) or self._new(kind)
        if known.plan is not None:
            self._have_arena(known)
        if known.plan is not None:
            self._allocator.follow(known.number)
        elif known.plans < _PLANS_PER_KIND:
            self._allocator.profile()
        self._waited = 0 if known.plan is not None else self._waited + first
        keep_blocks_whole(self._device, self._allocator.mode == "profile" and self._waited <= _PATIENCE)
        self._allocator.phase("embed")

    def plain_pass_begins(self) -> None:
        """A training forward begins whose layers run as they are: torch's allocator serves it."""
        self._next_pass()
        self._kind = None
        keep_blocks_whole(self._device, False)

    def forward_ended(self) -> None:
        self._good = True

    def layer_begins(self, layer: int) -> None:
        self._allocator.phase(f"L{layer}.f")

    def layer_ends(self, layer: int) -> None:
        if layer == self._last_layer:
            self._allocator.phase("head")

    def layer_replays(self, layer: int) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)
        self._allocator.phase(f"L{layer}.b")

    def interrupted(self) -> None:
        self._good = False
        self.leave_phase()

    def step_begins(self) -> None:
        self._allocator.phase("step")

    def step_ends(self) -> None:
        self.steps_happen = self._stepped = True
        self.leave_phase()

    def leave_phase(self) -> None:
        """What follows is none of the plan's business: an evaluation, say."""
        self._allocator.phase(None)

    def head_bytes(self, hidden_bytes: int) -> Most | None:
        """What head and loss held in the latest pass beside the layers; None: that was not logged.

        Args:
            hidden_bytes: of the last layer's output.
        """
        if self._allocator.mode != "profile":
            return None
        self._events += self._allocator.requests()
        return most_in("head", self._events, hidden_bytes)

    # ---- what the user says

    def release_arena(self) -> int:
        """Give the arena back to torch's allocator until the next training forward; the bytes that it had."""
        return self._allocator.release() if self.claimed else 0

    def report(self) -> dict[str, Any]:
        """See Memo.report."""
        plan = self.plan
        now = self._allocator.stats() if self.claimed else self._at_start
        counts = {name: count - self._at_start[name] for name, count in now.items()}
        return {
            "peak": plan.peak if plan else 0,
            "lower_bound": plan.lower_bound if plan else 0,
            "proven": plan.proven if plan else False,
            "arena": self._allocator.arena_bytes if self.claimed else 0,
            "gave_way": counts["gave_way"],
            "plans": sum(known.plan is not None for known in self._known.values()),
            "hits": counts["hit"],
            "misses": {name: counts[name] for name in MISSES},
        }

    @property
    def plan(self) -> Plan | None:
        """What the running kind of pass follows."""
        known = self._known.get(self._kind)
        return known.plan if known else None

    @property
    def log(self) -> RequestLog | None:
        """What was planned for it."""
        known = self._known.get(self._kind)
        return known.log if known else None

    def close(self) -> None:
        """End planning. Blocks that are still alive stay valid."""
        if self.claimed:
            _owners.pop(self._place, None)
            self._end()

    # ---- inside

    def _backward_ended(self) -> None:
        self._in_backward = False
        self.leave_phase()

    def _new(self, kind: PassKind) -> _Known:
        while len(self._known) >= _KINDS:  # first those that are made anew in no time
            oldest = next((kind for kind, known in self._known.items() if known.rescaled), next(iter(self._known)))
            self._allocator.forget_plan(self._known.pop(oldest).number)
        known = self._known[kind] = _Known(self._numbers)
        self._numbers += 1
        self._plan_from_others(kind, known)
        return known

    def _next_pass(self) -> bool:
        """Whether the pass that begins is the first of an iteration."""
        self._finish_pass()
        first = self._stepped or not self.steps_happen
        if first:
            self._finish_iteration()
        return first

    def _finish_pass(self) -> None:
        """Learn from the pass that is over."""
        known = self._known.get(self._kind)
        mode, complete = self._allocator.mode, self._good and not self._in_backward
        self._allocator.stop()
        self._good = self._in_backward = False
        before, self._stats = self._stats, self._allocator.stats()
        looked_at, self._events = self._events, []
        if mode == "profile":
            log, wrapping = read_log([*looked_at, *self._allocator.requests()], self._escaped)
            if known is not None and complete:
                known.now = (known.now and known.now.merged(log)) or log
                known.wrapping = wrapping if self._escaped_from == self._kind else set()
            self._escaped_from = self._kind
        elif mode == "plan" and known is not None and complete:
            self._judge(known, {name: self._stats[name] - before[name] for name in self._stats})

    def _finish_iteration(self) -> None:
        self._stepped = False
        for known in self._known.values():
            if known.now is None:
                continue
            if known.plan is None and known.before is not None and known.before.repeated_by(known.now):
                self._plan(known, known.now)
            known.before, known.now = known.now, None

    def _judge(self, known: _Known, counts: dict[str, int]) -> None:
        misses = sum(counts[name] for name in ("overlap", "size", "abandoned", "end", "unplanned"))
        fits = misses <= _TROUBLE * (counts["hit"] + counts["native"] + misses)
        known.trouble = 0 if fits else known.trouble + 1
        if known.rescaled:
            lines, length = known.rescaled
            lines.learn(length, fits)
            self._misfits = max(0, self._misfits - 1) if fits else self._misfits + 1
            if not fits:  # the next pass of this kind is profiled
                self._drop_plan(known)
                return
        if known.trouble < 2:
            return
        if known.plans >= _PLANS_PER_KIND:
            self._warn(
                "memory requests differ from pass to pass (experts with uneven loads, work that depends on the data, tensors "
                "that are kept for later): those that do not fit the plan go to PyTorch's allocator; report()['plan'] counts them"
            )
            if misses < counts["hit"]:
                return
        self._drop_plan(known)
        if not any(other.plan is not None or other.plans < _PLANS_PER_KIND for other in self._known.values()):
            self._allocator.reserve(0)  # not before: whatever pins the arena would pin it beside the next one

    def _drop_plan(self, known: _Known) -> None:
        known.forget_plan()
        self._allocator.forget_plan(known.number)

    def _plan(self, known: _Known, log: RequestLog) -> None:
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

    def _plan_from_others(self, kind: PassKind, known: _Known) -> None:
        """From two kinds with a pattern that differ from this one and from each other in one length only."""
        if self._misfits >= _MISFITS:
            self._passed_over += 1
            if self._passed_over < _PAUSE:
                return
            self._passed_over, self._misfits = 0, _MISFITS - 1
        others = [(other, length) for other in self._known if (length := self._length_to(other, kind))]
        others = sorted(others, key=lambda other: abs(other[1].here - other[1].there))[:_PATTERNS]
        found = [(base, to, self._lines(base, to, others)) for base, to in others]
        sure = [(base, to, lines) for base, to, lines in found if lines and lines.hold_at(to.there)]
        least = MIN_BYTES[self._device.type]
        tried = [(base, to, lines) for base, to, lines in found[:1] if lines and lines.may_hold_at(to.there, least)]
        for base, to, lines in (sure + tried)[:1]:
            base_known = self._known[base]
            sizes = {name: size.at(to.there) + _SPARE // 2 for name, size in lines.sizes.items()}
            plan = rescale(base_known.plan, [sizes[slot.id] for slot in base_known.plan.slots])
            self._adopt(known, base_known.log.resized(sizes), plan, _SPARE)
            known.rescaled = lines, to.there

    def _lines(self, base: PassKind, to: Length, others: list[tuple[PassKind, Length]]) -> Lines | None:
        """Of a planned kind, every size by the length; None: no other kind asks for the same in the same order."""
        known = self._known[base]
        if to.places in known.lines:
            return known.lines[to.places]
        for other, _ in others:
            between = length_between(base, other)
            if between is None or between.places != to.places:
                continue
            traces = (known.pattern.trace(escapees=True), self._known[other].pattern.trace(escapees=True))
            try:
                sizes = fit_sizes(traces[0], between.here, traces[1], between.there)
            except PlanError:  # they do not ask for the same after all
                continue
            if known.plan is None:
                self._plan(known, known.pattern)
            if known.plan is None:
                return None
            lines = known.lines[to.places] = Lines(sizes, *sorted((between.here, between.there)))
            return lines
        return None

    def _length_to(self, other: PassKind, kind: PassKind) -> Length | None:
        return length_between(other, kind) if self._known[other].pattern is not None else None

    def _adopt(self, known: _Known, log: RequestLog, plan: Plan, spare: int = 0) -> None:
        offsets = {slot.id: slot.offset for slot in plan.slots}
        self._allocator.load_plan(known.number, log.slots(offsets, NATIVE), spare)
        known.log, known.plan, known.trouble = log, plan, 0

    def _have_arena(self, known: _Known) -> None:
        """An arena that is large enough for the plan. The old one goes first, and what torch's cache holds of the profiling."""
        if self._allocator.arena_bytes >= known.plan.peak:
            return
        self._allocator.reserve(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._allocator.reserve(known.plan.peak)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            size = known.plan.peak / (1 << 30)
            known.forget_plan()
            known.plans = _PLANS_PER_KIND
            self._warn(f"there is no room for an arena of {size:.3g} GiB ({error}); PyTorch's allocator goes on")
