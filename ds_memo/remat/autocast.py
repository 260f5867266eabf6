"""Autocast: as it was in a forward, and where kernels are called by name, below the functions that see it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ds_memo.remat.undo import Undoing

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""Devices, True if autocast is on there, and its dtypes."""


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


def autocast_now() -> Autocast:
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cuda", "cpu"))


@contextmanager
def autocast_as(autocast: Autocast) -> Iterator[None]:
    """Have autocast as it was, inside the block. Its casts of weights are kept for the next tile.

    torch.autocast does the same, and counts such blocks: Ctrl-C could leave that count too high.
    """
    before = autocast_now()
    if before == autocast:  # the usual case, several times per tile
        yield
        return
    with Undoing(functools.partial(_set_autocast, before)):
        _set_autocast(autocast)
        yield


def _set_autocast(autocast: Autocast) -> None:
    for device, enabled, dtype in autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
