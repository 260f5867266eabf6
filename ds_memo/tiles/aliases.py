"""Aliases of a module's parameters, and an autograd that saves nothing: tiles run so inside an autograd function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.undo import Undoing

ParameterPlace = tuple[dict[str, Any], str, nn.Parameter]
"""A module's table of parameters, a name in it, and the parameter."""


def places_of(module: nn.Module) -> list[ParameterPlace]:
    """Return the places of a module's parameters, in the order of ``module.parameters()``. Some have the same parameter."""
    return [
        (inner._parameters, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None
    ]


@contextmanager
def aliased(every: Sequence[ParameterPlace], parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Have a module use aliases of some of its parameters inside the block; return them.

    Args:
        every: the places of all its parameters.
    """
    aliases: dict[int, Any] = {id(parameter): parameter.detach().requires_grad_() for parameter in parameters}
    places = [place for place in every if id(place[2]) in aliases]

    def put_back() -> None:
        for table, name, parameter in places:
            table[name] = parameter

    with Undoing(put_back):
        for table, name, parameter in places:
            table[name] = aliases[id(parameter)]
        yield list(aliases.values())


def refuse_create_graph() -> None:
    """Raise MemoError in a backward that is to be differentiated itself: its tiles leave no graph."""
    if torch.is_grad_enabled():
        raise MemoError(
            "a gradient of a gradient (create_graph=True) was asked for, which layers and norms in tiles cannot give. Set "
            "memo.tile_tokens to 0"
        )


def dropping() -> Any:
    """Have autograd save nothing inside the block, where no backward uses the graph: a number in the place of each tensor."""
    return torch.autograd.graph.saved_tensors_hooks(id, id)  # builtins: forwards call the first for each tensor
