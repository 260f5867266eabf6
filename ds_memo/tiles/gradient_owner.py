"""Whether an incoming gradient belongs to the backward that receives it, so that its memory may be overwritten."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch


def is_owned(gradient: torch.Tensor) -> bool:
    """Return True if no one else refers to a gradient. Call it first in a backward, with its argument.

    Autograd hands the same tensor to several receivers (a residual connection), expands one number (`sum()`), and hooks may
    keep what they are shown.
    """
    return gradient.is_contiguous() and _references(gradient) == _references_of_an_own_gradient()


def _references(gradient: torch.Tensor) -> tuple[int, int, int]:
    """Return how many refer to the tensor in C++, to its memory, and to its Python object."""
    return gradient._use_count(), torch._C._storage_Use_Count(gradient.untyped_storage()._cdata), sys.getrefcount(gradient)


class _Receiver(torch.autograd.Function):
    found: tuple[int, int, int]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _Receiver.found = _through(gradient)
        return gradient


def _through(gradient: torch.Tensor) -> tuple[int, int, int]:
    return _references(gradient)  # as deep as in `is_owned`


@functools.cache
def _references_of_an_own_gradient() -> tuple[int, int, int]:
    """Try it: how many references there are depends on the versions of Python and PyTorch."""
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad((_Receiver.apply(x) * 2).sum(), x)
    return _Receiver.found
