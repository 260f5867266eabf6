"""What a device has left for activations."""

from __future__ import annotations

import torch
from torch import nn

from ds_memo.swap.host_memory import available_bytes, ranks_on_node

GIB = 1 << 30
RESERVE = 0.08
"""Share of what is free that is left to embedding and head, and to what torch's allocator loses between blocks until addresses
are planned: up to 6 % of 16 GiB in the first passes over layers of 7B width."""
UNSEEN = 0.20
"""The same before the first optimizer step, when embedding, head, and the optimizer have not run yet."""


def device_budget(device: torch.device, device_memory_gib: float | None, to_come: int, stepped: bool) -> int:
    """Bytes that activations may take.

    Args:
        device_memory_gib: of the whole device that this process may use; absent: what is free. On a CPU, where parameters and
            activations share what there is, it is what activations may take.
        to_come: bytes of gradients and optimizer states that do not exist yet.
        stepped: an optimizer step has been made, so the rest is known.
    """
    free = device_free(device, device_memory_gib)
    if device.type != "cuda" and device_memory_gib is not None:
        return free
    return max(0, int(free * (1 - (RESERVE if stepped else UNSEEN))) - to_come)


def device_free(device: torch.device, device_memory_gib: float | None) -> int:
    """The same with nothing set aside."""
    if device.type != "cuda":
        return available_bytes(locked=False) // ranks_on_node() if device_memory_gib is None else int(device_memory_gib * GIB)
    free, _ = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    left = free + held - used
    if device_memory_gib is not None:
        left = min(left, int(device_memory_gib * GIB) - used)
    return max(0, left)


def device_seen(device: torch.device) -> dict[str, int] | None:
    """Bytes of the device in all, free, and held by this process, for people; None on a CPU, where the host's count."""
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
