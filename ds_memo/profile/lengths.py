"""Kinds of passes by the shapes of their inputs, and the one length in which two kinds may differ."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

Kind = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of every tensor that a model is called with."""


class Length(NamedTuple):
    """A size that two kinds differ in, wherever it stands."""

    here: int
    there: int
    places: tuple[tuple[int, int], ...]
    """(tensor, dimension) of each."""


def kind_of_pass(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    return tuple((tuple(x.shape), x.dtype) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))


def length_between(here: Kind, there: Kind) -> Length | None:
    """None where the kinds are equal, or differ in more than one size."""
    if [(len(shape), dtype) for shape, dtype in here] != [(len(shape), dtype) for shape, dtype in there]:
        return None
    places = tuple(
        (t, d)
        for t, ((mine, _), (theirs, _)) in enumerate(zip(here, there, strict=True))
        for d in range(len(mine))
        if mine[d] != theirs[d]
    )
    sizes = {(here[t][0][d], there[t][0][d]) for t, d in places}
    return Length(*sizes.pop(), places) if len(sizes) == 1 else None
