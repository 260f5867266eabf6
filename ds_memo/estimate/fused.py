"""Kernels that fuse several ops, as Liger's: norms, rotary embedding, an activation with its product. One op each on the meta
device, which reads its inputs and writes its output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_library = torch.library.Library("ds_memo", "FRAGMENT")
_library.define("fused(Tensor input, Tensor[] others) -> Tensor")
_library.define("fused_backward(Tensor gradient, Tensor[] saved) -> Tensor[]")
_library.impl("fused", lambda first, others: torch.empty_like(first), "Meta")
_library.impl("fused_backward", lambda gradient, saved: [torch.empty_like(x) for x in saved], "Meta")


def _save(ctx: Any, inputs: tuple[torch.Tensor, list[torch.Tensor]], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first, *others = torch.ops.ds_memo.fused_backward(gradient, list(ctx.saved_tensors))
    return first, others


torch.library.register_autograd("ds_memo::fused", _backward, setup_context=_save, lib=_library)


class _Rotated(torch.autograd.Function):
    """Queries or keys, turned by their positions. Its backward needs the angles alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ds_memo.fused(x, [])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ops.ds_memo.fused(gradient, [])


def fuse_modules(model: nn.Module) -> None:
    """Have norms, and MLPs with a gate, call one kernel for each norm and for the activation with its product."""
    for module in model.modules():
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            module.forward = lambda x, *_, module=module: torch.ops.ds_memo.fused(x, [module.weight])  # type: ignore[method-assign]
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            module.forward = lambda x, module=module: module.down_proj(  # type: ignore[method-assign]
                torch.ops.ds_memo.fused(module.gate_proj(x), [module.up_proj(x)])
            )


@contextmanager
def fused_rotary(model: nn.Module) -> Iterator[None]:
    """Have the model's code rotate queries and keys in one kernel each inside the block."""
    modeling: Any = sys.modules[type(model).__module__]
    own = getattr(modeling, "apply_rotary_pos_emb", None)
    if own is None:
        yield
        return
    modeling.apply_rotary_pos_emb = lambda query, key, *_, **__: (_Rotated.apply(query), _Rotated.apply(key))
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = own
