"""Small helpers for tensors and trees of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

_CONTAINERS = frozenset((tuple, list, dict))
_LEAVES = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


def storage_of(tensor: torch.Tensor) -> int:
    """Return the id of the tensor's storage, the same for all its views; 0: it has no storage (sparse)."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter, which an in-place change raises; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):  # a layer's usual output
        return [tree]
    found: list[torch.Tensor] = []
    _add_leaves(tree, found)
    return found


def _add_leaves(tree: Any, found: list[torch.Tensor]) -> None:
    if type(tree) in _CONTAINERS:  # torch's pytree takes ten times as long
        for value in tree.values() if type(tree) is dict else tree:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif type(value) not in _LEAVES:
                _add_leaves(value, found)
    elif isinstance(tree, tuple) or type(tree) in SUPPORTED_NODES:  # named tuples, and what packages have registered
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    """Return a view of `value` outside the graph. Autograd ties `value` itself into the graph, which it would keep alive."""
    return value.detach() if isinstance(value, torch.Tensor) else value
