"""The one way of tests into a handle."""

from __future__ import annotations

from ds_memo.remat.recipe import Gemm, Recipe
from ds_memo.runtime.handle import MemoHandle
from ds_memo.runtime.session import Session


def inside(handle: MemoHandle) -> Session:
    """Return the session behind a handle: its parts, passes and steps."""
    return handle._session


def recipe_of(handle: MemoHandle, layer: int = 0) -> Recipe:
    """Return the recipe of a layer's latest call."""
    return inside(handle).layers[layer].latest


def gemms_of(handle: MemoHandle, layer: int = 0) -> list[Gemm]:
    """Return the products of a layer's latest call."""
    return [op for op in recipe_of(handle, layer).ops if isinstance(op, Gemm)]


def kinds_of_recipes(handle: MemoHandle) -> list[str]:
    """Return the class of each layer's latest recipe, by name."""
    return [type(layer.latest).__name__ for layer in inside(handle).layers]
