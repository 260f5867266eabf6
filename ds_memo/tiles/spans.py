"""Spans: which tokens of a call make a tile, and the cutting and joining of tensors along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ds_memo.units import round_up

EVEN = 128
"""Tokens. Longer tiles are multiples of it, so that a batch has tiles of two lengths at most and GEMMs are aligned."""


@dataclass(frozen=True)
class Span:
    """Tokens of one tile: sequences `rows` of the batch, and of these the positions `tokens`."""

    rows: slice
    tokens: slice

    @property
    def size(self) -> tuple[int, int]:
        """Sequences and positions."""
        return self.rows.stop - self.rows.start, self.tokens.stop - self.tokens.start


def spans(batch: int, length: int, tile_tokens: int) -> list[Span]:
    """Divide (batch, length) tokens into tiles of at most `tile_tokens`, all but the last of a sequence equally long.

    A tile is a part of one sequence, or several whole sequences, so that its memory has no gaps.
    """
    if tile_tokens >= length:
        rows = math.ceil(batch / math.ceil(batch / (tile_tokens // length)))
        return [Span(slice(i, min(i + rows, batch)), slice(0, length)) for i in range(0, batch, rows)]
    even = math.ceil(length / math.ceil(length / tile_tokens))
    step = min(round_up(even, EVEN), tile_tokens) if even > EVEN else even
    starts = range(0, length, step)
    return [Span(slice(i, i + 1), slice(j, min(j + step, length))) for i in range(batch) for j in starts]


def part(tensor: torch.Tensor, span: Span, dim: int) -> torch.Tensor:
    """Return a tile's part of a tensor whose tokens lie along `dim`, and whose sequences, if it has any, along dimension 0."""
    tokens = tensor.narrow(dim, span.tokens.start, span.tokens.stop - span.tokens.start)
    return tokens if dim == 0 else tokens[span.rows]


def fill(memory: torch.Tensor, values: torch.Tensor | None) -> None:
    """Write values into memory; None: zeros."""
    memory.copy_(values) if values is not None else memory.zero_()


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from slowest to fastest in memory."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True))


def new_whole(tile: torch.Tensor, batch: int, length: int, dim: int) -> torch.Tensor:
    """Return memory for all tokens of what `tile` is a tile of, in the tile's order of dimensions."""
    shape = [length if d == dim else batch if d == 0 else size for d, size in enumerate(tile.shape)]
    strides, step = [0] * tile.dim(), 1
    for d in reversed(order_of(tile)):
        strides[d], step = step, step * shape[d]
    return tile.new_empty_strided(shape, strides)  # no view: the caller of a layer may change its output in place


class Arguments:
    """A layer call's arguments but its hidden states, of which a tile gets its part.

    Args:
        args, kwargs: of the call. Hidden states (b, s, h) come first, or as ``hidden_states``.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}
        self._hidden_first = bool(args)
        self.batch, self.length = hidden_states(args, kwargs).shape[:2]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves((self._args, self._kwargs)) if isinstance(leaf, torch.Tensor)]

    def tile(self, hidden: torch.Tensor, span: Span) -> tuple[tuple, dict[str, Any], dict[int, torch.Tensor]]:
        """Return the arguments of a tile, and by the id of each tensor that was cut the tensor that it was cut from.

        Args:
            hidden: the tile's hidden states.
        """
        wholes: dict[int, torch.Tensor] = {}

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or self._token_dim(value) is None:
                return value
            tile = self._cut(value, span)
            wholes[id(tile)] = value
            return tile

        args, kwargs = tree_map(cut, (self._args, self._kwargs))
        return *self._with_hidden(hidden, args, kwargs), wholes

    def first(self, hidden: torch.Tensor) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a call with the first tokens of the first sequence alone.

        Args:
            hidden: their hidden states (1, tokens, h).
        """
        span = Span(slice(0, 1), slice(0, hidden.shape[1]))

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if self._token_dim(value) is not None:
                return self._cut(value, span)
            if value.shape[-2:] != (self.length, self.length):
                return value
            mask = value[..., : hidden.shape[1], : hidden.shape[1]]
            return mask[:1] if mask.dim() > 2 else mask

        return self._with_hidden(hidden, *tree_map(cut, (self._args, self._kwargs)))

    def _with_hidden(self, hidden: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return ((hidden, *args), kwargs) if self._hidden_first else (args, {"hidden_states": hidden, **kwargs})

    def _cut(self, value: torch.Tensor, span: Span) -> torch.Tensor:
        dim = self._token_dim(value)
        tile = value.narrow(dim, span.tokens.start, span.tokens.stop - span.tokens.start)
        if dim and self.batch > 1 and value.shape[dim - 1] == self.batch:
            tile = tile.narrow(dim - 1, span.rows.start, span.rows.stop - span.rows.start)
        return tile

    def _token_dim(self, tensor: torch.Tensor) -> int | None:
        """Return the dimension of a tensor's tokens; None: it has none, or two (a mask), and every tile gets the whole."""
        table = (tensor.dim() == 3 and tensor.shape[0] in (1, self.batch)) or (tensor.dim() == 2 and self.batch == self.length)
        if tensor.shape[-2:] == (self.length, self.length) and not table:  # (b, s, d) may be as wide as it is long
            return None
        for dim in (1, 2):
            if tensor.dim() > dim and tensor.shape[dim] == self.length and tensor.shape[dim - 1] in (1, self.batch):
                return dim
        return 0 if tensor.dim() and tensor.shape[0] == self.length else None


def hidden_states(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a layer call's hidden states; None: it has none."""
    return args[0] if args else kwargs.get("hidden_states")


def token_dims(short: Sequence[Any], long: Sequence[Any], lengths: tuple[int, int]) -> list[int | None]:
    """Return the dimension of tokens for each value that two tiles of different lengths have; None: it has none.

    Raises:
        ValueError: a value depends on the tile in another way. The message names it.
    """
    if len(short) != len(long):
        raise ValueError(f"{len(short)} values in a tile of {lengths[0]} tokens, {len(long)} in one of {lengths[1]}")
    return [_token_dim_of(*pair, lengths) for pair in zip(short, long, strict=True)]


def _token_dim_of(short: Any, long: Any, lengths: tuple[int, int]) -> int | None:
    if not isinstance(short, torch.Tensor) or not isinstance(long, torch.Tensor):
        if short is not long and not (type(short) is type(long) and short == long):
            raise ValueError(f"{short!r} in a tile of {lengths[0]} tokens, {long!r} in one of {lengths[1]}")
        return None
    if short is long or (short.shape == long.shape and short.data_ptr() == long.data_ptr()):
        return None
    if short.shape == long.shape and not short.requires_grad and torch.equal(short, long):
        return None
    dims = [dim for dim, sizes in enumerate(zip(short.shape, long.shape, strict=False)) if sizes[0] != sizes[1]]
    if short.dim() != long.dim() or len(dims) != 1 or (short.shape[dims[0]], long.shape[dims[0]]) != lengths:
        raise ValueError(
            f"a tensor of shape {tuple(short.shape)} in a tile of {lengths[0]} tokens, {tuple(long.shape)} in {lengths[1]}"
        )
    return dims[0]
