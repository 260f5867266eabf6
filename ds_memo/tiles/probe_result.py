"""The result of a layer class's probe: where tokens lie in what goes through the layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ds_memo.remat.layer_call import CannotTile

MATRIX = "its attention makes a matrix of tokens × tokens"


@dataclass(frozen=True)
class Returned:
    """A function's result, of which one leaf is a tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """None in the tensor's place."""
    index: int
    """Position of the tensor among the leaves."""
    dim: int
    """Dimension of its tokens."""
    shape: tuple[int, ...]
    """Shape of the tensor for one sequence and some tokens."""

    def tensor(self, result: Any) -> torch.Tensor:
        return result if isinstance(result, torch.Tensor) else tree_leaves(result)[self.index]

    def new(self, rows: int, tokens: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return memory for the tensor, all of a token side by side: (b, tokens, …)."""
        others = [size for i, size in enumerate(self.shape) if i not in (0, self.dim)]
        return torch.empty(rows, tokens, *others, dtype=dtype, device=device).movedim(1, self.dim)

    @property
    def elements_per_token(self) -> int:
        return math.prod(self.shape) // self.shape[self.dim]

    def only_tensor(self, result: Any) -> torch.Tensor:
        """Return the tensor of a result, if it holds no other. Ulysses returns heads and their dimension as one.

        Raises:
            CannotTile: it holds another, or of another shape.
        """
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        joined = len(tensors) == 1 and tensors[0].dim() == 3 and len(self.shape) == 4 and self.dim == 1
        if joined and tensors[0].shape[2] % self.shape[3] == 0:  # there may be fewer heads
            return tensors[0].unflatten(2, (-1, self.shape[3]))
        if any(tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3] for tensor in tensors[1:]):
            raise CannotTile(MATRIX)
        if len(tensors) != 1 or tensors[0].dim() != len(self.shape):
            raise CannotTile(f"attention returns tensors of the shapes {[tuple(tensor.shape) for tensor in tensors]}")
        return tensors[0]

    def of(self, tensor: torch.Tensor) -> Any:
        """Return a result that holds this tensor."""
        leaves = [*self.leaves]
        leaves[self.index] = tensor
        return tuple(leaves) if self._is_flat else tree_unflatten(leaves, self.spec)

    @functools.cached_property
    def _is_flat(self) -> bool:
        """True for a tuple of leaves, as most attention functions return: it is made in less time."""
        return self.spec == tree_flatten(tuple(self.leaves))[1]


@dataclass(frozen=True)
class AttentionShapes:
    """Where the tokens lie in what a layer class gives to attention and gets from it."""

    arguments: tuple[int | None, ...]
    """By leaf of attention's arguments, the dimension of its tokens."""
    differentiable: tuple[int, ...]
    """The leaves that need a gradient."""
    result: Returned
    """What attention returns."""
    sdpa: bool
    """True if it calls F.scaled_dot_product_attention itself."""


@dataclass(frozen=True)
class Shapes:
    output: Returned
    """What the layer returns."""
    attention: AttentionShapes | None
    """None: it calls no attention."""
    draws: bool
    """True if the layer draws random numbers."""
    mixes: bool
    """True if it has functions that carry something from tile to tile."""
    arrivals: tuple[int, ...] = ()
    """Indices of the layer's parameters in the order in which a backward of the whole layer comes to their gradients."""


def one_tensor(who: str, result: Any, dim: int) -> Returned:
    """Describe what a function returns, of which a tensor has its tokens along `dim`."""
    leaves, spec = tree_flatten(result)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(tensors) != 1:
        raise CannotTile(f"{who} returns {len(tensors)} tensors")
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Returned(spec, rest, tensors[0], dim, tuple(leaves[tensors[0]].shape))


def by_arrival(parameters: Iterable[nn.Parameter], arrivals: Sequence[int]) -> list[nn.Parameter]:
    """Return those of a layer's parameters that are trained, the last to get its gradient first."""
    turns = {index: turn for turn, index in enumerate(arrivals)}
    found = trained_of(parameters)
    return [found[index] for index in sorted(found, key=lambda index: -turns.get(index, len(turns)))]


def trained_of(parameters: Iterable[nn.Parameter]) -> dict[int, nn.Parameter]:
    return {index: parameter for index, parameter in enumerate(parameters) if parameter.requires_grad}
