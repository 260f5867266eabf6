"""Addresses: profile the requests of a pass, plan them (plans_by_pass.py), then serve them from planned addresses.

A *pass* is a training forward with everything until the next one. An *iteration* is the passes up to an optimizer step, or one
pass in a loop without steps. Passes share a plan if their inputs have the same shapes and they stand at the same point of the
gradient accumulation. For each such *kind* of pass:

    profiled ─► profiled with the same requests as in the iteration before ─► planned ─► followed
       ▲                                                                                   │
       └───────────────────── two passes in a row did not fit the plan ◄───────────────────┘

The third plan is the last: a kind follows it while it serves most requests, and otherwise goes to torch's allocator. That
allocator splits no large block in a profiled pass: memory is full then, and splitting loses some of it.

Models on one device take turns, on any thread: a pass of one model ends that of another, and all share the arena.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import Variable

from ds_memo.config import PlanConfig
from ds_memo.memory.device import keep_blocks_whole
from ds_memo.ops.allocator import MISSES, Allocator, LogEvent
from ds_memo.plan import Plan
from ds_memo.plan.phases import LayerPass, PassPart
from ds_memo.planned_alloc.non_layer_memory import NonLayerMemory, carry, non_layer_memory
from ds_memo.planned_alloc.plans_by_pass import PassPlan, Plans
from ds_memo.planned_alloc.request_log import Position, RequestLog, read_log
from ds_memo.shapes import PassKind, Shapes
from ds_memo.units import GIB

NOT_PLANNED = "memory addresses are not planned: {}; PyTorch's allocator goes on"
_PATIENCE = 4
"""Iterations without a plan in which torch's allocator keeps blocks whole: requests that never repeat need new ones each time."""

_installed: weakref.WeakSet[Addresses] = weakref.WeakSet()
_turns: weakref.WeakValueDictionary[torch.device, Addresses] = weakref.WeakValueDictionary()
"""The model whose pass runs, by device."""
_lock = threading.RLock()


def _forget_who_locked() -> None:
    """Replace the lock in a child of fork: the thread that holds it does not exist there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_who_locked)


def _turning(change: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function that changes `_installed` or `_turns`: one thread at a time."""

    @functools.wraps(change)
    def locked(*args: Any, **kwargs: Any) -> None:
        with _lock:
            change(*args, **kwargs)

    return locked


@_turning
def _end(allocator: Allocator, device: torch.device, known: dict[PassKind, PassPlan]) -> None:
    """Forget the plans. The last model of a device also frees the arena; the last of a device type restores torch's allocator."""
    for plan in known.values():
        allocator.forget_plan(plan.number)
    if not any(other._device == device for other in _installed):
        allocator.reset()
    if not any(other._device.type == device.type for other in _installed):
        allocator.uninstall()
        keep_blocks_whole(device, False)


def _make_workspaces(device: torch.device) -> None:
    """Make cuBLAS's two workspaces of some 32 MiB, for this thread and for autograd's, before the first pass. cuBLAS keeps them:
    allocated among activations, each would pin a whole segment that the arena needs."""
    with torch.enable_grad():
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()


@functools.cache
def _let_backward_end_before_exit() -> None:
    """Wait 50 ms at exit. Autograd's thread frees the callbacks of a backward just after it has returned, and needs the
    interpreter for that. Otherwise a script whose last line is a training step aborts."""
    atexit.register(time.sleep, 0.05)


class Addresses:
    """The addresses of one model's training passes on one device.

    Nothing happens before install(), or if the config or a missing compiler rules planning out.

    Args:
        device: where the layers run.
        config: the "plan" section.
        warn: warns once and shows the text in the report.
        steps_happen: step_ends() is sure to be called; else the first call shows it.
    """

    def __init__(self, device: torch.device, config: PlanConfig, warn: Callable[[str], None], steps_happen: bool = False) -> None:
        self._warn = warn
        self.why_not_planned = ""
        """Why addresses are not planned that were to be."""
        self._allocator = self._built(device) if config.enabled else None
        self.planned = self._allocator is not None
        """True if addresses are planned, or will be from the first training pass on."""
        self._device = device
        self._last_layer = -1
        self._plans = Plans(self._allocator, device.type, config, warn)
        self._kind: PassKind | None = None
        """The running pass's kind."""
        self._waited = 0
        """Iterations of the run that began without a plan."""
        self._profiled = 0
        """Passes in which torch's allocator kept blocks whole for a plan to come."""
        self._good = False
        """True if the running pass got to the end of its forward, and of its backward if it began one."""
        self._in_backward = False
        self._escaped: dict[int, Position] = {}
        """Births, by id, of the blocks that outlived the last profiled pass."""
        self._escaped_from: PassKind | None = None
        self.steps_happen = steps_happen
        self._stepped = True
        self.installed = False
        self._counts = dict.fromkeys(("hit", "gave_way", *MISSES), 0)
        """Requests by outcome, in the passes that are over."""
        self._stats = self._counts
        """The op's counts when the running pass began."""
        self._events: list[LogEvent] = []
        """Events of the running pass that were read from the op so far."""
        self._carried: dict[int, int] = {}
        """Bytes by id of blocks that logged passes left behind."""
        self._logged: tuple[PassKind | None, list[LogEvent], dict[int, int]] = (None, [], {})
        """Kind and events of the last complete logged pass, and the bytes by id that earlier passes had left behind."""

    def install(self) -> bool:
        """Plan the addresses from now on. Returns True if that is possible."""
        if self.planned and not self.installed:
            try:
                self._install()
            except RuntimeError as error:
                self.stop_planning(str(error))
        return self.installed

    def stop_planning(self, why: str) -> None:
        """Leave all addresses to torch's allocator for good, and warn."""
        self.close()
        self.planned = False
        self.why_not_planned = why
        self._warn(NOT_PLANNED.format(why))

    def _built(self, device: torch.device) -> Allocator | None:
        try:
            return Allocator(device, self._warn)
        except RuntimeError as error:
            self.why_not_planned = str(error)
            self._warn(NOT_PLANNED.format(error))
            return None

    def _install(self) -> None:
        if self._device.type == "cuda":
            _make_workspaces(self._device)
            _let_backward_end_before_exit()
        with _lock:  # only now: a backward waits for autograd's thread, which may hold the lock to end another model
            self._allocator.install()
            _installed.add(self)
        self._finalizer = weakref.finalize(self, _end, self._allocator, self._device, self._plans.known)
        self._finalizer.atexit = False
        self.installed = True

    # ---- called by the run

    @_turning
    def profile_begins(self) -> None:
        """Keep blocks whole while layers are profiled before the first pass: otherwise its cached blocks are split. Also free the
        other models' arena, so that the profile counts it as free memory."""
        if not self.planned:
            return
        if any(other._device == self._device for other in _installed):
            self._end_turn()
            self._allocator.release()
        keep_blocks_whole(self._device, True)

    @_turning
    def pass_begins(self, shapes: Shapes, last_layer: int, last: bool, placements: Any = None) -> None:
        """Begin a training forward. Call install() first.

        Args:
            shapes: shapes and dtypes of the model's inputs.
            last_layer: number of the layer before the head.
            last: True if this is known to be the last micro-batch of an optimizer step.
            placements: the layers' placements, as far as requests depend on them.
        """
        first = self._next_pass()
        self._last_layer = last_layer
        self._kind = kind = PassKind(shapes, first, last, placements)
        known = self._plans.of(kind)
        if known.plan is not None:
            self._have_arena(known)
        if known.plan is not None:
            self._allocator.follow(known.number)
        elif known.may_be_planned:
            self._allocator.profile()
        self._waited += first and known.plan is None
        profiles = self._allocator.mode == "profile" and self._waited <= _PATIENCE
        self._profiled += profiles
        keep_blocks_whole(self._device, profiles)
        self._allocator.phase(PassPart.EMBED)

    @_turning
    def unplanned_pass_begins(self) -> None:
        """Begin a training forward that torch's allocator serves: its layers run without checkpointing."""
        if self.installed:
            self._next_pass()
            self._kind = None
        if self.planned:
            keep_blocks_whole(self._device, False)

    def forward_ended(self) -> None:
        self._good = True

    def aside(self) -> AbstractContextManager[None]:
        """Keep the requests inside out of the pass: it makes them once, and its like do not."""
        return self._allocator.aside() if self.installed else nullcontext()

    def layer_begins(self, layer: int) -> None:
        if self.installed:
            self._allocator.phase(LayerPass(layer, False))

    def layer_ends(self, layer: int) -> None:
        if self.installed and layer == self._last_layer:
            self._allocator.phase(PassPart.HEAD)

    def layer_replays(self, layer: int) -> None:
        if not self.installed:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ended)
        self._allocator.phase(LayerPass(layer, True))

    def interrupted(self) -> None:
        self._good = False
        self.leave_phase()

    def reduction_begins(self) -> None:
        """Begin the engine's reduction of gradients after the backward. The caller ends it with leave_phase()."""
        if self.installed:
            self._allocator.phase(PassPart.REDUCE)

    def step_begins(self) -> None:
        if self.installed:
            self._allocator.phase(PassPart.STEP)

    def step_ends(self) -> None:
        if self.installed:
            self.steps_happen = self._stepped = True
            self._allocator.phase(None)

    def leave_phase(self) -> None:
        """End the phase: what follows, such as an evaluation, is not planned."""
        if self.installed:
            self._allocator.phase(None)

    def non_layer_memory(
        self, hidden_bytes: int, forward: Mapping[int, int], backward: Mapping[int, int]
    ) -> NonLayerMemory | None:
        """Return the non-layer memory of the running pass, or of the last logged pass of its kind; None: none was logged. No step
        is needed: gradients may accumulate, or overflow.

        Args:
            hidden_bytes: bytes of the last layer's output.
            forward, backward: predicted bytes by layer, in the order of the forward: see non_layer_memory.py.
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

    # ---- called by the user

    def release_arena(self) -> int:
        """Free the arena until the next training forward. Returns its bytes."""
        return self._allocator.release() if self.installed else 0

    def report(self) -> dict[str, Any] | None:
        """Return the "plan" part of MemoHandle.report(); None if addresses are not planned."""
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
    def unsettled(self) -> int:
        """Passes that were profiled, and plans that were made, so far."""
        return self._profiled + self._plans.made

    @property
    def arena_bytes(self) -> int:
        """Device bytes set aside for planned addresses."""
        return self._allocator.arena_bytes if self.installed else 0

    @property
    def plan(self) -> Plan | None:
        """The plan of the running kind of pass."""
        known = self._plans.known.get(self._kind)
        return known.plan if known else None

    @property
    def log(self) -> RequestLog | None:
        """The log that this plan was made from."""
        known = self._plans.known.get(self._kind)
        return known.log if known else None

    @_turning
    def close(self) -> None:
        """End planning. Blocks that are still alive stay valid."""
        if self.installed:
            self._finish_pass()
            _installed.discard(self)
            self.installed = False  # layers that run after this are refused, but not before they have told their observers
            self._finalizer()
        elif self.planned and not any(other._device.type == self._device.type for other in _installed):
            keep_blocks_whole(self._device, False)

    # ---- inside

    def _backward_ended(self) -> None:
        self._in_backward = False
        self.leave_phase()

    def _next_pass(self) -> bool:
        """Begin a pass. Returns True if it is the first of an iteration."""
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
        """End the running pass on this device, of any model."""
        if (running := _turns.get(self._device)) is not None:
            running._finish_pass()

    def _since(self) -> dict[str, int]:
        """Return the running pass's requests, by outcome."""
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
        logged, self._events = self._events, []
        if mode == "profile":
            events = [*logged, *self._allocator.requests()]
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

    def _have_arena(self, known: PassPlan) -> None:
        """Make the arena large enough for the plan. Free a smaller arena first, and what torch's cache holds of such passes."""
        fresh, known.fresh = known.fresh, False
        if small := self._allocator.arena_bytes < known.plan.peak:
            self._allocator.reserve(0)
        if fresh and self._device.type == "cuda":  # else torch frees what it must; the next pass would ask for all of it again
            torch.cuda.empty_cache()
        if not small:
            return
        try:
            self._allocator.reserve(known.plan.peak)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            size = known.plan.peak / GIB
            known.give_up()
            self._warn(f"there is no room for an arena of {size:.3g} GiB ({error}); PyTorch's allocator goes on")
