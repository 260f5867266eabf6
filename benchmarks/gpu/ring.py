"""Ring attention by PyTorch's own code for context parallelism, as TRL's example of a million tokens trains with it (trl#6846).

PyTorch's dispatcher leads to it on CUDA alone. Its templates take any kernel that returns a log-sum-exp, a CPU's too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ds_memo.remat.undo import changed

aten = torch.ops.aten
_RANDOM = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""What kernels on CUDA return behind the log-sum-exp, and their backward asks for. A CPU's returns none."""


def _kernel(device: torch.device) -> str:
    if device.type == "cpu":
        return "flash_attention_for_cpu"
    return "cudnn_attention" if torch.backends.cuda.cudnn_sdp_enabled() else "flash_attention"


class Ring(torch.autograd.Function):
    """Causal attention over (b, heads, rows, d) around the n ranks of a group.

    A sequence has 2n pieces, rank r those of number r and 2n - 1 - r. The kernel is cuDNN's where it may run, else flash.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        name = _kernel(q.device)
        more = {"attn_bias": None, "compute_log_sumexp": True} if name.startswith("cudnn") else {}
        op = getattr(aten, f"_scaled_dot_product_{name}")
        out, lse, *rest = ring._templated_ring_attention(
            group, 2, op, query=q, key=k, value=v, is_causal=True, dropout_p=0.0, scale=scale, **more
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest, ctx.scale, ctx.name, ctx.group = rest, scale, name, group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        more = dict(zip(_RANDOM, ctx.rest, strict=False)) | ({"attn_bias": None} if ctx.name.startswith("cudnn") else {})
        grads = ring._templated_ring_attention_backward(
            ctx.group,
            2,
            getattr(aten, f"_scaled_dot_product_{ctx.name}_backward").default,
            grad_out=gradient.contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
            **more,
        )
        return *grads[:3], None, None


class _Own:
    """The exchange of a rank with itself. A process group without a backend leaves the target as it was (torch 2.11)."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._buffer = torch.empty(0)

    def exchange_buffers(self, buffer: Tensor) -> None:
        self._buffer = buffer.clone()

    def next_buffer(self) -> Tensor:
        return self._buffer


@contextlib.contextmanager
def ring_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Yield a group of this process alone, around which attention runs within the block."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        with changed(ring, "_create_rotater", _Own):
            yield DeviceMesh(device.type, [dist.get_rank()]).get_group()
    finally:
        if ours:
            dist.destroy_process_group()
