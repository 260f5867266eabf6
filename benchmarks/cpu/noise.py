"""Noise of a gradient under another order of summation: the bar for code that must not change gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Gradients = dict[str, torch.Tensor | None]


class OtherOrder(TorchDispatchMode):
    """GEMMs sum over the inner dimension in another order.

    Args:
        seed: of the order; None: from the other end.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.addmm.default):
            *more, left, right = args
            args = (*more, self._turned(left, -1), self._turned(right, -2))
        elif func is aten._grouped_mm.default and args[0].dim() == 2 and args[1].dim() == 3:  # experts
            left, right, *more = args
            args = (self._turned(left, -1), self._turned(right, -2), *more)
        return func(*args, **(kwargs or {}))

    def _turned(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self._seed is None:
            return x.flip(dim)
        order = torch.randperm(x.shape[dim], generator=torch.Generator().manual_seed(self._seed))
        return torch.empty_like(x).copy_(x.index_select(dim, order.to(x.device)))  # kernels look at strides


def distance(got: Gradients, want: Gradients, zero: Iterable[str] = ()) -> dict[str, float]:
    """Norm of the difference over the norm, per parameter.

    Args:
        zero: endings of names of biases whose gradient is zero on paper; the weight's is their measure (tests/models.py).
    """
    found = {}
    for name, value in want.items():
        if value is None:
            continue
        like = name.removesuffix("bias") + "weight" if any(name.endswith(ending) for ending in zero) else name
        scale = want[like].float().norm()
        found[name] = ((got[name].float() - value.float()).norm() / scale).item() if scale else float(got[name].any())
    return found


def noise(run: Callable[[], Gradients], want: Gradients, dtype: torch.dtype, orders: int = 2, zero: Iterable[str] = ()) -> float:
    """The most that stock differs from stock in two orders of summation, at least one rounding of the dtype.

    Args:
        run: a step of stock.
        want: what it gave in its own order.
        orders: how many others are tried.
    """
    runs = [want]
    for seed in (None, *range(orders - 1)):
        with OtherOrder(seed):
            runs.append(run())
    pairs = itertools.combinations(runs, 2)
    return max(torch.finfo(dtype).eps / 2, *(max(distance(one, other, zero).values()) for one, other in pairs))
