"""The language-modelling loss of a Hugging Face causal LM, tile by tile: the full logits never exist.

At 1 Mi tokens the logits of a 128 K vocabulary take 250 GiB in bf16. Here each tile of rows makes its logits, its loss
and, at once, its gradients; forward keeps the two gradients (the shapes of the hidden states and of the head), backward
only scales them. That is the way of Liger-Kernel's fused linear cross entropy. DeepSpeed's TiledFusedLogitsLoss instead
runs the head's backward inside forward, before the engine has scaled the loss: the head's gradient then misses the loss
scale and the division by the accumulation steps. (torch's own F.linear_cross_entropy exists from 2.13 on only.)
"""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

TILE_ROWS = 1024  # the GEMM is efficient from here on; 0.5 GB of fp32 logits at a vocabulary of 128 K
IGNORE = -100  # torch's default ignore_index, which Hugging Face uses too

# Other things that some Hugging Face heads do to their logits, by config field; none of them is done here.
UNKNOWN_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier", "unpadded_vocab_size")


class HeadError(ValueError):
    """A model whose head the tiled loss does not compute; says in one line why."""


class TiledCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `softcap(hidden @ weight.T + bias)`; see `tiled_cross_entropy`."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, labels_N, softcap, tile_rows):
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NH) if need_hidden else None
        # fp32, so that thousands of tiles add up without losing the small ones
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        loss = hidden_NH.new_zeros((), dtype=torch.float32)
        count = (labels_N != IGNORE).sum().clamp(min=1)

        for start in range(0, len(labels_N), tile_rows):
            rows = slice(start, start + tile_rows)
            hidden, labels = hidden_NH[rows], labels_N[rows]
            logits = F.linear(hidden, weight_VH, bias_V).float()
            if softcap is not None:
                capped = torch.tanh(logits / softcap)
                logits = capped * softcap
            loss += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
            if not (need_hidden or need_weight or need_bias):
                continue
            grad = torch.softmax(logits, dim=-1)  # d sum / d logits = softmax − one-hot
            grad.scatter_add_(1, labels.clamp(min=0)[:, None], torch.full_like(grad[:, :1], -1.0))
            grad *= (labels != IGNORE)[:, None]
            if softcap is not None:
                grad *= 1 - capped**2
            if need_bias:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if need_hidden:
                grad_hidden[rows] = grad @ weight_VH
            if need_weight:
                grad_weight += grad.T @ hidden

        # Not yet divided by the count: 1e-6 of a gradient would vanish in fp16 before the loss scale comes in.
        ctx.save_for_backward(count, grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden_NH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        count, *sums = ctx.saved_tensors
        grads = [
            None if total is None else _scaled(total, grad_loss / count, dtype)
            for total, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None)


def _scaled(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor · scale` in `dtype`, multiplied in fp32 (a bf16 scale would be off by up to 0.4 %), tile by tile."""
    out = torch.empty_like(tensor, dtype=dtype)
    for out_rows, rows in zip(out.split(TILE_ROWS), tensor.split(TILE_ROWS), strict=True):
        out_rows.copy_(rows.float() * scale)
    return out


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    tile_rows: int = TILE_ROWS,
) -> torch.Tensor:
    """Mean cross entropy of a linear head over the labels that are not -100, without ever holding all logits.

    Peak memory beyond the inputs: a few tiles of fp32 logits, the gradient of `hidden`, and that of `weight` in fp32.

    Args:
        hidden: (..., H), the last hidden states.
        weight: (V, H), the head.
        labels: (...), each the token to predict at that position (already shifted), or -100 for none.
        bias: (V,), where the head has one.
        softcap: Logits become softcap · tanh(logits / softcap), as in Gemma-2.
        tile_rows: Positions whose logits exist at one time.

    Returns:
        A scalar in fp32; 0 where no label counts.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if not torch.is_grad_enabled():  # autograd functions are told that a parameter needs a gradient all the same
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return TiledCrossEntropy.apply(hidden, weight, bias, labels.reshape(-1), softcap, tile_rows)


def use_tiled_loss(model: nn.Module, tile_rows: int = TILE_ROWS) -> None:
    """Make `model(input_ids=..., labels=...)` return the tiled mean loss alone.

    Labels are aligned with the positions that predict them: the caller shifts. The loss is computed inside the head's
    own call, so that ZeRO-3 gathers the head's weight for it, forward and backward.

    Args:
        model: A Hugging Face causal LM with a linear head, before `initialize`.

    Raises:
        HeadError: Where the head does more than a matrix, a bias and a soft cap, or the model adds a router's loss.
    """
    config = model.config.get_text_config()
    head, base, name = model.get_output_embeddings(), model.base_model, type(model).__name__
    if type(head) is not nn.Linear or base is model:
        raise HeadError(f"{name}: the tiled loss needs a base model and an nn.Linear head, found {type(head).__name__}")
    for field in UNKNOWN_SCALES:
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise HeadError(f"{name}: the tiled loss cannot apply {field} = {getattr(config, field)}")
    if getattr(config, "output_router_logits", False):
        raise HeadError(f"{name}: the tiled loss has no router loss; set output_router_logits to false")
    softcap = getattr(config, "final_logit_softcapping", None)

    def head_forward(head: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return tiled_cross_entropy(hidden, head.weight, labels, head.bias, softcap, tile_rows)

    def forward(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs) -> torch.Tensor:
        hidden = model.base_model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        return model.get_output_embeddings()(hidden, labels)

    head.forward = types.MethodType(head_forward, head)
    model.forward = types.MethodType(forward, model)
