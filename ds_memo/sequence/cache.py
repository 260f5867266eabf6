"""Tensors that are made once, and that a later training forward uses whatever call came first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

_Made = TypeVar("_Made")


def cache_tensors(maxsize: int) -> Callable[[Callable[..., _Made]], Callable[..., _Made]]:
    """Cache what a function returns. It runs outside of inference mode, whose tensors autograd may not save."""

    def cached(make: Callable[..., _Made]) -> Callable[..., _Made]:
        return functools.lru_cache(maxsize)(torch.inference_mode(False)(make))

    return cached
