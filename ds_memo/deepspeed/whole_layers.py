"""Layers that ZeRO-3 gathers whole, from a pass on: one hook each, which gathers all of a layer's parameters at once.

ZeRO-3 gathers by hooks of modules. A layer in tiles runs its modules for every tile: hooks inside it would gather its parameters
as often, and find aliases in their place. DeepSpeed's leaf modules have no hooks inside, but are marked before the engine is
made, when it is not known yet whether a layer will run in tiles. DeepSpeed reads the mark whenever it gathers: a layer that is
marked later, and whose inner hooks are taken away, is gathered like a leaf module.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES
from deepspeed.utils import set_z3_leaf_module, z3_leaf_module
from torch import nn

from ds_memo.distributed.topology import is_zeros

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Hooks by which ZeRO-3 gathers and releases, and those that bring it into the backward."""


class WholeLayers:
    """Has an engine's ZeRO-3 gather layers whole, and undoes that."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine = weakref.ref(engine)
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._undo: list[Callable[[], Any]] = []

    def gather(self, layers: Sequence[nn.Module]) -> None:
        """Have each layer, or output head, gathered whole from now on. All ranks call this before the same pass, with the same.

        Layers with leaf modules inside (DeepSpeed marks blocks of experts) stay as they are: these reduce their own gradients.
        """
        before = len(self._undo)
        for layer in layers:
            if layer in self._done or any(map(z3_leaf_module, layer.modules())):
                continue
            self._done.add(layer)
            inside = [vars(part)[name] for part in layer.modules() if part is not layer for name in _HOOKS]
            if not any([self._take(hooks) for hooks in inside]):
                continue  # it is not ZeRO-3, or not this engine's
            set_z3_leaf_module(layer, True)
            self._undo.append(functools.partial(_unmark, weakref.ref(layer)))
        if len(self._undo) > before:
            forget_order(self._engine())

    def undo(self) -> None:
        """Have layers gathered module by module again."""
        if self._undo:
            forget_order(self._engine())
        while self._undo:
            self._undo.pop()()

    def _take(self, table: dict[int, Any]) -> bool:
        """Take ZeRO-3's hooks out of a table of hooks. Return True if there are any."""
        taken = {key: hook for key, hook in table.items() if is_zeros(hook)}
        for key in taken:
            del table[key]
        if taken:
            self._undo.append(functools.partial(table.update, taken))
        return bool(taken)


def mark_around_leaf_modules(layers: Sequence[nn.Module]) -> None:
    """Mark layers in which DeepSpeed will mark blocks of experts, before the engine is made: the outermost mark counts.

    DeepSpeed reduces the gradients of a marked module by a hook that fails where no input of it needs a gradient (frozen
    embeddings). So no other layer is marked.
    """
    for layer in layers:
        names = {name for cls in map(type, layer.modules()) for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}
        if names & set(DEFAULT_LEAF_MODULE_CLASSES) or any(map(z3_leaf_module, layer.modules())):
            set_z3_leaf_module(layer, True)


def forget_order(engine: deepspeed.DeepSpeedEngine | None) -> None:
    """Have ZeRO-3 forget in which order modules came, by which it gathers ahead. It learns it again in two passes."""
    offload = getattr(engine.optimizer, "parameter_offload", None) if engine is not None else None
    if offload is not None and (order := offload.get_param_coordinator()).is_complete_trace():
        order._invalidate_trace()


def _unmark(layer: weakref.ref[nn.Module]) -> None:
    if (module := layer()) is not None:
        set_z3_leaf_module(module, False)
