"""Seconds of each op on a machine, by its FLOPs or the bytes it moves. The benchmarks' emulator has the same prices.

GEMM           FLOPs at gemm_efficiency. Tiles of the output run in waves, one tile on each multiprocessor; on average half of
               the last wave is empty ("wave quantization", NVIDIA's Matrix Multiplication Background)
attention      FLOPs of the pairs of tokens in the causal half or the window, at the rate of the kernel that runs; the backward
               has 2.5 times as many
scans          FLOPs and bytes of the kernels in ds_memo/estimate/mixer_kernels.py, linear in tokens
all others     the bytes they read and write, each tensor once
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_memo.attention_kernel import CUDNN, EFFICIENT, FA3, FA4, FLASH, PLAIN, WINDOW, Attention
from ds_memo.estimate import mixer_kernels
from ds_memo.estimate.adapters import NF4_BYTES
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.meta_kernels import exchange_bytes_per_s, pairs
from ds_memo.remat.functions import SkipsCompiled

aten = torch.ops.aten
_KERNELS = (CUDNN, FLASH, EFFICIENT)
_FORWARD = {getattr(aten, f"_scaled_dot_product_{kernel}_attention"): kernel for kernel in _KERNELS}
_BACKWARD = {getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward"): kernel for kernel in _KERNELS}
_OPS = _FORWARD | _BACKWARD | {aten._flash_attention_forward: FLASH, aten._flash_attention_backward: FLASH}
_IMPLEMENTATIONS = {None: FLASH, "FA3": FA3, "FA4": FA4}
"""Kernels behind PyTorch's flash ops, by the name of the implementation that is active."""
PRODUCTS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.addmm_: 1,
    aten.baddbmm: 1,
    aten.baddbmm_: 1,
    aten._addmm_activation: 1,
}
"""GEMMs, and which argument their left operand is. What comes before it is added to the product. (PyTorch's own count of FLOPs
lacks in-place ones, and those with an `out_dtype`.)"""
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.record_stream,
    aten.resize_,
    aten.set_,
    aten._unsafe_view,
}
"""Ops that touch no memory of a tensor."""
_ROWS = {aten.index, aten.index_select, aten.gather, aten.embedding}
"""Ops that read no more than they write."""
_TO_ROWS = {aten.index_copy_, aten.index_put_, aten._index_put_impl_, aten.scatter_, aten.index_add_}
"""Ops that write no more than their last argument has."""
_GEMM_TILE = 128 * 256
"""Outputs of cuBLAS's most efficient tile (NVIDIA's Matrix Multiplication Background)."""
BACKWARD_FLOPS = 2.5
"""FLOPs of flash attention's backward, which computes the scores again, over its forward's."""


def cost_s(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, machine: Hardware) -> float:
    """Return the seconds of one op's kernels, without empty waves."""
    packet = func._overloadpacket
    if func.is_view or packet in FREE:
        return 0.0
    if func.namespace == mixer_kernels.NAMESPACE:
        return mixer_kernels.cost_s(func, args, machine)
    if packet in _FORWARD or packet in _BACKWARD:
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        query, key = tensors[:2] if packet in _FORWARD else tensors[1:3]  # (b, heads, tokens, d); keys may have fewer heads
        flops = 4.0 * query.numel() * key.shape[2] / (2 if given(func, args, kwargs).get("is_causal") else 1)
        return attention_s(flops, kernel_of(packet), packet in _BACKWARD, machine)
    bytes_per_s = machine.device_bandwidth * machine.device_bandwidth_efficiency
    if packet in PRODUCTS:
        left = PRODUCTS[packet]
        flops = 2.0 * args[left].numel() * args[left + 1].shape[-1]
        return flops / (machine.peak * machine.gemm_efficiency) + _summed_bytes(args[:left], kwargs, result) / bytes_per_s
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result) / (machine.peak * machine.gemm_efficiency)
    return moved_bytes(func, args, kwargs, result) / bytes_per_s


def attention_s(flops: float, kernel: str | None, backward: bool, machine: Hardware) -> float:
    """Return the seconds of a kernel of attention whose forward has so many FLOPs."""
    assert kernel is not None  # of an op of attention
    rates = machine.attention_rates(kernel)
    return BACKWARD_FLOPS * flops / rates.backward if backward else flops / rates.forward


def kernel_of(packet: Any) -> str | None:
    """Return the kernel of an op of attention, of which PyTorch's flash ops may have several; None: it is another op."""
    kernel = _OPS.get(packet)
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # from PyTorch 2.11 on
    return _IMPLEMENTATIONS[current()] if kernel == FLASH and current else kernel


class Clock(SkipsCompiled):
    """Sums up the seconds of all ops inside the block, on the meta device.

    Args:
        rows: tokens of the layer's call. A product over as many or more is a weight's gradient.
    """

    def __init__(self, machine: Hardware, rows: int) -> None:
        super().__init__()
        self.machine = machine
        self.rows = rows
        self.seconds = 0.0
        self.flops = 0.0
        """FLOPs of GEMMs, attention, scans and convolutions."""
        self.product_flops = 0.0
        """Those of GEMMs alone."""
        self.attention: set[Attention] = set()
        """Calls of attention."""
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.ops += 1
        self.seconds += self._cost_s(func, args, kwargs, result)
        return result

    def _cost_s(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        machine, name = self.machine, func._schema.name
        if name in ("ds_memo::attention", "ds_memo::attention_backward"):
            query, key, value = args[:3]
            window, ring = args[3:5]  # whose ranks have equal shares
            seen = pairs(query.shape[2] * ring, window) / ring
            flops = 2.0 * seen * query[..., 0, 0].numel() * (key.shape[-1] + value.shape[-1])
            backward = name.endswith("backward")
            self.flops += flops * (BACKWARD_FLOPS if backward else 1)
            dtype = str(query.dtype).removeprefix("torch.")
            call = Attention(dtype, query.shape[-1], value.shape[-1], WINDOW if window else PLAIN)
            self.attention.add(call)
            return attention_s(flops, machine.attention_kernel(call).name, backward, machine)
        if name == "ds_memo::all_to_all":
            return result.nbytes / result.shape[0] / exchange_bytes_per_s(machine, result.shape[0])
        if name == "ds_memo::dequantize":
            return (NF4_BYTES + 2) * result.numel() / (machine.device_bandwidth * machine.device_bandwidth_efficiency)
        packet = func._overloadpacket
        seconds = cost_s(func, args, kwargs, result, machine)
        if packet in PRODUCTS or name in _GROUPED:
            left = PRODUCTS.get(packet, 0)
            flops, rate = 2.0 * args[left].numel() * result.shape[-1], machine.peak * machine.gemm_efficiency
            self.flops += flops
            self.product_flops += flops
            seconds = flops / rate if name in _GROUPED else seconds
            if args[left].shape[-1] < self.rows and args[left].dim() == 2:  # cuBLAS splits the depth of weights' gradients
                seconds += machine.multiprocessors * _GEMM_TILE * args[left].shape[-1] / rate
        elif func.namespace == mixer_kernels.NAMESPACE:
            self.flops += mixer_kernels.price(func, args).flops
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        return seconds


def _summed_bytes(added: tuple[torch.Tensor, ...], kwargs: dict[str, Any], result: torch.Tensor) -> int:
    """Return the bytes that a product reads and writes of a sum. A bias has no bytes worth counting."""
    if not kwargs.get("beta", 1):
        return 0
    return sum(_bytes(x) + _bytes(result) for x in added if x.numel() == result.numel())


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an elementwise op moves through the device's memory."""
    packet = func._overloadpacket
    if func.is_view or packet in FREE:
        return 0
    taken = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
    if packet in _ROWS:
        return 2 * _bytes(result)
    if packet in _TO_ROWS:
        return 2 * _bytes(taken[-1])
    tensors = {id(x): x for x in (*taken, *(x for x in tree_leaves(result) if torch.is_tensor(x)))}.values()
    return sum(map(_bytes, tensors)) + sum(_bytes(x) for x in _written(func, args, kwargs))


def given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name."""
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the op writes in place."""
    if func._schema.name.rpartition("::")[2] in ("copy_", "zero_", "fill_"):  # only written
        return []
    arguments = given(func, args, kwargs)
    changed = [arguments.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves(changed) if torch.is_tensor(x)]


def _bytes(x: Any) -> int:
    """Return the bytes of a tensor in memory: an expanded one counts once."""
    if not torch.is_tensor(x):
        return 0
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()
