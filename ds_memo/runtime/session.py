"""Session: one model under ds_memo, from attach to detach. Users hold a MemoHandle; everything here is internal."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_memo.config import MemoConfig
from ds_memo.errors import MemoError
from ds_memo.hf.attention import catch_attention, keep_unobserved_attention, use_one_op
from ds_memo.logits.lazy_head import LazyHead
from ds_memo.memory.device import device_usage
from ds_memo.remat.diagnostics import within_compiled
from ds_memo.remat.layer import Layer
from ds_memo.remat.modes import inside_a_layer
from ds_memo.runtime import active_forward, conflicts
from ds_memo.runtime.lazy_heads import LazyHeads
from ds_memo.runtime.module_patches import Patched, nothing
from ds_memo.runtime.parts import EngineTies, Parts
from ds_memo.runtime.passes import Passes
from ds_memo.runtime.report import report
from ds_memo.runtime.steps import Steps
from ds_memo.show.report_table import Report
from ds_memo.units import GIB


class Session(Parts):
    """A model under ds_memo. Made by attach_model; the arguments are those of Parts."""

    def __init__(
        self,
        model: nn.Module,
        config: MemoConfig,
        layers: list[tuple[str, nn.Module]],
        device: torch.device,
        ties: EngineTies,
    ) -> None:
        super().__init__(model, config, layers, device, ties)
        self.passes = Passes(self)
        self.steps = Steps(self, self.passes)
        self._detached = False
        self._entry = Patched(self._run, nothing, self._run_compiled)
        self._by_module = weakref.WeakKeyDictionary(
            {module: layer for layer, (_, module) in zip(self.layers, layers, strict=True)}
        )
        try:
            self._change(model, layers)
        except BaseException:
            self.patches.undo()
            raise

    def _change(self, model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
        for layer, (_, module) in zip(self.layers, layers, strict=True):
            self.patches.layer(module, functools.partial(self.remat.run, layer))
        if self.config.may_tile:
            catch_attention(self.patches.undo_with)
        self.patches.model(model, self.run)
        keep_unobserved_attention(self.patches.undo_with)
        if self.config.attention != "eager":
            use_one_op(model, self.eager_attention, self.warn, self.patches.undo_with)
        for name, module in layers[:1]:
            self.patches.before_forward(module, conflicts.MaskWatch(name, self.warn))
        if self.config.kernels.cross_entropy is None:
            self._make_logits_lazy(model)
        self.passes.follow(model)

    def _make_logits_lazy(self, model: nn.Module) -> None:
        usage, given = device_usage(self.engine.device), self.config.device_memory_gib
        device_bytes = int(given * GIB) if given else usage["total"] if usage else sys.maxsize
        lazy = LazyHeads(model, self.heads, self.patches, lambda head: LazyHead(head, device_bytes, self.warn))
        self.patches.before_forward(within_compiled(model), lazy.find)

    def heads_of_modules(self) -> list[nn.Module]:
        """Return the output heads with modules inside (LoRA's), which ZeRO-3 must gather at once: tiles call them."""
        return [module for head in self.heads if (module := head.module()) is not None and any(module.children())]

    # ---- layer calls

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

    # ---- the end

    def on_detach(self, undo: Callable[[], Any], last: bool = False) -> None:
        """Call this too when the model is detached; `last`: after all else, for what was changed before."""
        self.patches.undo_with(undo, last)

    def detach(self) -> None:
        """Give the model back as it was. Graphs made before can no longer be run backward."""
        if self._detached:
            raise MemoError("this handle is already detached; leave the second detach() out")
        if inside_a_layer():
            raise MemoError("detach() was called while a layer runs; call it between two steps")
        self._detached = True
        active_forward.ends(self)
        self.patches.undo()

    # ---- the report

    def report(self) -> Report:
        """Return what is set and what happened so far; bytes, seconds and counts of this rank.

        Raises:
            MemoError: after ``detach()``.
        """
        if self._detached:
            raise MemoError("this handle is detached; there is nothing to report. Attach the model again.")
        return report(self, self.steps.speed)


def module_of(fn: Any) -> nn.Module | None:
    """Return the module that a call of `fn` runs: itself, or that of a bound method, through any partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
