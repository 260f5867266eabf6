"""What surrounds the run of a tile: aliases of parameters, autocast, and an autograd that saves nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.undo import Undoing

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""Devices, True if autocast is on there, and its dtypes."""


@contextmanager
def aliased(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Have a module use aliases of some of its parameters inside the block; return them."""
    aliases: dict[Any, Any] = {parameter: parameter.detach().requires_grad_() for parameter in parameters}
    places = [
        (inner._parameters, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None and parameter in aliases
    ]

    def put_back() -> None:
        for table, name, parameter in places:
            table[name] = parameter

    with Undoing(put_back):
        for table, name, parameter in places:
            table[name] = aliases[parameter]
        yield list(aliases.values())


def autocast_now() -> Autocast:
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cuda", "cpu"))


@contextmanager
def autocast_as(autocast: Autocast) -> Iterator[None]:
    """Have autocast as it was, inside the block. Its casts of weights are kept for the next tile.

    This does what torch.autocast does, but for the count of such blocks, which Ctrl-C could leave too high.
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


def refuse_create_graph() -> None:
    """Raise MemoError in a backward that is to be differentiated itself: its tiles leave no graph."""
    if torch.is_grad_enabled():
        raise MemoError(
            "a gradient of a gradient (create_graph=True) was asked for, which layers and norms in tiles cannot give. Set "
            "memo.tile_tokens to 0"
        )


def dropping() -> Any:
    """Have autograd save nothing inside the block: the graph of a forward is not used."""
    return torch.autograd.graph.saved_tensors_hooks(_drop, _drop)


def _drop(_: Any) -> None:
    pass
