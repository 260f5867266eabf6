"""Kernel times on the emulated device: each op by its FLOPs or its bytes, at the rates of `ds-memo estimate`.

Attention takes the time of the kernel behind its op: cuDNN's, FlashAttention-2's, or that of the implementation that is active
for flash ops. Flash attention called outright, with cu_seqlens and windows, has the pairs of tokens that it sees; cu_seqlens that
came from the host are read where the emulator's device keeps them. Ops of ds_memo take the time of the ops inside. A product of
bitsandbytes takes that of PyTorch's, and the bytes of unpacking its weight. A product also
takes the bytes of the matrix that it adds to, as sums of weight gradients in fp32 do. No kernel takes less than LAUNCH_FLOOR_S,
those that no op shows (Triton's) among them.

The emulator's streams, events and queues keep time (emulator.cpp); this says how long each kernel keeps its stream busy. So the
commands of a real CUDA build of torch run in their real order and with their real events. The result shows what waits
for what, and how a rate changes it. No kernel runs, and these are no times of a GPU.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from ds_memo.estimate import hardware, kernels
from ds_memo.estimate.adapters import NF4_BYTES
from ds_memo.remat import op_policy
from ds_memo.remat.functions import SkipsCompiled
from ds_memo.units import GIB

aten = torch.ops.aten
_FLASH = (aten._flash_attention_forward, aten._flash_attention_backward)
_ON_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
LAUNCH_FLOOR_S = 3e-6
"""Least seconds of a kernel on its stream: from the start of one to the start of the next, as profilers show small kernels behind
each other. Assumed, and the same for all rivals."""


LOCK_S_PER_GIB, UNLOCK_S_PER_GIB = 0.25, 0.05
"""Seconds in which the driver locks and unlocks a GiB of host memory whose pages exist. Assumed: 4 and 20 GiB a second."""
BLOCK_S = 3e-4
"""Seconds in which it makes or frees a block of device memory. Assumed. A cudaFree waits for the device, too."""


class Clock:
    """The emulator's clock, which all code in this process sees."""

    def __init__(self, machine: hardware.Hardware) -> None:
        self.machine = machine
        self.attention = collections.Counter[tuple[str, str]]()
        """Calls of attention, by kernel and op."""
        self._emulator = ctypes.CDLL("libcuda.so.1")
        self._emulator.emulated_links.argtypes = [ctypes.c_double] * 2
        self._emulator.emulated_boost.argtypes = [ctypes.c_double] * 2
        self._emulator.emulated_floor.argtypes = [ctypes.c_double]
        self._emulator.emulated_work.argtypes = [ctypes.c_void_p, ctypes.c_double]
        self._emulator.emulated_now.restype = ctypes.c_double
        self._emulator.emulated_at.argtypes = [ctypes.c_void_p]
        self._emulator.emulated_at.restype = ctypes.c_double
        self._emulator.emulated_host_waits_until.argtypes = [ctypes.c_double]
        self._emulator.emulated_host_waits.restype = ctypes.c_size_t
        self._emulator.emulated_driver.argtypes = [ctypes.c_double] * 3
        self._emulator.emulated_kernels.restype = ctypes.c_size_t
        self._emulator.emulated_floor(LAUNCH_FLOOR_S)
        self._emulator.emulated_driver(LOCK_S_PER_GIB / GIB, UNLOCK_S_PER_GIB / GIB, BLOCK_S)
        self.link_share(1.0)

    def link_share(self, share: float) -> None:
        """Give copies this share of the link's rate from now on, as if others used the link too."""
        self._emulator.emulated_links(share * self.machine.d2h, share * self.machine.h2d)

    def boost(self, seconds: float, slower: float) -> None:
        """Have ops take `slower` times as long once the device has worked for these seconds without a pause."""
        self._emulator.emulated_boost(seconds, slower)

    def now(self) -> float:
        """Seconds on the host."""
        return self._emulator.emulated_now()

    def at(self, event: torch.Event) -> float:
        """Seconds at which a recorded event is complete."""
        return self._emulator.emulated_at(event.event_id)

    def host_waits_until(self, seconds: float) -> None:
        """Have the host wait for something that is none of the device's."""
        self._emulator.emulated_host_waits_until(seconds)

    def host_waits(self) -> int:
        """Number of times that the host has waited for the device."""
        return self._emulator.emulated_host_waits()

    def kernels(self) -> int:
        """Number of kernels that were launched."""
        return self._emulator.emulated_kernels()

    def begin_op(self) -> None:
        """Tell the emulator that the kernels launched from now on are those of one op."""
        self._emulator.emulated_op()

    def spend(self, seconds: float) -> None:
        """Add the seconds of an op to the current stream, behind its queued work. Floors of its kernels are part of them."""
        self._emulator.emulated_work(torch.cuda.current_stream().cuda_stream, seconds)


class Costs(SkipsCompiled):
    """Charges each op's time to the stream that it was launched on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ds_memo":
            return run_inside(self, func, args, kwargs)
        self.clock.begin_op()
        result = func(*args, **kwargs)
        if kernel := kernels.kernel_of(func._overloadpacket):
            self.clock.attention[kernel, func._schema.name.removeprefix("aten::")] += 1
        if seconds := cost_s(func, args, kwargs, result, self.clock.machine):
            self.clock.spend(seconds)
        return result


def run_inside(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that came to a mode, so that the ops in it come to the mode, too."""
    _push_mode(mode)
    try:
        return func.redispatch(_ON_DEVICE, *args, **kwargs)
    finally:
        _pop_mode()


def cost_s(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, machine: hardware.Hardware) -> float:
    """Return the seconds of one op's kernels; the emulator itself times copies over the link."""
    tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
    if not any(x.is_cuda for x in tensors) or any(not x.is_cuda and x.dim() for x in tensors):
        return 0.0
    if func._overloadpacket in _FLASH:
        return _flash_s(func, args, kwargs, machine)
    if func.name() in op_policy.QUANTIZED_NAMES:
        unpacked_s = (NF4_BYTES + 2) * math.prod(args[2]) / (machine.device_bandwidth * machine.device_bandwidth_efficiency)
        return op_policy.gemm_flops(func, args, result) / (machine.peak * machine.gemm_efficiency) + unpacked_s
    return kernels.cost_s(func, args, kwargs, result, machine)


def _flash_s(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], machine: hardware.Hardware) -> float:
    given = kernels.given(func, args, kwargs)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if given.get("cum_seq_q") is None:
        lengths = [(query.shape[1], key.shape[1])] * query.shape[0]
    else:
        lengths = list(zip(*(_lengths(given[name]) for name in ("cum_seq_q", "cum_seq_k")), strict=True))
    limits = [-1 if given.get(f"window_size_{side}") is None else given[f"window_size_{side}"] for side in ("left", "right")]
    limits = [limits[0], 0] if given["is_causal"] else limits
    seen = sum(_pairs(of_query, of_key, *limits) for of_query, of_key in lengths)
    flops = 2.0 * seen * query.shape[-2] * (key.shape[-1] + value.shape[-1])
    packet = func._overloadpacket
    return kernels.attention_s(flops, kernels.kernel_of(packet), packet is _FLASH[1], machine)


def _lengths(borders: torch.Tensor) -> list[int]:
    """Return the lengths of sequences by cu_seqlens (int32)."""
    values = (ctypes.c_int32 * len(borders)).from_address(borders.data_ptr())
    return [stop - start for start, stop in itertools.pairwise(values)]


@functools.lru_cache(maxsize=4096)
def _pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Return how many pairs flash attention computes; the last query stands at the last key. -1: no limit."""
    at = np.arange(queries) + keys - queries
    first = np.maximum(at - left, 0) if left >= 0 else np.zeros_like(at)
    last = np.minimum(at + right, keys - 1) if right >= 0 else np.full_like(at, keys - 1)
    return int(np.maximum(last - first + 1, 0).sum())


@contextmanager
def keeping_time(machine: hardware.Hardware) -> Iterator[Clock]:
    """Within the block, kernels and copies take this machine's time, in ds_memo's measurements too."""
    from ds_memo.profile import bandwidth
    from ds_memo.runtime import steps

    clock, modules = Clock(machine), (bandwidth, steps)
    theirs = [module.time for module in modules]
    for module in modules:  # what they time with the host's clock
        module.time = SimpleNamespace(perf_counter=clock.now)
    try:
        with Costs(clock):
            yield clock
    finally:
        for module, time in zip(modules, theirs, strict=True):
            module.time = time
