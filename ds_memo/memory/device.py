"""Device memory that is left for activations."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_memo.memory.host import available_bytes, ranks_on_node
from ds_memo.units import GIB

UNSEEN = 0.50
"""Headroom of the first step, as a share, before head, loss and optimizer are measured: logits can be larger than all kept
outputs."""
DRIVER_BYTES = GIB
"""Free device memory that not even a budget without headroom takes, unless the user gives one; twice that with NCCL."""
DRIVER_SHARE = 0.05
"""Most of the free memory for that. A budget with headroom must not be larger."""
LOSES_MORE = 1.25
"""Bytes that torch's allocator loses between blocks in later passes, relative to the first step."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WHOLE_MIB = 32
_LIMIT = "max_split_size_mb:"
_WHOLE = f"{_LIMIT}{_WHOLE_MIB}"
_asked, _given = False, ""
"""The latest wish, and the settings that were made here."""


def keep_blocks_whole(device: torch.device, on: bool) -> None:
    """Stop torch's allocator from splitting blocks of more than 32 MiB, or allow it again.

    A block that was never split can go back to the device when another size is needed. So no memory is lost between blocks, at
    the price of more cudaMalloc calls. For passes whose addresses are not planned yet.

    Does nothing on a CPU, if the environment configures the allocator (PyTorch: "Optimizing memory usage with
    PYTORCH_CUDA_ALLOC_CONF"), if a limit was set at run time, or if a large block is split already.
    """
    global _asked, _given
    if device.type != "cuda" or on == _asked or any(map(os.environ.get, _SETTINGS)):
        return
    _asked = on
    now = _settings()  # torch drops those that a new text lacks
    if on and not any(setting.startswith(_LIMIT) for setting in now) and not _split_segments():
        now.append(_WHOLE)
    elif not on and _WHOLE in now and _WHOLE in _given:
        now.remove(_WHOLE)
    else:
        return
    _given = ",".join(now)
    torch._C._accelerator_setAllocatorSettings(_given)  # torch.cuda's function is deprecated


def _settings() -> list[str]:
    """Return the settings of torch's allocator, also those that were made at run time."""
    tells = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: _given)  # an older PyTorch does not
    return [setting for setting in tells().split(",") if setting]


def _blocks_are_whole() -> bool:
    return _WHOLE in _settings()


def join_split_blocks(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """Move these tensors out of the blocks that torch's allocator has split, and free those blocks.

    ZeRO-3 leaves such blocks when it makes a partitioned model (deepspeed.zero.Init): each partition lies in the block of its
    full parameter. So does an initialization that needs scratch memory, or an evaluation: small tensors and cuBLAS's workspaces
    take parts of what it leaves in torch's cache. Views and aliases stay valid. The bytes pass through the host. Workspaces are
    freed, and made again when cuBLAS is next used. Does nothing on a CPU.
    """
    if device.type != "cuda" or any(map(os.environ.get, _SETTINGS)) or not (split := _split_segments()):
        return
    plain = (x.untyped_storage() for x in tensors if x.layout is torch.strided and not is_traceable_wrapper_subclass(x))
    storages = {storage.data_ptr(): storage for storage in plain if storage.device == device and storage.resizable()}
    moved = []
    torch.cuda.synchronize(device)  # on any stream that wrote them
    try:
        for address, storage in storages.items():
            if any(begin <= address < end for begin, end in split):
                moved.append((storage, storage.nbytes(), storage.cpu()))
                storage.resize_(0)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    finally:
        for storage, nbytes, held in moved:
            storage.resize_(nbytes)
            storage.copy_(held)


def _split_segments() -> list[tuple[int, int]]:
    """Return begin and end of the segments of at least this size that several blocks share.

    With splitting off, torch takes cached blocks of this size for full segments. It would free part of a segment that was split
    before, an error or worse (release_available_cached_blocks in c10/cuda/CUDACachingAllocator.cpp).
    """
    if not torch.cuda.is_initialized():  # the snapshot would make a context, perhaps on another rank's device
        return []
    if split := _large_and_split():  # a block that waits for another stream can be joined with its neighbours
        torch.cuda.empty_cache()
        split = _large_and_split()
    return split


def _large_and_split() -> list[tuple[int, int]]:
    large = (s for s in torch.cuda.memory_snapshot() if s["total_size"] >= _WHOLE_MIB << 20)
    return [(s["address"], s["address"] + s["total_size"]) for s in large if len(s["blocks"]) > 1]


class DeviceBudget(NamedTuple):
    """Bytes that activations may take, and the account of those that they may not."""

    nbytes: int
    """First, so that the least of several budgets is that of the rank with the least bytes."""
    free: int = 0
    """Bytes that torch's allocator could give, within the GiB that are configured."""
    withheld: int = 0
    """Free bytes that are left alone."""
    why: str = ""
    """Why they are; "" where none is."""
    to_come: int = 0
    """Bytes of gradients and optimizer states that do not exist yet."""


def device_budget(
    device: torch.device, device_memory_gib: float | None, to_come: int, headroom: float, lost: int = 0
) -> DeviceBudget:
    """Return the bytes that activations may take, with their account.

    Args:
        device_memory_gib: GiB of the device that this process may use; absent: the free memory. On a CPU, the GiB that
            activations may take.
        to_come: bytes of gradients and optimizer states that do not exist yet.
        headroom: share of the free memory that stays free: HEADROOM, UNSEEN, or 0.
        lost: see `lost_bytes`. LOSES_MORE × lost stays free if that is more than a headroom above 0. Without headroom
            DRIVER_BYTES stay free.
    """
    left = device_free(device)
    if left is None:
        if device_memory_gib is not None:
            given = int(device_memory_gib * GIB)
            return DeviceBudget(given, given)
        left = available_bytes() // ranks_on_node()
    elif device_memory_gib is not None:
        left = max(0, min(left, int(device_memory_gib * GIB) - torch.cuda.memory_allocated(device)))
    withheld, why = left * headroom, f"headroom of {headroom:.0%}" if headroom else ""
    if headroom and LOSES_MORE * lost > withheld:
        withheld, why = LOSES_MORE * lost, f"{LOSES_MORE} x {lost / GIB:.3g} GiB lost between blocks of PyTorch's allocator"
    elif not headroom and device.type == "cuda" and device_memory_gib is None:
        withheld, why = min(_drivers_bytes(), DRIVER_SHARE * left), "for the driver"
    withheld = math.ceil(withheld)
    return DeviceBudget(max(0, left - withheld - to_come), left, withheld, why, to_come)


def _drivers_bytes() -> int:
    """Return bytes that kernels, cuDNN's plans and NCCL's buffers take outside of torch's allocator once they are used."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return DRIVER_BYTES * (2 if distributed and torch.distributed.get_backend() == "nccl" else 1)


def lost_bytes(device: torch.device) -> int:
    """Return torch's peak reserved bytes less its peak requested bytes, since the peaks were reset. 0 on a CPU, and where blocks
    are kept whole or segments expand: the allocator could free the difference."""
    if device.type != "cuda" or _blocks_are_whole() or any(s["is_expandable"] for s in torch.cuda.memory_snapshot()):
        return 0
    stats = torch.cuda.memory_stats(device)
    return stats["reserved_bytes.all.peak"] - stats["requested_bytes.all.peak"]


def device_free(device: torch.device) -> int | None:
    """Return the bytes that torch's allocator can still allocate within set_per_process_memory_fraction; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return min(free + held, int(torch.cuda.get_per_process_memory_fraction(device) * total)) - used


def most_beyond(device: torch.device, known: int) -> int | None:
    """Return torch's peak of allocated bytes less those allocated now and `known` bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    return max(0, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device) - known)


def device_usage(device: torch.device) -> dict[str, int] | None:
    """Return the device's total, free and reserved bytes, for reports; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return {"total": total, "free": free, "held": torch.cuda.memory_reserved(device)}


def states_to_come(model: nn.Module, has_engine: bool) -> int:
    """Return the bytes of gradients, and of Adam's states unless an engine holds them, that the first step will make."""
    missing = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            missing += parameter.numel() * parameter.element_size()
        if not has_engine:
            missing += 8 * parameter.numel()
    return missing
