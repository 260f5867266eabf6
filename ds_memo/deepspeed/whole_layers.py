"""Layers that ZeRO-3 gathers whole, as DeepSpeed's leaf modules, because they run in tiles."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn


def gather_layers_whole(layers: Iterable[nn.Module]) -> None:
    """Have ZeRO-3 gather each layer by one hook, once for its forward and once for its backward, however many tiles it has."""
    for layer in layers:
        set_z3_leaf_module(layer, True)
        layer.register_forward_pre_hook(_need_gradient, with_kwargs=True)


def _need_gradient(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Have a layer's hidden states come first, not by name, and need a gradient.

    DeepSpeed reduces the gradients of a leaf module in a full backward hook. PyTorch calls such a hook when the gradients of the
    arguments without a name are there. If none of these needs a gradient, as behind a frozen embedding, the hook comes before
    the layer's backward.
    """
    trained = any(parameter.requires_grad and hasattr(parameter, "ds_id") for parameter in layer.parameters())
    if not (trained and torch.is_grad_enabled()):
        return None
    if not args and list(inspect.signature(type(layer).forward).parameters)[1:2] == ["hidden_states"]:
        kwargs = dict(kwargs)
        args = (kwargs.pop("hidden_states"),)
    if args and isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
        args = (_NeedsGradient.apply(args[0], torch.empty(0, requires_grad=True)), *args[1:])
    return args, kwargs


class _NeedsGradient(torch.autograd.Function):
    """Hands a tensor on, and drops its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, needs_gradient: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None
