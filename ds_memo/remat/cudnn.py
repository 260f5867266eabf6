"""Calls of F.scaled_dot_product_attention that get another kernel than PyTorch would take, or are cut.

FlashAttention-3 or 4, if active, comes before cuDNN. cuDNN's gradients may be wrong: many elements go in groups of heads, some
masks to another kernel.

Kernels that PyTorch picks for F.scaled_dot_product_attention are known only there. So a function mode stands around a layer
whose sizes ask for it. The groups are one op, which keeps output and log-sum-exp as any attention kernel does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ds_memo.attention_kernel import CUDNN, CUDNN_ELEMENTS
from ds_memo.remat import attention_kernels
from ds_memo.remat.autocast import cast, without_autocast
from ds_memo.remat.undo import Undoing, stacks_restored

NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_HIDDEN = 8
"""Queries have at most so many elements for each of a layer's arguments."""

aten = torch.ops.aten


def may_concern(tensor: Any) -> bool:
    """Return True if a layer's call with such an argument may have attention that is not cuDNN's, or not as one call."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.numel() * _HIDDEN > CUDNN_ELEMENTS or any(map(_loses_masks, tensor.shape[1:-1]))


def _loses_masks(tokens: int) -> bool:
    return tokens % 128 == 64


@contextmanager
def by(kernels: Sequence[SDPBackend]) -> Iterator[None]:
    """Do what torch.nn.attention.sdpa_kernel does."""
    with Undoing(functools.partial(_sdpa_kernel, _cur_sdpa_kernel_backends())):
        _sdpa_kernel(kernels)
        yield


def run(fn: Callable[..., Any], warn: Callable[[str], None], elements: int, flash_first: bool, *args: Any) -> Any:
    """Call ``fn(*args)``, in which no call of cuDNN's attention may give wrong gradients.

    Args:
        warn: tells the user that another kernel runs.
        elements: of attention's largest tensor for all heads, if it runs for some of them.
        flash_first: True if FlashAttention-3 or 4 is active, and takes what it can.
    """
    with stacks_restored(), _Guard(warn, elements, flash_first):
        return fn(*args)


class _Guard(TorchFunctionMode):
    def __init__(self, warn: Callable[[str], None], elements: int, flash_first: bool) -> None:
        super().__init__()
        self._warn = warn
        self._elements = elements
        self._flash_first = flash_first

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        def stock() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        how = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if self._flash_first and attn_mask is None and query.dim() == 4 and _flash_serves(*cast(query, key, value), **how):
            with by([SDPBackend.FLASH_ATTENTION]):
                return stock()
        elements = max(query.numel(), self._elements)
        masked = attn_mask is not None and any(map(_loses_masks, (query.shape[-2], key.shape[-2])))
        if query.dim() != 4 or not (masked or elements > CUDNN_ELEMENTS):
            return stock()
        q, k, v = cast(query, key, value)
        mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(q.dtype)
        with _disable_current_modes():  # where PyTorch asks, they do not see it
            chosen = torch._fused_sdp_choice(q, k, v, mask, **how)
        if chosen != SDPBackend.CUDNN_ATTENTION.value:
            return stock()
        if masked:
            self._warn(
                f"another kernel than cuDNN's runs its attention, which has a mask of {query.shape[-2]:,} queries and "
                f"{key.shape[-2]:,} keys, where cuDNN's gradients may be NaN (pytorch/pytorch issue 196678). "
                "Pad to a multiple of 128, or join documents, for cuDNN's"
            )
        elif dropout_p or q[:, :1].numel() > CUDNN_ELEMENTS:
            self._warn(
                f"another kernel than cuDNN's runs its attention, which has {elements:,} elements of queries: more than "
                f"{CUDNN_ELEMENTS:,}, with dropout or in one head. It takes longer and needs nothing"
            )
        else:
            if mask is not None:
                if mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
                mask = mask.expand(*q.shape[:3], k.shape[2])
            return _InTurn.apply(q, k, v, mask, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
        with by(NOT_CUDNN):
            return stock()


def _flash_serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, **how: Any) -> bool:
    """Return True if FlashAttention-3 or 4 can run a call, by its own rules and PyTorch's."""
    kernel = attention_kernels.choice(attention_kernels.described(q, v, dropout=bool(dropout_p)), q.device)
    if kernel.name not in attention_kernels.running():
        return False
    with by([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), _disable_current_modes():
        serves = torch._fused_sdp_choice(q, k, v, None, dropout_p, **how) == SDPBackend.FLASH_ATTENTION.value
    if serves:
        attention_kernels.note(kernel)
    return serves


class _InTurn(torch.autograd.Function):
    """cuDNN's attention (b, heads, s, d), one group of heads after another."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
    ) -> torch.Tensor:
        out, lse = torch.ops.ds_memo.cudnn_attention(q, k, v, bias, causal, scale)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.how = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, bias, out, lse = ctx.saved_tensors
        with without_autocast():
            found = backward(gradient, q, k, v, bias, out, lse, *ctx.how)
        return *found, None, None, None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp (b, heads, s, 1), group by group."""

    def run(heads: slice, kv_heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        bias_of_heads = None if bias is None else bias[:, heads]
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q[:, heads], k[:, kv_heads], v[:, kv_heads], bias_of_heads, True, 0.0, causal, False, scale=scale
        )
        return out, attention_kernels.checked(CUDNN, lse, (q.shape[0], heads.stop - heads.start, q.shape[2], 1))

    calls = list(_calls(q, k))
    if len(calls) == 1:
        return run(*calls[0])
    order = sorted(range(4), key=q.stride, reverse=True)  # the kernel's output lies as its queries
    shape = *q.shape[:3], v.shape[3]
    out = q.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    lse = q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
    for call in calls:
        out[:, call[0]], lse[:, call[0]] = run(*call)
    return out, lse


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    Args:
        out, lse: of the forward; of a ring, over all keys.
    """
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of dropout

    def run(heads: slice, kv_heads: slice) -> Sequence[torch.Tensor]:
        qkv = q[:, heads], k[:, kv_heads], v[:, kv_heads]
        rest = out[:, heads], lse[:, heads].contiguous(), unused, unused, None if bias is None else bias[:, heads]
        lengths = None, None, q.shape[2], k.shape[2]
        kernel = aten._scaled_dot_product_cudnn_attention_backward
        return kernel(gradient[:, heads], *qkv, *rest, *lengths, 0.0, causal, scale=scale)

    calls = list(_calls(q, k))
    if len(calls) == 1:
        of_queries, of_keys, of_values = run(*calls[0])
        return of_queries, of_keys, of_values
    shared = len(calls) > k.shape[1]
    of_queries = torch.empty_like(q)
    of_keys, of_values = (torch.zeros_like(x, dtype=torch.float32 if shared else None) for x in (k, v))
    for heads, kv_heads in calls:
        found = run(heads, kv_heads)
        of_queries[:, heads] = found[0]
        of_keys[:, kv_heads] += found[1]
        of_values[:, kv_heads] += found[2]
    return of_queries, of_keys.to(k.dtype), of_values.to(v.dtype)


def _calls(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the heads of queries and of keys of each call."""
    heads, keys = q.shape[1], k.shape[1]
    each, fit = heads // keys, max(1, CUDNN_ELEMENTS // q[:, :1].numel())
    if fit >= each:
        for first in range(0, keys, fit // each):
            last = min(first + fit // each, keys)
            yield slice(first * each, last * each), slice(first, last)
        return
    for key in range(keys):
        for first in range(key * each, (key + 1) * each, fit):
            yield slice(first, min(first + fit, (key + 1) * each)), slice(key, key + 1)


_library = torch.library.Library("ds_memo", "FRAGMENT")
_library.define("cudnn_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale) -> (Tensor, Tensor)")
_library.impl("cudnn_attention", forward, "CompositeExplicitAutograd")
