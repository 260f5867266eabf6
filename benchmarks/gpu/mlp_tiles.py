"""An MLP in as many tiles as ALST's recipe gives it.

DeepSpeed's TiledMLP joins its tiles' outputs, and holds them twice meanwhile. Here they are written into one tensor. As there,
each tile adds its weight gradients to `.grad`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: Callable[[Tensor], Tensor], x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.mlp = mlp
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        for rows, to in _tiles(x, out):
            to.copy_(mlp(rows))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        for rows, of_output, of_rows in _tiles(x, gradient, dx):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.mlp(rows)
            out.backward(of_output)
            of_rows.copy_(rows.grad)
        return None, dx, *(None for _ in ctx.needs_input_grad[2:])


def _tiles(*tensors: Tensor) -> Any:
    rows, hidden = tensors[0].shape[1:]
    return zip(*(x.chunk(math.ceil(rows / hidden), 1) for x in tensors), strict=True)


def in_tiles(forward: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> Callable[[Tensor], Tensor]:
    """Return an MLP's forward that runs tile by tile, now and again in the backward."""
    return lambda x: _Tiles.apply(forward, x, *parameters)
