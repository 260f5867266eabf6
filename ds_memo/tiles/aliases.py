"""Aliases of a module's parameters, and an autograd that saves nothing: tiles run so inside an autograd function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.undo import Undoing


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
