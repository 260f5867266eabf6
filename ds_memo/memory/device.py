"""What a device has left for activations."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_memo.memory.host import available_bytes, ranks_on_node
from ds_memo.units import GIB

UNSEEN = 0.50
"""The share that is left alone in the first step, before it was seen what head, loss and optimizer take: logits can be larger
than everything that layers keep."""
LOSES_MORE = 1.25
"""How many times more torch's allocator loses between blocks in later passes than it lost in the first step."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WHOLE_MIB = 32
_asked = _blocks_are_whole = False


def keep_blocks_whole(device: torch.device, on: bool) -> None:
    """Have torch's allocator split no block of more than 32 MiB, or undo that.

    A block that is whole can go back to the device when another size is needed: nothing is lost between blocks, at the price of
    more cudaMalloc calls. For passes whose addresses are not planned yet.

    Does nothing on a CPU; where the environment configures the allocator (PyTorch: "Optimizing memory usage with
    PYTORCH_CUDA_ALLOC_CONF"); and where a large block is split already. Replaces settings that were made at run time.
    """
    global _asked, _blocks_are_whole
    if device.type != "cuda" or on == _asked or any(map(os.environ.get, _SETTINGS)):
        return
    _asked = on
    if on == _blocks_are_whole or (on and _split_segments()):
        return
    settings = f"max_split_size_mb:{_WHOLE_MIB}" if on else ""
    torch._C._accelerator_setAllocatorSettings(settings)  # torch.cuda's own is deprecated
    _blocks_are_whole = on


def join_split_blocks(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """Move these tensors out of the blocks that torch's allocator has split, and give those back to the device.

    ZeRO-3 leaves such blocks where it makes a model in pieces (deepspeed.zero.Init): each piece lies in what its whole parameter
    was made in. Views and aliases stay what they are. The bytes pass through the host. Does nothing on a CPU.
    """
    if device.type != "cuda" or any(map(os.environ.get, _SETTINGS)) or not (split := _split_segments()):
        return
    plain = (x.untyped_storage() for x in tensors if x.layout is torch.strided and not is_traceable_wrapper_subclass(x))
    storages = {storage.data_ptr(): storage for storage in plain if storage.device == device and storage.resizable()}
    moved = []
    torch.cuda.synchronize(device)  # whatever stream they were written on
    try:
        for address, storage in storages.items():
            if any(begin <= address < end for begin, end in split):
                moved.append((storage, storage.nbytes(), storage.cpu()))
                storage.resize_(0)
        torch.cuda.empty_cache()
    finally:
        for storage, nbytes, held in moved:
            storage.resize_(nbytes)
            storage.copy_(held)


def _split_segments() -> list[tuple[int, int]]:
    """Where segments of this size begin and end that are shared by several blocks.

    Where blocks must not be split, torch takes cached ones of this size for whole segments: of one that was split before it would
    give a part back to the device, an error or worse (release_available_cached_blocks in c10/cuda/CUDACachingAllocator.cpp).
    """
    if not torch.cuda.is_initialized():  # and the snapshot would make a context, perhaps on another rank's device
        return []
    torch.cuda.empty_cache()
    large = (s for s in torch.cuda.memory_snapshot() if s["total_size"] >= _WHOLE_MIB << 20)
    return [(s["address"], s["address"] + s["total_size"]) for s in large if len(s["blocks"]) > 1]


def device_budget(device: torch.device, device_memory_gib: float | None, to_come: int, headroom: float, lost: int = 0) -> int:
    """Bytes that activations may take.

    Args:
        device_memory_gib: of the whole device that this process may use; absent: what is free. On a CPU, where parameters and
            activations share what there is, it is what activations may take.
        to_come: bytes of gradients and optimizer states that do not exist yet.
        headroom: share of the free memory that is left alone: HEADROOM, UNSEEN, or 0.
        lost: see `lost_bytes`. LOSES_MORE times as much is left alone if that is more than the headroom, which must not be 0.
    """
    left = device_free(device)
    if left is None:
        if device_memory_gib is not None:
            return int(device_memory_gib * GIB)
        return max(0, int(available_bytes() * (1 - headroom)) // ranks_on_node() - to_come)
    if device_memory_gib is not None:
        left = min(left, int(device_memory_gib * GIB) - torch.cuda.memory_allocated(device))
    alone = max(left * headroom, LOSES_MORE * lost) if headroom else 0
    return max(0, int(left - alone) - to_come)


def lost_bytes(device: torch.device) -> int:
    """By how much the peak of what torch's allocator reserved exceeds the peak of what it was asked for, since the peaks were
    reset. 0 on a CPU, and where blocks are kept whole or segments expand: it could have given the difference back."""
    if device.type != "cuda" or _blocks_are_whole or any(s["is_expandable"] for s in torch.cuda.memory_snapshot()):
        return 0
    stats = torch.cuda.memory_stats(device)
    return stats["reserved_bytes.all.peak"] - stats["requested_bytes.all.peak"]


def device_free(device: torch.device) -> int | None:
    """Bytes that torch's allocator could still hand out within this process's limit (set_per_process_memory_fraction); None on a
    CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return min(free + held, int(torch.cuda.get_per_process_memory_fraction(device) * total)) - used


def most_beyond(device: torch.device, known: int) -> int | None:
    """By how much the most that was ever allocated at once exceeds what is allocated now and `known` bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    return max(0, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device) - known)


def device_seen(device: torch.device) -> dict[str, int] | None:
    """Bytes of the device in all, free, and reserved by this process, for reports; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return {"total": total, "free": free, "held": torch.cuda.memory_reserved(device)}


def states_to_come(model: nn.Module, has_engine: bool) -> int:
    """Bytes of gradients, and of Adam's states where no engine holds them already, that the first step will make."""
    missing = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            missing += parameter.numel() * parameter.element_size()
        if not has_engine:
            missing += 8 * parameter.numel()
    return missing
