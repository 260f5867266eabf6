"""Kinds of passes, by what their memory requests depend on, and the length in which two kinds differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of every tensor that a model is called with."""


class HiddenShape(NamedTuple):
    """Shape of the hidden states that enter a layer."""

    batch: int
    length: int
    rest: tuple[int, ...] = ()
    """The other dimensions, usually the width alone."""


HiddenShapes = tuple[HiddenShape | None, ...]
"""One per kind of layer; None: that kind is not called."""


class PassKind(NamedTuple):
    """A kind of pass. Passes of one kind are expected to request the same memory."""

    shapes: Shapes
    first: bool
    """True if the pass is an optimizer step's first micro-batch. It allocates the gradients; later ones add to them."""
    last: bool
    """True if the pass is known to be the step's last micro-batch, after which gradients are reduced."""
    placements: Any = None
    """The layers' placements, as far as requests depend on them."""


class Length(NamedTuple):
    """The one size in which two kinds differ."""

    here: int
    there: int
    dimensions: tuple[tuple[int, int], ...]
    """(tensor, dimension) of each occurrence."""


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in((args, kwargs)))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree, and those that batch objects in it hold as items or attributes."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif inside := leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", None):
            yield from (value for value in tree_leaves(list(inside.values())) if isinstance(value, torch.Tensor))


def hidden_shape(shapes: Shapes, hidden: HiddenShape, others: Shapes) -> HiddenShape | None:
    """Predict the shape of the hidden states in a model's next call from an earlier call, without running the model.

    Find the dimensions that equalled the hidden states' batch and length in the earlier call, and read them in the new one.

    Args:
        shapes: the earlier call's tensors.
        hidden: the hidden states in the earlier call.
        others: the new call's tensors.

    Returns:
        The new shape, or None if no dimension matched, or the matching dimensions now disagree. With batch 1, a leading dimension
        that equals the length is enough (an image's patches).
    """
    if [len(shape) for shape, _ in shapes] != [len(shape) for shape, _ in others]:
        return None
    pairs = [(here, there) for (here, _), (there, _) in zip(shapes, others, strict=True)]
    found = {there[:2] for here, there in pairs if here[:2] == (hidden.batch, hidden.length)}
    if hidden.batch == 1:
        found |= {(1, there[0]) for here, there in pairs if here[:1] == (hidden.length,)}
    if len(found) != 1:
        return None
    batch, length = found.pop()
    return HiddenShape(batch, length, hidden.rest)


def length_between(here: PassKind, there: PassKind) -> Length | None:
    """Return the one size in which two kinds differ; None if they are equal or differ in more."""
    if here[1:] != there[1:] or [(len(s), dtype) for s, dtype in here.shapes] != [(len(s), dtype) for s, dtype in there.shapes]:
        return None
    dimensions = tuple(
        (t, d)
        for t, ((one, _), (other, _)) in enumerate(zip(here.shapes, there.shapes, strict=True))
        for d in range(len(one))
        if one[d] != other[d]
    )
    sizes = {(here.shapes[t][0][d], there.shapes[t][0][d]) for t, d in dimensions}
    return Length(*sizes.pop(), dimensions) if len(sizes) == 1 else None
