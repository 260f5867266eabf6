"""Compare a layer in tiles with the whole layer: what attention gets, outputs and gradients, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_memo.remat.autocast import autocast_now
from ds_memo.remat.layer_call import CannotTile
from ds_memo.tiles.check.choices import Choices

_NEAR = 4
"""Tokens on each side of a cut, where what mixes tokens shows first."""
MOST_FLIPPED = 0.05
"""Share of tokens that a GEMM of another size may flip: an activation's input goes to the other side of its kink (ReLU), which
shows in gradients alone."""


def compare(expected: torch.Tensor, found: torch.Tensor, leaves: list[torch.Tensor], cuts: list[int], choices: Choices) -> None:
    """Refuse a layer if tiles give other outputs or gradients than the whole.

    A token's gradient may differ by chance (an activation's kink). Gradients of parameters are compared without such tokens.
    """
    tolerance = tolerance_of(leaves[0])
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected)

    def backward(gradient: torch.Tensor) -> list[tuple[torch.Tensor | None, ...]]:
        return [torch.autograd.grad(y, leaves, gradient, retain_graph=True, allow_unused=True) for y in (expected, found)]

    whole, tiled = backward(gradient)
    off = _off(whole[0], tiled[0], tolerance)
    whole, tiled = backward(gradient.masked_fill(off[..., None], 0))
    mixes = "something besides attention mixes its tokens"
    if not choices.are_alike(tolerance):
        raise CannotTile(f"tiles choose other experts than the whole: {mixes}")
    if _off(expected, found, tolerance).any():
        raise CannotTile(f"tiles give other outputs than the whole: {mixes}")
    if _at_every_cut(off, cuts) or off.sum() > max(1, MOST_FLIPPED * off.numel()):
        raise CannotTile(f"tiles give other gradients of its input than the whole: {mixes}")
    largest = max((g.float().norm() for g in whole if g is not None), default=0)
    for a, b in zip(whole, tiled, strict=True):
        if (a is None) != (b is None) or (
            a is not None and (a.float() - b.float()).norm() > tolerance * max(a.float().norm(), 1e-3 * largest)
        ):
            raise CannotTile("tiles give other gradients of its parameters than the whole")


def refuse_others(whole: list[Any], gathered: list[Any], tolerance: float) -> None:
    """Refuse a layer if what attention gets from tiles, joined, is not what it gets from the whole."""
    for a, b in zip(whole, gathered, strict=True):
        if not isinstance(a, torch.Tensor):
            continue
        if a.shape != b.shape:
            raise CannotTile(f"attention gets a tensor of shape {tuple(b.shape)} by tiles, {tuple(a.shape)} by the whole")
        scale = float(a.detach().double().square().mean().sqrt()) if a.requires_grad else 1.0
        within = 10 * tolerance * scale if math.isfinite(scale) else tolerance
        if not torch.allclose(a.double(), b.double(), tolerance, within, equal_nan=True):
            raise CannotTile("attention gets other values by tiles than by the whole: something before it mixes its tokens")


def is_by_token(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """Return True if a function of hidden states (b, s, h) gives a few tokens the same values at once and one by one."""
    few = x.detach()[:2, : 2 * _NEAR]
    with torch.no_grad():
        at_once = function(few)
        one_by_one = torch.cat([function(token) for token in few.split(1, 1)], 1)
    tolerance = tolerance_of(x)
    return at_once.shape == one_by_one.shape and torch.allclose(at_once, one_by_one, tolerance, tolerance, equal_nan=True)


def tolerance_of(x: torch.Tensor) -> float:
    """Return the share of its size that a value of the layer may be off in another GEMM."""
    dtypes = [x.dtype, *(dtype for _, enabled, dtype in autocast_now() if enabled)]
    return max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5


def _off(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return for each token (b, s) whether two values of it differ."""
    return (a.float() - b.float()).norm(dim=-1) > tolerance * a.float().norm(dim=-1).square().mean().sqrt()


def _at_every_cut(off: torch.Tensor, cuts: Sequence[int]) -> bool:
    """Return True if a token differs at the same distance from every cut, as where tokens are mixed; by chance few do."""
    length = off.shape[1]
    by_distance = ([cut + near for cut in cuts if 0 <= cut + near < length] for near in range(-_NEAR, _NEAR))
    return any(places and bool(off[:, places].all()) for places in by_distance)
