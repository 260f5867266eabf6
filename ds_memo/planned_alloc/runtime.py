"""Addresses: profile the requests of a pass, have them planned (plans.py), give them their planned addresses from then on.

A *pass* is a training forward with everything until the next one; an *iteration* is the passes up to an optimizer step (one
pass, where there are no steps). Passes share a plan if the model's inputs have the same shapes and they have the same place in
the accumulation of gradients. Per such *kind* of pass:

    profiled ─► profiled with the same requests as in the iteration before ─► planned ─► followed
       ▲                                                                                   │
       └───────────────────── two passes in a row did not fit the plan ◄───────────────────┘

The third plan is the last: it is followed while it serves most requests, else the kind is left to torch's allocator. While a pass
is profiled, that one splits no large block: the memory is full, and what splitting loses would be missing.

Models on one device take turns, whatever threads run them: a pass of one ends that of another, and they share the arena.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import Variable

from ds_memo.config import PlanConfig
from ds_memo.memory.device import keep_blocks_whole
from ds_memo.ops.allocator import MISSES, Allocator, Request
from ds_memo.plan import Plan
from ds_memo.plan.phases import LayerPass, Part
from ds_memo.planned_alloc.non_layer_memory import NonLayerMemory, carry, non_layer_memory
from ds_memo.planned_alloc.plans_by_pass import Known, Plans
from ds_memo.planned_alloc.request_log import Place, RequestLog, read_log
from ds_memo.shapes import PassKind, Shapes
from ds_memo.units import GIB

NOT_PLANNED = "memory addresses are not planned: {}"
_PATIENCE = 4
"""Iterations without a plan in which torch's allocator keeps blocks whole: for requests that never repeat it would have to ask
for new ones each time."""

_claimed: weakref.WeakSet[Addresses] = weakref.WeakSet()
_turns: weakref.WeakValueDictionary[torch.device, Addresses] = weakref.WeakValueDictionary()
"""Whose pass runs on each device."""
_lock = threading.RLock()


def _forget_who_locked() -> None:
    """A thread that a child of fork does not have."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_who_locked)


def _turning(change: Callable[..., None]) -> Callable[..., None]:
    """What changes one of these two, and tells the op, does so in one thread at a time."""

    @functools.wraps(change)
    def locked(*args: Any, **kwargs: Any) -> None:
        with _lock:
            change(*args, **kwargs)

    return locked


@_turning
def _end(allocator: Allocator, device: torch.device, known: dict[PassKind, Known]) -> None:
    """The last one of a device leaves no arena, the last of a kind of device torch's allocator as it was."""
    for plan in known.values():
        allocator.forget_plan(plan.number)
    if not any(other._device == device for other in _claimed):
        allocator.reset()
    if not any(other._device.type == device.type for other in _claimed):
        allocator.uninstall()
        keep_blocks_whole(device, False)


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

    Nothing happens before claim(), and nothing at all where they are not to be planned, or cannot be.

    Args:
        device: where the layers run.
        config: the "plan" section.
        warn: says something once and shows it in the report.
        steps_happen: step_ends() is sure to be called; else the first call shows it.
    """

    def __init__(self, device: torch.device, config: PlanConfig, warn: Callable[[str], None], steps_happen: bool = False) -> None:
        self._warn = warn
        self._allocator = self._built(device) if config.enabled else None
        self.planned = self._allocator is not None
        """They are, or will be from the first training pass on."""
        self._device = device
        self._last_layer = -1
        self._plans = Plans(self._allocator, device.type, config, warn)
        self._kind: PassKind | None = None
        """Of the running pass."""
        self._waited = 0
        """Iterations that began without a plan since one that followed one."""
        self._good = False
        """Whether the running pass got to the end of its forward, and of its backward if it began one."""
        self._in_backward = False
        self._escaped: dict[int, Place] = {}
        """Blocks of the last profiled pass that outlived it."""
        self._escaped_from: PassKind | None = None
        self.steps_happen = steps_happen
        self._stepped = True
        self.claimed = False
        self._counts = dict.fromkeys(("hit", "gave_way", *MISSES), 0)
        """Of the passes that are over."""
        self._stats = self._counts
        """The op's when the running pass began."""
        self._events: list[Request] = []
        """Of the running pass, as far as they were looked at."""
        self._carried: dict[int, int] = {}
        """Bytes by id of blocks that logged passes left behind."""
        self._logged: tuple[PassKind | None, list[Request], dict[int, int]] = (None, [], {})
        """Of the last logged pass that got to its end: its events, and what passes before it had left behind."""

    def claim(self) -> bool:
        """Have the addresses planned from now on. Returns whether they are."""
        if self.planned and not self.claimed:
            try:
                self._claim()
            except RuntimeError as error:
                self.close()
                self.planned = False
                self._warn(NOT_PLANNED.format(error))
        return self.claimed

    def _built(self, device: torch.device) -> Allocator | None:
        try:
            return Allocator(device, self._warn)
        except RuntimeError as error:
            self._warn(NOT_PLANNED.format(error))
            return None

    def _claim(self) -> None:
        if self._device.type == "cuda":
            _make_workspaces(self._device)
            _let_backward_end_before_exit()
        with _lock:  # only now: a backward waits for autograd's thread, which may be in the middle of another model's end
            self._allocator.install()
            _claimed.add(self)
        self._end = weakref.finalize(self, _end, self._allocator, self._device, self._plans.known)
        self._end.atexit = False
        self.claimed = True

    # ---- what the run says

    @_turning
    def profile_begins(self) -> None:
        """Layers are about to be measured, before the first pass: what that leaves behind would be split. What other models have
        in the arena is free then, and is seen so."""
        if not self.planned:
            return
        if any(other._device == self._device for other in _claimed):
            self._end_turn()
            self._allocator.release()
        keep_blocks_whole(self._device, True)

    @_turning
    def pass_begins(self, shapes: Shapes, last_layer: int, last: bool, settings: Any = None) -> None:
        """A training forward begins; once claimed.

        Args:
            shapes: of its inputs.
            last_layer: number of the layer behind which the head begins.
            last: it is known to be the last micro-batch of an optimizer step.
            settings: what of each layer's setting the requests depend on.
        """
        first = self._next_pass()
        self._last_layer = last_layer
        self._kind = kind = PassKind(shapes, first, last, settings)
        known = self._plans.of(kind)
        if known.plan is not None:
            self._have_arena(known)
        if known.plan is not None:
            self._allocator.follow(known.number)
        elif known.may_be_planned:
            self._allocator.profile()
        self._waited = 0 if known.plan is not None else self._waited + first
        keep_blocks_whole(self._device, self._allocator.mode == "profile" and self._waited <= _PATIENCE)
        self._allocator.phase(Part.EMBED)

    @_turning
    def unplanned_pass_begins(self) -> None:
        """A training forward begins whose layers run as they are: torch's allocator serves it."""
        if self.claimed:
            self._next_pass()
            self._kind = None
        if self.planned:
            keep_blocks_whole(self._device, False)

    def forward_ended(self) -> None:
        self._good = True

    def layer_begins(self, layer: int) -> None:
        if self.claimed:
            self._allocator.phase(LayerPass(layer, False))

    def layer_ends(self, layer: int) -> None:
        if self.claimed and layer == self._last_layer:
            self._allocator.phase(Part.HEAD)

    def layer_replays(self, layer: int) -> None:
        if not self.claimed:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)
        self._allocator.phase(LayerPass(layer, True))

    def interrupted(self) -> None:
        self._good = False
        self.leave_phase()

    def reduction_begins(self) -> None:
        """Of gradients, by an engine, behind the backward; leave_phase() is called when it is over."""
        if self.claimed:
            self._allocator.phase(Part.REDUCE)

    def step_begins(self) -> None:
        if self.claimed:
            self._allocator.phase(Part.STEP)

    def step_ends(self) -> None:
        if self.claimed:
            self.steps_happen = self._stepped = True
            self._allocator.phase(None)

    def leave_phase(self) -> None:
        """What follows is none of the plan's business: an evaluation, say."""
        if self.claimed:
            self._allocator.phase(None)

    def non_layer_memory(
        self, hidden_bytes: int, forward: Mapping[int, int], backward: Mapping[int, int]
    ) -> NonLayerMemory | None:
        """The non-layer memory of the latest pass, or of the last one of its kind that was logged; None: none was. The first step
        may be long in coming: gradients accumulate, or overflow.

        Args:
            hidden_bytes: of the last layer's output.
            forward, backward: by the number of the layer, in the order of the forward: see non_layer_memory.py.
        """
        if not self._has_turn:
            return None
        kind, events, carried = self._logged
        if self._allocator.mode == "profile":
            self._events += self._allocator.requests()
            kind, events, carried = self._kind, self._events, self._carried
        if not events or kind != self._kind:
            return None
        return non_layer_memory(events, carried, hidden_bytes, forward, backward)

    # ---- what the user says

    def release_arena(self) -> int:
        """Give the arena back to torch's allocator until the next training forward; the bytes that it had."""
        return self._allocator.release() if self.claimed else 0

    def report(self) -> dict[str, Any] | None:
        """See Memo.report."""
        if not self.planned:
            return None
        plan, counts = self.plan, self._counts
        if self._has_turn:
            since = self._since()
            counts = {name: count + since[name] for name, count in counts.items()}
        return {
            "peak": plan.peak if plan else 0,
            "lower_bound": plan.lower_bound if plan else 0,
            "proven": plan.proven if plan else False,
            "arena": self.arena_bytes,
            "gave_way": counts["gave_way"],
            "plans": sum(known.plan is not None for known in self._plans.known.values()),
            "hits": counts["hit"],
            "misses": {name: counts[name] for name in MISSES},
        }

    @property
    def arena_bytes(self) -> int:
        """Of the device, what is set aside for planned addresses."""
        return self._allocator.arena_bytes if self.claimed else 0

    @property
    def plan(self) -> Plan | None:
        """What the running kind of pass follows."""
        known = self._plans.known.get(self._kind)
        return known.plan if known else None

    @property
    def log(self) -> RequestLog | None:
        """What was planned for it."""
        known = self._plans.known.get(self._kind)
        return known.log if known else None

    @_turning
    def close(self) -> None:
        """End planning. Blocks that are still alive stay valid."""
        if self.claimed:
            self._finish_pass()
            _claimed.discard(self)
            self.claimed = False  # layers that run after this are refused, but not before they have told their observers
            self._end()
        elif self.planned and not any(other._device.type == self._device.type for other in _claimed):
            keep_blocks_whole(self._device, False)

    # ---- inside

    def _backward_ended(self) -> None:
        self._in_backward = False
        self.leave_phase()

    def _next_pass(self) -> bool:
        """Whether the pass that begins is the first of an iteration."""
        self._end_turn()
        _turns[self._device] = self
        self._stats = self._allocator.stats()
        first = self._stepped or not self.steps_happen
        if first:
            self._stepped = False
            self._plans.iteration_ended()
        return first

    @property
    def _has_turn(self) -> bool:
        return _turns.get(self._device) is self

    def _end_turn(self) -> None:
        """Whoever has it."""
        if (running := _turns.get(self._device)) is not None:
            running._finish_pass()

    def _since(self) -> dict[str, int]:
        """What became of requests in the running pass."""
        now = self._allocator.stats()
        return {name: now[name] - self._stats[name] for name in self._counts}

    def _finish_pass(self) -> None:
        """Learn from the pass that is over."""
        if not self._has_turn:
            return
        del _turns[self._device]
        known = self._plans.known.get(self._kind)
        mode, complete = self._allocator.mode, self._good and not self._in_backward
        self._allocator.stop()
        self._good = self._in_backward = False
        counts = self._since()
        self._counts = {name: count + counts[name] for name, count in self._counts.items()}
        looked_at, self._events = self._events, []
        if mode == "profile":
            events = [*looked_at, *self._allocator.requests()]
            log, wrapping = read_log(events, self._escaped)
            if complete:
                self._logged = self._kind, events, dict(self._carried)
            carry(self._carried, events)
            if known is not None and complete:
                known.now = (known.now and known.now.merged(log)) or log
                known.wrapping = wrapping if self._escaped_from == self._kind else set()
            self._escaped_from = self._kind
        elif mode == "plan" and known is not None and complete:
            self._plans.judge(known, counts)

    def _have_arena(self, known: Known) -> None:
        """An arena that is large enough for the plan. A smaller one goes first, and what torch's cache holds of the profiling."""
        fits = self._allocator.arena_bytes >= known.plan.peak
        if fits and not known.fresh:
            return
        known.fresh = False
        if not fits:
            self._allocator.reserve(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if fits:
            return
        try:
            self._allocator.reserve(known.plan.peak)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            size = known.plan.peak / GIB
            known.give_up()
            self._warn(f"there is no room for an arena of {size:.3g} GiB ({error}); PyTorch's allocator goes on")
