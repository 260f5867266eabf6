"""Autocast where kernels are called by name: only the functions above them see it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what F.scaled_dot_product_attention makes of these tensors under autocast."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast() -> AbstractContextManager[None]:
    """Multiply in the dtype of the factors inside the block, also where a backward is called under autocast."""
    return torch._C._DisableAutocast()
