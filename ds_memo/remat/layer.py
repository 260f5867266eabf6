"""A layer of the model, and the recipes of its calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_memo.placement import Placement
from ds_memo.remat.layer_state import LayerState
from ds_memo.remat.recipe import Recipe, remember

_TIMES_LEFT = 3
"""Calls in a row that left their recipe, after which every call of the layer is analysed."""
_TIMES_ALIKE = 3
"""Such analyses in a row that found nothing new, after which the layer's recipes are followed once more."""


class Layer:
    """One transformer block of a model, and the recipes of its calls.

    Args:
        index: its number among the model's layers.
        name: the user's name for it, e.g. ``model.layers.3``.
        module: None for a function that belongs to no module; each of its calls is analysed.
    """

    def __init__(self, index: int, name: str, module: nn.Module | None) -> None:
        self.index = index
        self.name = name
        self.module: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else lambda: None
        named = dict(module.named_parameters()) if module is not None else {}
        self.parameters, self._weights = list(named.values()), list(named)
        self.recipes: dict[Any, Recipe] = {}
        self.latest: Recipe | None = None
        self.times_left = 0
        """Calls that have left their recipe since the last call that followed one to its end."""
        self._times_alike = 0

    @functools.cached_property
    def state(self) -> LayerState | None:
        """None: it is a function."""
        module = self.module()
        return LayerState(self.name, module, self._weights) if module is not None else None

    @property
    def follows_recipes(self) -> bool:
        return self.times_left < _TIMES_LEFT

    def signature(self, args: tuple, placement: Placement) -> Any:
        """Return the key of a call's recipe: what the recipe depends on and is cheap to read.

        A call that differs in anything else leaves its recipe on the way.
        """
        tensors = tuple([(x.shape, x.dtype, x.requires_grad) for x in args if isinstance(x, torch.Tensor)])
        trained = tuple([parameter.requires_grad for parameter in self.parameters])
        cast = tuple([torch.get_autocast_dtype(device) for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)])
        return tensors, trained, self.module().training, cast, placement

    def remember(self, key: Any, recipe: Recipe) -> None:
        """Keep a recipe for later calls of its signature."""
        if not self.follows_recipes:
            self._times_alike = self._times_alike + 1 if recipe == self.recipes.get(key) else 0
            if self._times_alike == _TIMES_ALIKE:
                self.times_left = _TIMES_LEFT - 1  # on probation: one call that leaves its recipe ends it
        remember(self.recipes, key, recipe)

    def left_recipe(self) -> None:
        """Drop the recipes after a call left one. If calls keep leaving (experts in a Python loop), analyse each."""
        self.recipes.clear()
        self.times_left += 1
