"""Attention kernels that the emulated device lacks, as PyTorch calls them: cuDNN's, and FlashAttention-3 as its package has it.

They allocate what the kernels do and compute nothing. A backward sums the gradient of the queries in fp32, and those of keys that
heads share by head: on an H200, ALST's peak, which stands in cuDNN's backward, is so to eight bytes.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []
"""Live as long as the process: what a library implements goes with it."""
_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? qv, Tensor? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_q, int? max_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? scale, bool causal, "
    "int window_left, int window_right, int chunk, float softcap, bool interleaved, Tensor? metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, int? max_q, int? max_k, float? scale, "
    "bool causal, int window_left, int window_right, float softcap, bool deterministic, int sm_margin) -> ()"
)


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Any, lse_too: bool, *_: Any, **__: Any) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_cudnn_attention. Without `lse_too` it returns no log-sum-exp, as the kernel."""
    order = sorted(range(4), key=q.stride, reverse=True)  # the output lies as the queries
    shape = *q.shape[:3], v.shape[3]
    out = q.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    lse = q.new_empty(*q.shape[:3], 1, dtype=torch.float32) if lse_too else None
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, None


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    found = tuple(map(torch.empty_like, (q, k, v)))
    _sum(q, k, v, lse, q.shape[1] // k.shape[1])
    return found


def _sum(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, shared_by: int) -> list[Tensor]:
    """Allocate what a backward sums in, and free it."""
    by_head = [x.new_empty(shared_by * x.numel()) for x in (k, v) if shared_by > 1]
    return [torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse), *by_head]


def _fa3(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    dense, (*shape, heads, _) = q.dim() == 4, q.shape
    lse = q.new_empty((shape[0], heads, shape[1]) if dense else (heads, shape[0]), dtype=torch.float32)
    out = others[3]
    return q.new_empty(*shape, heads, v.shape[-1]) if out is None else out, lse, q.new_empty(0), q.new_empty(0)


def _fa3_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any) -> None:
    _sum(q, k, v, lse, q.shape[-2] // k.shape[-2])


def implement_cudnn() -> None:
    """Have PyTorch's ops of cuDNN's attention run on the emulated device."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn, "CUDA", allow_override=True)
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CUDA", allow_override=True)
    _libraries.append(library)


def install_flash_attn_3() -> None:
    """Let FlashAttention-3's package be there, so that PyTorch can activate it."""

    def never(*_: Any, **__: Any) -> None:
        raise RuntimeError("the emulated package serves PyTorch's flash ops alone")

    library = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in ((_FORWARD, _fa3), (_BACKWARD, _fa3_backward)):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CUDA")
    _libraries.append(library)
    package: Any = ModuleType("flash_attn_interface")
    package.__spec__ = ModuleSpec(package.__name__, None)
    package.flash_attn_func = package.flash_attn_varlen_func = never
    sys.modules[package.__name__] = package
