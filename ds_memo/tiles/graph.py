"""Autograd's graph of a tile: its nodes, and a check that it ends at the tile's own leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import Node

from ds_memo.remat import follower
from ds_memo.remat.layer_call import CannotTile
from ds_memo.tiles.attention_call import UNDER_A_CHECKPOINT


def graph_of(outputs: Sequence[torch.Tensor]) -> Iterator[tuple[Node, tuple[tuple[Node | None, int], ...]]]:
    """Yield each node of the graph that made these tensors, and its `next_functions`."""
    todo = list({output.grad_fn for output in outputs if output.grad_fn is not None})  # two outputs may be of one node
    seen = set(todo)
    while todo:
        node = todo.pop()
        next_functions = node.next_functions
        yield node, next_functions
        for below, _ in next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)


def refuse_other_gradients(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Refuse a layer if autograd leads from its results to other tensors than these leaves: it would end at a tile."""
    library = follower.library()
    found = (_leads_to if library is None else library.leads_to)([*results], [*leaves])
    if found == "checkpoint":
        raise CannotTile(UNDER_A_CHECKPOINT)
    if found:
        raise CannotTile("a tensor that is neither its argument nor its parameter needs a gradient")


def _leads_to(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> str:
    """Return where autograd leads from these results: to "another leaf" than those, to a reentrant "checkpoint", or to neither.

    ops/csrc/tiles.h does the same.
    """
    known = {id(leaf) for leaf in leaves}
    found = [result for result in results if result.requires_grad and result.is_leaf]
    for node, below in graph_of(results):
        if not below:
            found.append(getattr(node, "variable", None))
        elif node.name() == "CheckpointFunctionBackward":
            return "checkpoint"
    return "another leaf" if any(leaf is not None and id(leaf) not in known for leaf in found) else ""
