"""Kernels that the meta device lacks: flash attention, also in a ring, Ulysses' all-to-alls, and those that fuse ops, as Liger's.

Transformers' layers call attention by its name. Its output and log-sum-exp are what a flash kernel returns, and its
backward allocates what that one's does: dq in fp32, and dk and dv of every head before groups are summed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_memo.estimate.hardware import Hardware

NAME = "ds_memo_estimate"
"""Name of the attention implementation."""
_library = torch.library.Library("ds_memo", "FRAGMENT")
_library.define("attention(Tensor query, Tensor key, Tensor value, int window, int ring, Tensor? sinks) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor query, Tensor key, Tensor value, int window, int ring, Tensor gradient)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define("all_to_all(Tensor blocks) -> Tensor")


def pairs(tokens: int, window: int) -> float:
    """Return the number of pairs of tokens that causal attention computes.

    Args:
        window: tokens that each attends to; 0: all before it.
    """
    seen = min(window or tokens, tokens)
    return seen * (tokens - seen / 2)


def exchange_bytes_per_s(machine: Hardware, ranks: int) -> float:
    """Return the rate of an all-to-all, in bytes to one other rank. Traffic in and between nodes overlaps; the slower counts."""
    inside, outside = min(ranks, machine.gpus_per_node) - 1, max(0, ranks - machine.gpus_per_node)
    return 1 / max(inside / machine.intra_node, outside / machine.inter_node)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, ring: int, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = query.transpose(1, 2)
    out = torch.empty_like(rows) if value.shape[-1] == query.shape[-1] else rows.new_empty(*rows.shape[:3], value.shape[-1])
    return out.transpose(1, 2), query.new_empty(query.shape[:3], dtype=torch.float32)


def _attention_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, ring: int, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))
    return query, key, value


_library.impl("attention", _attention, "Meta")
_library.impl("attention_backward", _attention_backward, "Meta")
_library.impl("all_to_all", torch.empty_like, "Meta")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.window, ctx.ring, ctx.sinks = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, *_ = ctx.saved_tensors
    accumulated = torch.empty_like(query, dtype=torch.float32)
    shared = key.shape[1] < query.shape[1]
    expanded = [x.new_empty(x.shape[0], query.shape[1], *x.shape[2:]) for x in (key, value) if shared]
    travelling = [
        [torch.empty_like(x, dtype=dtype) for dtype in (x.dtype, torch.float32) for _ in range(2)]
        for x in (key, value)
        if ctx.ring > 1
    ]  # what is used and what comes: keys and values, and their gradients
    found = torch.ops.ds_memo.attention_backward(query, key, value, ctx.window, ctx.ring, gradient)
    del accumulated, expanded, travelling
    return *found, None, None, None if ctx.sinks is None else torch.empty_like(ctx.sinks)


torch.library.register_autograd("ds_memo::attention", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("ds_memo::all_to_all", lambda ctx, gradient: torch.ops.ds_memo.all_to_all(gradient), lib=_library)


class MetaAttention:
    """The attention function of all models on the meta device, which Transformers knows by its NAME."""

    def __init__(self) -> None:
        self.sp = 1
        """Ranks among which it trades heads (Ulysses)."""
        self.ring = 1
        """Ranks around which keys and values travel. It has whole sequences if both are 1."""

    def ranks(self, module: nn.Module) -> int:
        """See ds_memo.tiles.attention_call.AttentionCall.ranks."""
        return self.sp

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        *_: Any,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        """
        Args:
            query: (b, heads, tokens, head size)
            s_aux: a learned logit of each head, gpt-oss's attention sinks.

        Returns:
            (b, tokens, heads, head size)
        """
        window, heads = sliding_window or 0, query.shape[1]
        if self.sp > 1:
            query, key, value = (_whole(x, self.sp) for x in (query, key, value))
        out, _lse = torch.ops.ds_memo.attention(query, key, value, window, self.ring, s_aux)
        out = out.transpose(1, 2).contiguous()
        return (out if self.sp == 1 else _part(out, self.sp, heads)), None


ATTENTION = MetaAttention()


def _whole(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return whole sequences of some heads, of a part of them of all heads, as DeepSpeed's Ulysses does."""
    x = x.permute(2, 0, 1, 3)
    if x.shape[2] < ranks:
        x = x.repeat_interleave(ranks // x.shape[2], dim=2)
    blocks = x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return torch.ops.ds_memo.all_to_all(blocks).flatten(0, 1).permute(1, 2, 0, 3).contiguous()


def _part(out: torch.Tensor, ranks: int, heads: int) -> torch.Tensor:
    """Return a part of the sequence of all heads."""
    blocks = out.transpose(0, 1).flatten(2).unflatten(0, (ranks, -1)).contiguous()
    joined = torch.ops.ds_memo.all_to_all(blocks).permute(1, 2, 0, 3).flatten(2).contiguous()
    return joined.transpose(0, 1).unflatten(-1, (heads, -1))


class CatchSdpa(TorchFunctionMode):
    """Has layers that call F.scaled_dot_product_attention themselves run the same kernel."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention and args[0].is_meta and args[0].dim() == 4:
            return torch.ops.ds_memo.attention(*args[:3], 0, 1, None)[0]
        return func(*args, **(kwargs or {}))


# ---- kernels that fuse: norms, rotary embedding, an activation with its product. Each reads its inputs and writes its output

_library.define("fused(Tensor input, Tensor[] others) -> Tensor")
_library.define("fused_backward(Tensor gradient, Tensor[] saved) -> Tensor[]")
_library.impl("fused", lambda first, others: torch.empty_like(first), "Meta")
_library.impl("fused_backward", lambda gradient, saved: [torch.empty_like(x) for x in saved], "Meta")


def _save_fused(ctx: Any, inputs: tuple[torch.Tensor, list[torch.Tensor]], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _fused_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first, *others = torch.ops.ds_memo.fused_backward(gradient, list(ctx.saved_tensors))
    return first, others


torch.library.register_autograd("ds_memo::fused", _fused_backward, setup_context=_save_fused, lib=_library)


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
