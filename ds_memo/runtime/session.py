"""Session: one model under ds_memo, from attach to detach. Users hold a MemoHandle; everything here is internal.

The session has the state and makes it in one stage. Passes (passes.py), optimizer steps (steps.py) and the report (report.py) are
functions of it.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_memo.autotune.drives import Drives
from ds_memo.autotune.kernel_seconds import PartClock
from ds_memo.autotune.policy import RESIDENTS, PlacementPolicy
from ds_memo.autotune.tuner import Tuner
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoError, MemoWarning
from ds_memo.hf.attention import catch_attention, keep_unobserved_attention, use_one_op
from ds_memo.layer_observer import LayerObserver
from ds_memo.logits.lazy_head import LazyHead
from ds_memo.memory.device import device_usage
from ds_memo.memory.host import budget_bytes, ranks_on_node
from ds_memo.nvme.file_home import FileHome
from ds_memo.nvme.open_files import open_files
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.remat import attention_kernels
from ds_memo.remat.diagnostics import within_compiled
from ds_memo.remat.gathered_params import tell_before_freeing
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_host import LayerHost
from ds_memo.remat.modes import inside_a_layer
from ds_memo.remat.remat import Remat
from ds_memo.runtime import active_forward, conflicts
from ds_memo.runtime.lazy_heads import LazyHeads
from ds_memo.runtime.module_patches import ModulePatches, Patched, nothing
from ds_memo.runtime.throughput import Speed
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_budget import promised_bytes, shared_pool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import memlock_binds
from ds_memo.swap.streams import streams_for
from ds_memo.tiles.tiling import Tiling
from ds_memo.units import GIB

_SIZE = re.compile(r"\b\d[\d,.]*(e[+-]\d+)?(?= (tokens|bytes|GiB)\b)")


@dataclass(frozen=True)
class EngineTies:
    """Ties of an engine to the session of its model. The defaults are a session's without an engine."""

    of_engine: bool = False
    """True: an engine attaches the model; else ds_memo.attach does."""
    agree_on_host: Callable[[int], int] = int
    """Returns the host budget of all ranks, in bytes, for that of this rank. All ranks call it together."""
    observers: tuple[LayerObserver, ...] = ()
    """Observers that are called before all others."""
    before_probe: Callable[[], None] = nothing
    """Called before a forward is probed."""
    gather_whole: Callable[[Sequence[nn.Module]], None] | None = None
    """Has ZeRO-3 gather each of these layers at once from now on, as tiles need it. All ranks call it together. None: it cannot
    be told."""
    gather_again: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    """Gathers a layer that ZeRO-3 holds in pieces inside another layer's backward. None: that cannot be done."""
    on_last_micro_batch: Callable[[], bool] | None = None
    """Returns True if an optimizer step follows the present micro-batch; None: steps may not be told of."""
    tell_what_moved: Callable[[Any], bool] | None = None
    """Called with the session after each step until it returns True. None: no line is printed."""


NO_ENGINE = EngineTies()


class Session:
    """A model under ds_memo. Made by attach_model.

    Args:
        model: kept alive by others.
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
        self.model = weakref.ref(model)
        self.config = config
        self.ties = ties
        self.warnings: list[str] = []
        self._warned: set[str] = set()
        self.patches = ModulePatches()
        """Changes of the model, and how they are undone."""
        self.heads: list[LazyHead] = []
        """Output heads that return lazy logits."""
        self.eager_attention: dict[str, str] = {}
        """How attention runs for which Transformers has an eager function alone, by class."""
        self.drives: Drives | None = None
        """None: host memory is all there is."""
        self.passes = self.tokens = 0
        """Training forwards that came to their end, and the tokens in them."""
        self.speed = Speed()
        self.tell_what_moved = ties.tell_what_moved
        """None: the line is printed already, or is not wanted."""
        self._detached = False
        self.layers = [Layer(index, name, module) for index, (name, module) in enumerate(layers)]
        self._by_module = weakref.WeakKeyDictionary(
            {module: layer for layer, (_, module) in zip(self.layers, layers, strict=True)}
        )
        self._entry = Patched(self._run, nothing, self._run_compiled)
        undo_with = self.patches.undo_with
        try:
            self.slab = self._make_slab(device)
            undo_with(self.slab.close)
            self.engine = self._make_engine(device)
            undo_with(self.engine.close)
            self.addresses = Addresses(device, config.plan, self.warn, steps_happen=ties.on_last_micro_batch is not None)
            undo_with(self.addresses.close)
            budget = self.drives.budget if self.drives else 0
            self.policy = PlacementPolicy(config, self.layers, self.slab.budget, self.warn, budget)
            self.tiling = Tiling(self.policy.tiles) if config.may_tile else None
            if self.tiling is not None:
                undo_with(self.tiling.close)
            attention_kernels.use(device, config.attention, self.warn, undo_with)
            self.clock, addresses = PartClock(self.engine.streams), self.addresses
            observers, kernel = (*ties.observers, addresses, self.clock), config.attention
            aside, part_begins, gather = addresses.aside, self.clock.part_begins, ties.gather_again
            host = LayerHost(self.engine, self.policy, self.warn, kernel, observers, aside, part_begins, gather)
            self.kernels_taken = host.attention_kernels
            self.remat = Remat(host, self.tiling)
            self.tuner = None if self.policy.fixed else self._make_tuner()
            self._patch(model, layers)
        except BaseException:
            self.patches.undo()
            raise

    def _make_slab(self, device: torch.device) -> HostSlab:
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
        return HostSlab(self.ties.agree_on_host(budget), pool)

    def _make_engine(self, device: torch.device) -> SwapEngine:
        streams = streams_for(device)
        if self.config.nvme is None:
            return SwapEngine(streams, self.slab, device)
        try:
            opened = open_files(self.config.nvme, device, streams, self.ties.agree_on_host, self.warn)
        except BaseException:
            streams.close()
            raise
        self.drives = Drives(self.config.nvme.max_tb_per_day, opened, self.slab.budget, device)
        return SwapEngine(streams, self.slab, device, FileHome(streams, self.slab, opened, self.warn))

    def _make_tuner(self) -> Tuner:
        ties, warn = self.ties, self.warn
        more = ties.before_probe, self.clock, ties.gather_whole
        return Tuner(self.config, self.remat, self.addresses, warn, ties.of_engine, *more, self.drives, self.heads)

    def _patch(self, model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
        patches = self.patches
        patches.activation_wrappers(model, [module for _, module in layers])
        for layer, (_, module) in zip(self.layers, layers, strict=True):
            patches.layer(module, functools.partial(self.remat.run, layer))
        if self.config.may_tile:
            catch_attention(patches.undo_with)
        patches.model(model, self.run)
        keep_unobserved_attention(patches.undo_with)
        if self.config.attention != "eager":
            use_one_op(model, self.eager_attention, self.warn, patches.undo_with)
        for name, module in layers[:1]:
            patches.before_forward(module, conflicts.MaskWatch(name, self.warn))
        if self.config.kernels.cross_entropy is None:
            usage, given = device_usage(self.engine.device), self.config.device_memory_gib
            device_bytes = int(given * GIB) if given else usage["total"] if usage else sys.maxsize
            make = functools.partial(LazyHead, device_bytes=device_bytes, warn=self.warn, keep_before_freeing=self._keep)
            lazy = LazyHeads(model, self.heads, patches, make)
            patches.before_forward(within_compiled(model), lazy.find)

    def _keep(self, head: nn.Module, keep: Callable[[], None]) -> bool:
        model = self.model()
        return model is not None and tell_before_freeing(model, head, keep, self.patches.undo_with)

    def warn(self, message: str) -> None:
        """Warn and show it in the report: once, also where sizes differ from those of an earlier one (another batch)."""
        if (wording := _SIZE.sub("", message)) not in self._warned:
            self._warned.add(wording)
            self.warnings.append(message)
            warnings.warn(message, MemoWarning, stacklevel=3)

    # ---- layers

    def run(self, fn: Callable[..., Any], /, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
        """Call ``fn(*args, **kwargs)`` as a layer."""
        return self._entry(fn, args, kwargs, preserve_rng_state)

    def _run(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve_rng_state: bool) -> Any:
        return self.remat.run_with(self._layer_of(fn), fn, args, kwargs, preserve_rng_state)

    def _run_compiled(
        self, callback: Any, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve_rng_state: bool
    ) -> Any:
        """Do the same where torch.compile was asked for the code that calls the layer."""
        forward, args, kwargs = self.patches.compilers.forward(callback, fn, args, kwargs)
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

    def modules(self) -> list[nn.Module]:
        """Return the layers' modules, in the order of the model."""
        return [module for layer in self.layers if (module := layer.module()) is not None]

    def hidden_shape(self) -> tuple[int, ...]:
        """Return the shape of what last came into the first layer that is in use, normally (b, s, h); (0,): not known."""
        if self.policy.pass_solution is not None:
            shape = self.policy.pass_solution.shape
            return (shape.batch, shape.length, *shape.rest)
        inputs = (kept for layer in self.layers if layer.latest for kept in layer.latest.inputs if kept)
        kept = next(inputs, None)
        return kept.shape if kept else (0,)

    # ---- the end

    def detach(self) -> None:
        """Give the model back as it was. Graphs made before can no longer be run backward."""
        if self._detached:
            raise MemoError("this handle is already detached; leave the second detach() out")
        if inside_a_layer():
            raise MemoError("detach() was called while a layer runs; call it between two steps")
        self._detached = True
        active_forward.ends(self)
        self.patches.undo()

    def refuse_detached(self) -> None:
        """Raise MemoError after ``detach()``."""
        if self._detached:
            raise MemoError("this handle is detached; there is nothing to report. Attach the model again.")


def module_of(fn: Any) -> nn.Module | None:
    """Return the module that a call of `fn` runs: itself, or that of a bound method, through any partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
