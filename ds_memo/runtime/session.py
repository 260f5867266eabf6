"""Session: one model under ds_memo. Puts the parts together, follows the model's passes and steps, and reports.

Users hold a MemoHandle (handle.py); everything here is internal.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_memo.autotune.drives import Drives
from ds_memo.autotune.policy import RESIDENTS, PlacementPolicy
from ds_memo.autotune.probe_forward import TrainingPass
from ds_memo.autotune.tuner import Tuner
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoError, MemoWarning
from ds_memo.hf.attention import catch_attention, keep_unobserved_attention
from ds_memo.layer_observer import LayerObserver
from ds_memo.memory.device import device_usage
from ds_memo.memory.host import budget_bytes, ranks_on_node
from ds_memo.nvme.home import FileHome
from ds_memo.nvme.open_files import open_files
from ds_memo.placement import PlacementKind, Tiles
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.profile.call import AsCalled, as_it_is
from ds_memo.remat.checkpoint import Layer, Remat
from ds_memo.remat.diagnostics import has_compiled, within_compiled
from ds_memo.remat.modes import inside_a_layer
from ds_memo.remat.undo import changed, stacks_restored
from ds_memo.runtime import active_forward, conflicts
from ds_memo.runtime import first_step_warnings as first_step
from ds_memo.runtime import report as account
from ds_memo.runtime.module_patches import ModulePatches, Patched, nothing
from ds_memo.runtime.optimizer_hooks import watch_optimizers
from ds_memo.runtime.throughput import Speed, model_flops_utilization
from ds_memo.shapes import shapes_of
from ds_memo.show.report import Report
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_budget import promised_bytes, shared_pool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import memlock_binds
from ds_memo.swap.streams import streams_for
from ds_memo.tiles.norms import TiledNorm, norms_beside
from ds_memo.tiles.tiling import Tiling
from ds_memo.units import GIB


def _never() -> bool:
    return False


_SIZE = re.compile(r"\b\d[\d,.]*(e[+-]\d+)?(?= (tokens|bytes|GiB)\b)")


def _as_it_is(nbytes: int) -> int:
    return nbytes


@dataclass(frozen=True)
class EngineTies:
    """What an engine brings to the session of its model. The defaults are a session's without an engine."""

    of_engine: bool = False
    """True: an engine attaches the model; else ds_memo.attach does."""
    agree_on_host: Callable[[int], int] = _as_it_is
    """Returns the host budget of all ranks, in bytes, for that of this rank. All ranks call it together."""
    observers: tuple[LayerObserver, ...] = ()
    """Told of layers before all others."""
    before_probe: Callable[[], None] = nothing
    """Called before a forward is probed."""
    gather_whole: Callable[[Sequence[nn.Module]], None] | None = None
    """Has ZeRO-3 gather each of these layers at once from now on, as tiles need it. All ranks call it together. None: it cannot
    be told."""
    on_last_micro_batch: Callable[[], bool] | None = None
    """Returns True if an optimizer step follows the present micro-batch; None: steps may not be told of."""
    tell_what_moved: Callable[[Session], bool] | None = None
    """Called after each step until it returns True. None: no line is printed."""


class Session:
    """A model under ds_memo, from attach to detach. Made by attach_model.

    Args:
        config: checked.
        layers: their names and modules, checked, in the order of the model.
        device: where they compute, with its index.
        ties: what an engine brings.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MemoConfig,
        layers: list[tuple[str, nn.Module]],
        device: torch.device,
        ties: EngineTies,
    ) -> None:
        if config.ablation == "full_swap":
            residents = RESIDENTS if config.resident_layers is None else config.resident_layers
            config = config.model_copy(update={"alpha": 1.0, "resident_layers": residents})
        self.config = config
        self.warnings: list[str] = []
        self._warned: set[str] = set()
        self._model = weakref.ref(model)
        self._detached = False
        self.of_engine = ties.of_engine
        self._on_last_micro_batch = ties.on_last_micro_batch or _never
        self._tell_what_moved = ties.tell_what_moved
        self._passes = 0
        """Training forwards that came to their end."""
        self._frames_before = 0
        self._drives: Drives | None = None
        """None: host memory is all there is."""
        self._as_called: AsCalled = as_it_is
        self._tiles_came = False
        """True from the first pass in tiles on."""
        self._speed = Speed()
        self._patches = ModulePatches()
        self._entry = Patched(self._run, nothing, self._run_compiled)
        try:
            self._put_together(model, layers, device, ties)
        except BaseException:
            self._patches.undo()
            raise

    def _put_together(
        self, model: nn.Module, layers: list[tuple[str, nn.Module]], device: torch.device, ties: EngineTies
    ) -> None:
        """Make the parts, then change the model. The undo list gives back what is taken, also where this raises."""
        config = self.config
        self.slab = self._make_slab(device, ties.agree_on_host)
        self._patches.undo_with(self.slab.close)
        self.engine = self._make_engine(device, ties.agree_on_host)
        self._patches.undo_with(self.engine.close)
        self.addresses = Addresses(device, config.plan, self.warn, steps_happen=ties.on_last_micro_batch is not None)
        self._patches.undo_with(self.addresses.close)
        self.layers = [Layer(index, name, module) for index, (name, module) in enumerate(layers)]
        self._by_module = weakref.WeakKeyDictionary(
            {module: layer for layer, (_, module) in zip(self.layers, layers, strict=True)}
        )
        self.policy = PlacementPolicy(
            config, self.layers, self.slab.budget, self.warn, self._drives.budget if self._drives else 0
        )
        self.tiling = Tiling(self.policy.tiles) if config.may_tile else None
        observers = (*ties.observers, self.addresses)
        self.remat = Remat(self.engine, self.policy, self.warn, config.attention, observers, self.tiling, self.addresses.aside)
        self.tuner = None
        if not self.policy.fixed:
            before = ties.before_probe, ties.gather_whole
            self.tuner = Tuner(config, self.remat, self.addresses, self.warn, ties.of_engine, *before, self._drives)
        for layer, (_, module) in zip(self.layers, layers, strict=True):
            self._patches.layer(module, functools.partial(self.remat.run, layer))
        if config.may_tile:
            catch_attention()
        self._patches.model(model, self.run)
        keep_unobserved_attention()
        for name, module in layers[:1]:
            self._patches.before_forward(module, conflicts.MaskWatch(name, self.warn))
        self._gather_whole = ties.gather_whole
        inner = within_compiled(model)  # dynamo is at work there, and not yet around it
        self._patches.before_forward(inner, self._forward_begins, self._compiled_forward_begins, self._between_layers)
        self._patches.after_forward(inner, self._forward_is_over, always=True, then=self._beyond_layers)
        self._patches.after_forward(inner, self._forward_ends)

    # ---- running

    def run(self, fn: Callable[..., Any], /, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
        """Call ``fn(*args, **kwargs)`` as a layer."""
        return self._entry(fn, args, kwargs, preserve_rng_state)

    def _run(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve_rng_state: bool) -> Any:
        return self.remat.run_with(self._layer_of(fn), fn, args, kwargs, preserve_rng_state)

    def _run_compiled(
        self, callback: Any, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve_rng_state: bool
    ) -> Any:
        """Do the same where torch.compile was asked for the code that calls the layer."""
        forward, args, kwargs = self._patches.compilers.forward(callback, fn, args, kwargs)
        return self.remat.run_with(self._layer_of(fn), forward, args, kwargs, preserve_rng_state)

    def _layer_of(self, fn: Callable[..., Any]) -> Layer:
        """Return the layer that a call of `fn` runs; one that was not seen before is new."""
        module = module_of(fn)
        if module is None:
            return Layer(len(self.layers), getattr(fn, "__qualname__", type(fn).__name__), None)
        layer = self._by_module.get(module)
        if layer is None:
            layer = self._by_module[module] = Layer(len(self.layers), type(module).__name__, module)
            self.layers.append(layer)
            self.policy.add_layer(layer)
        return layer

    def owns(self, module: nn.Module) -> bool:
        """Return True if a call of this module comes through memo by itself."""
        return module in self._by_module

    def warn(self, message: str) -> None:
        """Warn and show it in the report: once, also where sizes differ from those of an earlier one (another batch)."""
        if (wording := _SIZE.sub("", message)) not in self._warned:
            self._warned.add(wording)
            self.warnings.append(message)
            warnings.warn(message, MemoWarning, stacklevel=3)

    def _forward_begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        active_forward.begins(self)
        training = module.training and torch.is_grad_enabled()
        if training:
            self.slab.budget.pass_begins()
            self.engine.settle()
            self._patches.hold()
            if not self._passes and conflicts.is_offloaded():
                self.warn(conflicts.OFFLOADED)
            if self._gather_whole is not None and (
                self._as_called is not as_it_is or (not self._passes and has_compiled(module))
            ):
                self._gather_whole([layer.module() for layer in self.layers])  # hooks inside a layer cannot be traced
                self._gather_whole = None
            with stacks_restored():
                self._place(module, args, kwargs)
        if self.policy.tiles is not None and not self._tiles_came:
            self._tiles_come(module)
        if not training:
            self.addresses.leave_phase()
        elif self.policy.no_recompute:
            self.addresses.unplanned_pass_begins()
        elif self.addresses.install():  # not at attach: a model that is only evaluated (DPO's reference) leaves them to others
            placements = self.policy.placements_by_requests()
            self.addresses.pass_begins(shapes_of(args, kwargs), len(self.layers) - 1, self._on_last_micro_batch(), placements)
        self._frames_before = self.engine.traffic.frames

    def _compiled_forward_begins(self, callback: Any, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Do the same where torch.compile was asked for the whole model: its layers will be called under this callback."""
        with changed(self, "_as_called", functools.partial(self._patches.compilers.forward, callback)):
            self._forward_begins(module, args, kwargs)

    def _between_layers(self, callback: Any) -> Any:
        """Return what dynamo compiles the pieces of this pass with, if layers will break its graph into pieces."""
        training = self._model().training and torch.is_grad_enabled()
        return self._patches.compilers.between(callback) if training else callback

    def _beyond_layers(self, callback: Any) -> Any:
        return self._patches.compilers.beyond(callback)

    def _place(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Have the placements for the training pass that begins."""
        self.policy.follow(None)
        if self.tuner and self.policy.layers_known:
            calls = self.policy.in_flight
            calls.forward_begins()
            if self.tuner.profile is None and not self.tuner.gave_up:
                self.addresses.profile_begins()
            training_pass = TrainingPass(shapes_of(args, kwargs), model, args, kwargs, self._as_called)
            solution = self.tuner.solve(training_pass, self.layers, calls)
            self.policy.follow(solution)
            if solution is not None:
                self.slab.pool.lock_ahead(solution.host_blocks)

    def _tiles_come(self, model: nn.Module) -> None:
        """Have norms beside the layers run in tiles, too, and layers without gradients."""
        self._tiles_came = True
        for norm in norms_beside(model, [layer.name for layer in self.layers]):
            self._patches.forward(norm, TiledNorm(norm, self._tiles_now, self.warn))
        for layer in self.layers:
            if (module := layer.module()) is not None:
                self._patches.without_gradients(module, functools.partial(self.remat.run, layer))

    def _tiles_now(self) -> Tiles | None:
        return self.policy.tiles if torch.is_grad_enabled() or self.tiling is None else self.tiling.without_gradients

    def _forward_is_over(self, module: nn.Module, args: tuple, output: Any) -> None:
        active_forward.ends(self)
        self.slab.budget.forward_over()
        # Without an output this one raised; with one, its caller may be at work on an error of before.
        if output is None and module.training and isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            self.ran_out()

    def _forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self.policy.layers_known and not self.layers and self.engine.traffic.frames:
            self.warn(
                "ds_memo.checkpoint was called with functions of no module: such a call is not known again in the next pass, so "
                "alpha stays 0 and memo.alpha and memo.resident_layers count for nothing. Give it modules, or their bound methods"
            )
        if not self.policy.layers_known and self.layers:  # a model that calls ds_memo.checkpoint shows them as it runs
            self.policy.know_layers()
        if not (module.training and torch.is_grad_enabled()):
            return
        if self.policy.pass_solution:
            self.policy.in_flight.forward_ended(output)
        self.addresses.forward_ended()
        self._passes += 1
        if self.engine.traffic.frames > self._frames_before or self.policy.no_recompute:
            self._speed.tokens += math.prod(self._hidden_shape()[:-1])
        else:
            self.warn(
                f"{type(module).__name__} ran a training forward and none of its {len(self.layers)} layers came through ds_memo: "
                "it has no effect"
            )

    def ran_out(self) -> None:
        """The device refused memory that a training pass wanted: say what can be done."""
        seen = device_usage(self.engine.device)
        has = self.config.device_memory_gib or (seen["total"] / GIB if seen else None)
        less = f"of less than {has:.4g}" if has else "that is smaller"
        self.warn(
            "a training pass ran out of device memory: head, loss, kernels and gaps between blocks took more than was left to "
            f"them. A memo.device_memory_gib {less} leaves them more; where layers keep next to nothing already, shorter "
            "sequences help, or more ranks to a sequence"
        )

    # ---- optimizer steps

    def watch_optimizers(self) -> None:
        """Follow the steps of every torch optimizer that has a parameter of the model."""
        for end in watch_optimizers(self._model, self, Session.step_begins, Session.stepped):
            self._patches.undo_with(end)

    @contextmanager
    def reduction(self) -> Iterator[None]:
        """An engine reduces gradients behind the backward."""
        self.addresses.reduction_begins()
        try:
            yield
        finally:
            self.addresses.leave_phase()

    def step_begins(self) -> None:
        """An optimizer step begins."""
        self.addresses.step_begins()

    def stepped(self, applied: bool = True) -> None:
        """An optimizer step is over.

        Args:
            applied: it was none where gradients overflowed, and optimizer states may not exist yet.
        """
        self.addresses.step_ends()
        if self._speed.before_first_step:
            for message in self._said_of_first_step():
                self.warn(message)
        now = time.perf_counter()
        self._speed.stepped(now)
        if self._tell_what_moved is not None and self._tell_what_moved(self):
            self._tell_what_moved = None
        if self._drives and (message := self._drives.stepped(now)) is not None:
            self.warn(message)
        self.policy.in_flight.stepped()
        if self.tuner and applied:
            self.tuner.stepped(self._model(), self._passes, self.policy.in_flight.most.calls, now)

    def _said_of_first_step(self) -> Iterator[str]:
        solution, traffic = self.policy.pass_solution, self.engine.traffic
        if solution is None:
            if self.tuner:
                yield from first_step.not_solved(type(self._model()).__name__, traffic, self._passes)
            moves = self.config.ablation != "full_recompute"
            yield from first_step.no_effect(
                traffic, len(self.layers), len(self.policy.calls(PlacementKind.ON_DEVICE)) if moves else None
            )
        elif self.policy.in_flight.most.calls == 1:  # else the next pass is solved for more than this one
            yield from first_step.not_as_profiled(self.layers, solution)

    # ---- the end

    def on_detach(self, undo: Callable[[], Any], last: bool = False) -> None:
        """Call this too when the model is detached; `last`: after all else, for what was changed before."""
        self._patches.undo_with(undo, last)

    def detach(self) -> None:
        """Give the model back as it was. Graphs made before can no longer be run backward."""
        if self._detached:
            raise MemoError("this handle is already detached")
        if inside_a_layer():
            raise MemoError("detach() was called while a layer runs; call it between two steps")
        self._detached = True
        active_forward.ends(self)
        self._patches.undo()

    # ---- what is told

    def events(self, samples: int) -> list[tuple[str, float, int]]:
        """For DeepSpeed's monitors, after an optimizer step: name, value, and how many samples the run has seen."""
        return account.events(self.report(), samples)

    def report(self) -> Report:
        """Report what is set and what happened so far; bytes, seconds and counts of this rank.

        Raises:
            MemoError: after ``detach()``.
        """
        if self._detached:
            raise MemoError("this handle is detached; there is nothing to report. Attach the model again.")
        step_s, tokens_per_s = self._speed.medians()
        return account.report(
            self.layers,
            self.remat.work,
            self.engine,
            self.policy,
            self.slab,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            mfu=model_flops_utilization(self._model(), self._hidden_shape(), tokens_per_s, self.engine.device),
            tiles=self.tiling.report() if self.tiling else None,
            profile=self.tuner.report() if self.tuner else None,
            plan=self.addresses.report(),
            nvme=self._drives.report() if self._drives else None,
            warnings=list(self.warnings),
        )

    # ---- inside

    def _make_slab(self, device: torch.device, agree: Callable[[int], int]) -> HostSlab:
        given = self.config.host_memory_gib
        pool = shared_pool(given, device)
        promised, locked = promised_bytes(pool), pool.pinned and memlock_binds()
        budget = budget_bytes(given, ranks_on_node(), locked, promised, pool.size)
        if promised and given is None:
            self.warn(
                f"attached models of this process with a memo.host_memory_gib may still take {promised / GIB:.3g} GiB, and leave "
                f"{budget / GIB:.3g} GiB of host memory to this one. Give all the same, or none, and they share it. Of one that "
                "is done engine.destroy() gives it back (of a Trainer trainer.model_wrapped.destroy()), or handle.detach()"
            )
        return HostSlab(agree(budget), pool)

    def _make_engine(self, device: torch.device, agree: Callable[[int], int]) -> SwapEngine:
        streams = streams_for(device)
        if self.config.nvme is None:
            return SwapEngine(streams, self.slab, device)
        try:
            opened = open_files(self.config.nvme, device, streams, agree, self.warn)
        except BaseException:
            streams.close()
            raise
        self._drives = Drives(self.config.nvme.max_tb_per_day, opened, self.slab.budget, device)
        return SwapEngine(streams, self.slab, device, FileHome(streams, self.slab, opened, self.warn))

    def _hidden_shape(self) -> tuple[int, ...]:
        """Shape of what last came into the first layer that is in use, normally (b, s, h); empty if that is not known."""
        if self.policy.pass_solution is not None:
            shape = self.policy.pass_solution.shape
            return (shape.batch, shape.length, *shape.rest)
        inputs = (kept for layer in self.layers if layer.latest for kept in layer.latest.inputs if kept)
        kept = next(inputs, None)
        return kept.shape if kept else (0,)


def module_of(fn: Any) -> nn.Module | None:
    """The module that a call of `fn` runs: itself, or that of a bound method, through any partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
