"""Cut the arguments of a call into those of its tiles, and join tensors of tiles."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_leaves, tree_unflatten

from ds_memo.sequence.masks import Mask
from ds_memo.spans import Span


def part(tensor: torch.Tensor, span: Span, dim: int) -> torch.Tensor:
    """Return a tile's part of a tensor whose tokens lie along `dim`, and whose sequences, if it has any, along dimension 0."""
    tokens = tensor.narrow(dim, span.tokens.start, span.size[1])
    return tokens if dim == 0 or span.size[0] == tensor.shape[0] else tokens[span.rows]


def parts(tensor: torch.Tensor, spans: Sequence[Span], dim: int) -> list[torch.Tensor]:
    """Return all tiles' parts of a tensor, which split() makes in less time than :func:`part` one by one."""
    found: list[torch.Tensor] = []
    for _, tiles in itertools.groupby(spans, lambda span: span.rows.start):
        first, *others = tiles
        rows = tensor if dim == 0 or first.size[0] == tensor.shape[0] else tensor[first.rows]
        found += rows.split([span.size[1] for span in (first, *others)], dim)
    return found


def fill(memory: torch.Tensor, values: torch.Tensor | None) -> None:
    memory.copy_(values) if values is not None else memory.zero_()


def new_whole(tile: torch.Tensor, batch: int, length: int, dim: int) -> torch.Tensor:
    """Return memory for all tokens of what `tile` is a tile of, in the tile's order of dimensions."""
    shape = [length if d == dim else batch if d == 0 else size for d, size in enumerate(tile.shape)]
    strides, step = [0] * tile.dim(), 1
    for d in sorted(reversed(range(tile.dim())), key=lambda dim: (tile.stride(dim), tile.shape[dim])):  # fastest first
        strides[d], step = step, step * shape[d]
    return tile.new_empty_strided(shape, strides)  # no view: the caller of a layer may change its output in place


class Place(NamedTuple):
    """Where the tokens of an argument lie."""

    tokens: int
    """Dimension of the tokens."""
    rows: int | None
    """Dimension of the sequences; None: the tensor has none, or one for all."""

    def cut(self, tensor: torch.Tensor, span: Span) -> torch.Tensor:
        tile = tensor.narrow(self.tokens, span.tokens.start, span.size[1])
        return tile if self.rows is None else tile.narrow(self.rows, span.rows.start, span.size[0])


class Arguments:
    """A layer call's arguments but its hidden states, of which a tile gets its part.

    Args:
        args, kwargs: of the call. Hidden states (b, s, h) come first, or as ``hidden_states``.
        like: arguments of which these are a part, and whose places they have; None: shapes tell the places.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], like: Arguments | None = None) -> None:
        self._leaves, self._spec = tree_flatten(_others(args, kwargs))
        self._hidden_first = bool(args)
        self.hidden = hidden_states(args, kwargs)
        self.batch, self.length = self.hidden.shape[:2]
        self._places: list[Place | None] = like._places if like else [self._place(leaf) for leaf in self._leaves]
        self._inputs: list[int] = []
        """Leaves that tiles get as leaves of their graphs."""
        self._tiles: dict[Any, tuple[tuple, dict[str, Any], dict[int, torch.Tensor]]] | None = None
        """Arguments of tiles, cut once for all passes. None: lists or dicts are among them, which a tile may change."""
        values = [one for value in (*args, *kwargs.values()) for one in (value if type(value) is tuple else (value,))]
        if all(map(tree_is_leaf, values)):
            self._tiles = {}

    @property
    def size(self) -> tuple[int, int]:
        """Sequences and their length."""
        return self.batch, self.length

    def take_hidden(self) -> torch.Tensor:
        """Return the hidden states, and hold them no longer: arguments live as long as the call's graph."""
        hidden, self.hidden = self.hidden, None
        return hidden

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    @property
    def others(self) -> list[str]:
        """Types of arguments that are no tensors, numbers or texts: a cache of keys and values, say."""
        plain = (torch.Tensor, bool, int, float, str, type(None), Mask)
        return [type(leaf).__name__ for leaf in self._leaves if not isinstance(leaf, plain)]

    def signature(self, masks: bool = True) -> Any:
        """Return a key for what this class sees of the arguments but sizes: calls of one signature are cut alike.

        Args:
            masks: False: a tensor that tiles get whole is none. Under Ulysses a mask is of the rank's part alone, some ranks have
                one and others not, and attention drops it.
        """

        def of_leaf(leaf: Any, place: Place | None) -> Any:
            if isinstance(leaf, torch.Tensor):
                return (leaf.dim(), leaf.requires_grad) if masks or place is not None else type(None)
            return leaf if isinstance(leaf, bool) else type(leaf)

        leaves = map(of_leaf, self._leaves, self._places)
        return self._spec, self._hidden_first, self.batch > 1, tuple(leaves), tuple(self._places)

    def differentiable(self) -> list[torch.Tensor]:
        pairs = zip(self._leaves, self._places, strict=True)
        return [leaf for leaf, place in pairs if place is not None and leaf.requires_grad]

    def move(self, moved: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Put ``moved(tensor, dimension of its tokens)`` in the place of each tensor that has tokens."""
        pairs = zip(self._leaves, self._places, strict=True)
        self._leaves = [leaf if place is None else moved(leaf, place.tokens) for leaf, place in pairs]

    def detach(self) -> list[torch.Tensor]:
        """Return the tensors that are cut and need a gradient. Hold detached ones from now on, of which tiles get leaves."""
        found, places = self.differentiable(), enumerate(self._places)
        self._inputs = [index for index, place in places if place is not None and self._leaves[index].requires_grad]
        for index in self._inputs:
            self._leaves[index] = self._leaves[index].detach()
        return found

    def new_gradients(self) -> list[torch.Tensor]:
        """Return zeros for the gradients of the tensors that were detached."""
        return [torch.zeros_like(self._leaves[i], memory_format=torch.contiguous_format) for i in self._inputs]

    def add(self, totals: Sequence[torch.Tensor], span: Span, gradients: Sequence[torch.Tensor | None]) -> None:
        for index, total, gradient in zip(self._inputs, totals, gradients, strict=True):
            if gradient is not None:
                self._places[index].cut(total, span).add_(gradient)  # type: ignore[union-attr]

    def tile(self, hidden: torch.Tensor, span: Span) -> tuple[tuple, dict[str, Any], dict[int, torch.Tensor]]:
        """Return the arguments of a tile, and by the id of each tensor that was cut the tensor that it was cut from.

        Args:
            hidden: the tile's hidden states.
        """
        key = span.rows.start, span.tokens.start, span.size
        if self._tiles is None or self._inputs:
            args, kwargs, wholes = self._cut(span)
        elif (known := self._tiles.get(key)) is not None:
            args, kwargs, wholes = known
        else:
            args, kwargs, wholes = self._tiles[key] = self._cut(span)
        return *self._with_hidden(hidden, args, kwargs), wholes

    def _cut(self, span: Span) -> tuple[tuple, dict[str, Any], dict[int, torch.Tensor]]:
        leaves, wholes = list(self._leaves), {}
        for index, (whole, place) in enumerate(zip(self._leaves, self._places, strict=True)):
            if place is not None:
                tile = leaves[index] = place.cut(whole, span)
                if index in self._inputs:
                    leaves[index] = tile.detach().requires_grad_()
                else:
                    wholes[id(tile)] = whole
        return *tree_unflatten(leaves, self._spec), wholes

    def inputs(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a tile's arguments that need a gradient, but for the hidden states."""
        if not self._inputs:
            return []
        leaves = tree_leaves(_others(args, kwargs))
        return [leaves[index] for index in self._inputs]

    def first(self, hidden: torch.Tensor) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call with the first tokens of the first sequences alone: copies, which the call may change.

        Args:
            hidden: their hidden states (sequences, tokens, h).
        """
        rows, tokens = hidden.shape[:2]
        span = Span(slice(0, rows), slice(0, tokens))

        def cut(value: Any, place: Place | None) -> Any:
            if not isinstance(value, torch.Tensor):
                return _copied(value)
            if place is not None:
                return place.cut(value, span).detach().clone().requires_grad_(value.requires_grad)
            if value.shape[-2:] != (self.length, self.length):
                return value.detach().clone()
            mask = value[..., :tokens, :tokens]
            return (mask[:rows] if mask.dim() > 2 and mask.shape[0] == self.batch else mask).detach().clone()

        leaves = [cut(*pair) for pair in zip(self._leaves, self._places, strict=True)]
        return self._with_hidden(hidden, *tree_unflatten(leaves, self._spec))

    def _with_hidden(self, hidden: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return ((hidden, *args), dict(kwargs)) if self._hidden_first else (args, {"hidden_states": hidden, **kwargs})

    def _place(self, value: Any) -> Place | None:
        """Return where the tokens of an argument lie; None: it has none, or two for each value (a mask): tiles get the whole."""
        if not is_dense(value):
            return None
        shape, of_sequences = tuple(value.shape), (1, self.batch)
        table = len(shape) == 3 and shape[0] in of_sequences and value.is_floating_point()  # (1, s, d) and d is s
        if shape[-2:] == (self.length, self.length) and len(shape) > 3:
            return None
        if shape.count(self.length) > 1 + (self.batch == self.length) and not table:
            return None
        for dim in (1, 2):
            if len(shape) > dim and shape[dim] == self.length and shape[dim - 1] in of_sequences:
                return Place(dim, dim - 1 if shape[dim - 1] > 1 else None)
        return Place(0, None) if shape[:1] == (self.length,) else None


def _others(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}


def _copied(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # a process group, say
        return value


def hidden_states(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a layer call's hidden states; None: it has none."""
    return args[0] if args else kwargs.get("hidden_states")


def is_dense(value: Any) -> bool:
    """Return True for a tensor whose sequences are equally long. Without gradients, PyTorch's encoders leave out padding."""
    return isinstance(value, torch.Tensor) and not value.is_nested
