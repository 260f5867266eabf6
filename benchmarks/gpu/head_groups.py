"""Attention in groups of heads with their projections, as UPipe has it (Untied Ulysses, arXiv 2602.21196).

Ulysses trades all heads at once. UPipe walks over groups of them. It projects q, k and v of a group, trades its heads, attends,
and writes the result to its place. No group's q, k and v outlive it. The backward projects them once more and runs attention's
backward from the result and log-sum-exp that the forward kept. It adds each group's share to the gradient of the hidden states.

Which kernel runs is PyTorch's choice. A kernel's outputs are recorded in the forward and given back in the backward's graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import sdpa
from ds_memo.remat.op_policy import ATTENTION

MOST_GROUPS = 8
"""As many as tiles set by hand have. The paper's groups are of one query head for each rank."""


_SAVED = object()
"""Stands for a tensor among outputs."""


class _Kernel(TorchDispatchMode):
    """Records the outputs of an attention op, or returns those that were recorded in its place."""

    def __init__(self, outputs: tuple[Any, ...] | None = None) -> None:
        super().__init__()
        self.outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func not in ATTENTION:
            return func(*args, **(kwargs or {}))
        if self.outputs is None:
            self.outputs = func(*args, **(kwargs or {}))
        return self.outputs


def traded(x: Tensor) -> Tensor:
    """Stand for the all-to-all of (ranks, …): this process keeps its bytes. A test on two ranks has the real one."""
    return x


def heads_to_ranks(x: Tensor, ranks: int) -> Tensor:
    """(b, heads, rows, d) → (b, heads/ranks, ranks·rows, d), as the all-to-all in front of attention moves bytes."""
    if ranks == 1:
        return x
    return traded(x.unflatten(1, (ranks, -1)).movedim(1, 0)).movedim(0, 2).contiguous().flatten(2, 3)


def ranks_to_heads(x: Tensor, ranks: int) -> Tensor:
    """The way back: (b, heads/ranks, ranks·rows, d) → (b, rows, heads, d), contiguous."""
    return traded(x.unflatten(2, (ranks, -1)).movedim(2, 0)).permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous()


class Layout:
    """How an attention module projects, and how many groups it has. Of the Llama or GPT-NeoX family.

    Args:
        ranks: of Ulysses. A group has as many key heads for each.
    """

    def __init__(self, module: nn.Module, ranks: int) -> None:
        names = ("q_proj", "k_proj", "v_proj") if hasattr(module, "q_proj") else ("query_key_value",)
        self.linears: list[nn.Linear] = [getattr(module, name) for name in names]
        self.size = module.config.hidden_size // module.config.num_attention_heads
        keys = getattr(module.config, "num_key_value_heads", module.config.num_attention_heads) // ranks
        self.groups = max(n for n in range(1, MOST_GROUPS + 1) if keys % n == 0)
        self.ranks, self.scale = ranks, module.scaling
        self._rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def arrange(self, projected: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Return q, k, v (b, heads, rows, d) of a group, as attention gets them on this rank."""
        if len(projected) == 1:
            q, k, v = projected[0].unflatten(-1, (-1, 3 * self.size)).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (x.unflatten(-1, (-1, self.size)).transpose(1, 2) for x in projected)
        q, k = self._rotate(q, k, cos, sin)
        return [heads_to_ranks(x, self.ranks) for x in (q, k, v)]


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, cos: Tensor, sin: Tensor, *parameters: Tensor | None) -> Tensor:
        result, others = None, []
        for group in range(layout.groups):
            q, k, v = layout.arrange(_project(x, parameters, layout.groups, group), cos, sin)
            with torch.enable_grad(), _Kernel() as kernel:  # without gradients cuDNN's kernel gives no log-sum-exp
                out = sdpa(*(x.requires_grad_() for x in (q, k, v)), layout.scale).detach()
            del q, k, v
            out = ranks_to_heads(out, layout.ranks)
            if result is None:
                result = out.new_empty(*out.shape[:2], layout.groups, *out.shape[2:])
            result[:, :, group] = out
            others.append((kernel.outputs or (None,))[1:])  # the result is in its place now
            del out, kernel
        result = result.flatten(2)
        tensors = [y for outputs in others for y in outputs if isinstance(y, Tensor)]
        ctx.save_for_backward(x, cos, sin, result, *parameters, *tensors)  # a checkpoint drops what is saved, and nothing else
        ctx.layout, ctx.parameters = layout, len(parameters)
        ctx.others = [[_SAVED if isinstance(y, Tensor) else y for y in outputs] for outputs in others]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layout, (x, cos, sin, result, *saved) = ctx.layout, ctx.saved_tensors
        parameters, tensors = saved[: ctx.parameters], iter(saved[ctx.parameters :])
        dx, of_parameters, flat = None, [None if p is None else torch.empty_like(p) for p in parameters], x.flatten(0, 1)
        by_group = [y.unflatten(2, (layout.groups, -1, layout.size)) for y in (result, gradient)]
        for group in range(layout.groups):
            projected = [y.requires_grad_() for y in _project(x, parameters, layout.groups, group)]
            result_g, gradient_g = (heads_to_ranks(y[:, :, group].transpose(1, 2), layout.ranks) for y in by_group)
            outputs = [next(tensors) if y is _SAVED else y for y in ctx.others[group]]
            with torch.enable_grad(), _Kernel((result_g, *outputs) if outputs else None):
                out = sdpa(*layout.arrange(projected, cos, sin), layout.scale)
            shares = torch.autograd.grad(out, projected, gradient_g)
            del out, projected
            for number, share in enumerate(shares):
                share, weight = share.flatten(0, 1), parameters[2 * number]
                rows = weight.chunk(layout.groups)[group]
                dx = share @ rows if dx is None else dx.addmm_(share, rows)
                torch.mm(share.T, flat, out=of_parameters[2 * number].chunk(layout.groups)[group])
                if (of_bias := of_parameters[2 * number + 1]) is not None:
                    torch.sum(share, 0, out=of_bias.chunk(layout.groups)[group])
        return None, dx.view_as(x), None, None, *of_parameters


def _project(x: Tensor, parameters: Any, groups: int, group: int) -> list[Tensor]:
    """Return a group's part of each projection."""
    rows = [None if p is None else p.chunk(groups)[group] for p in parameters]
    return [F.linear(x, weight, bias) for weight, bias in zip(rows[::2], rows[1::2], strict=True)]


def in_head_groups(module: nn.Module, ranks: int) -> Callable[..., tuple[Tensor, None]]:
    """Return a forward for a self-attention module."""
    layout = Layout(module, ranks)
    last = module.o_proj if hasattr(module, "o_proj") else module.dense
    parameters = [p for linear in layout.linears for p in (linear.weight, linear.bias)]

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> tuple[Tensor, None]:
        return last(_HeadGroups.apply(layout, hidden_states, *position_embeddings, *parameters)), None

    return forward


# ---- MLPs


class _Tiles(torch.autograd.Function):
    """An MLP in as many tiles as ALST's recipe gives it. DeepSpeed's TiledMLP joins its tiles' outputs, and holds them twice
    meanwhile. Here they are written into one tensor. As there, each tile adds its weight gradients to `.grad`."""

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
