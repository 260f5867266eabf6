"""Find the dimension of tokens in what two tiles of different lengths have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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
