"""Kinds of passes: what their memory requests depend on, and the one length in which two kinds may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of every tensor that a model is called with."""


class HiddenShape(NamedTuple):
    """Of the hidden states that come into a layer."""

    batch: int
    length: int
    rest: tuple[int, ...] = ()
    """Their width, as a rule."""
    source: int = 0
    """Tokens of each sequence that the layer attends to beside its own, an encoder's; 0: none, or as many as its own."""


HiddenShapes = tuple[HiddenShape | None, ...]
"""By the kind of layer; None: it is not called."""


class PassKind(NamedTuple):
    """Passes of one kind are expected to ask for the same memory."""

    shapes: Shapes
    first: bool
    """The first micro-batch of an optimizer step: its gradients stay, those of the others are added to them."""
    last: bool
    """Known to be the last one, after which gradients are reduced."""
    placements: Any = None
    """What is done with each layer, as far as requests depend on it."""


class Length(NamedTuple):
    """A size that two kinds differ in, wherever it stands."""

    here: int
    there: int
    places: tuple[tuple[int, int], ...]
    """(tensor, dimension) of each."""


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in((args, kwargs)))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Also those that batch objects in it hold as items or attributes."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif inside := leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", None):
            yield from (value for value in tree_leaves(list(inside.values())) if isinstance(value, torch.Tensor))


def hidden_shape(shapes: Shapes, hidden: HiddenShape, others: Shapes) -> HiddenShape | None:
    """Predict the shape of the hidden states in a call of a model, without calling it, from an earlier call.

    Dimensions of the earlier call's tensors that equalled the hidden states' batch and length are looked up in the new call's.

    Args:
        shapes: the tensors of the earlier call.
        hidden: the hidden states in that call.
        others: the tensors of the new call.

    Returns:
        The new shape. Where the batch is 1, the length alone may be found (an image's patches). The source is looked up too; one
        that no dimension equalled (of sound, of pictures) is taken to be unchanged if nothing else has changed. None if nothing
        equalled them, or the places where something did disagree now.
    """
    if [len(shape) for shape, _ in shapes] != [len(shape) for shape, _ in others]:
        return None
    pairs = [(here, there) for (here, _), (there, _) in zip(shapes, others, strict=True)]
    found = _stands(pairs, hidden.batch, hidden.length)
    sources = {length for _, length in _stands(pairs, hidden.batch, hidden.source)}
    if len(found) != 1 or len(sources) > 1:
        return None
    batch, length = found.pop()
    if hidden.source and not sources:
        known = {(hidden.batch, batch), (hidden.length, length)}
        sizes = {size for here, there in pairs for size in zip(here, there, strict=True)}
        if any(here != there for here, there in sizes - known):
            return None
    return HiddenShape(batch, length, hidden.rest, sources.pop() if sources else hidden.source)


def _stands(pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], batch: int, length: int) -> set[tuple[int, ...]]:
    """The sizes in the second shape of each pair where the first has this batch and length."""
    found = {there[:2] for here, there in pairs if here[:2] == (batch, length)}
    if batch == 1:
        found |= {(1, there[0]) for here, there in pairs if here[:1] == (length,)}
    return found


def length_between(here: PassKind, there: PassKind) -> Length | None:
    """The one size in which two kinds differ; None where they are equal, or differ in more than that."""
    if here[1:] != there[1:] or [(len(s), dtype) for s, dtype in here.shapes] != [(len(s), dtype) for s, dtype in there.shapes]:
        return None
    places = tuple(
        (t, d)
        for t, ((mine, _), (theirs, _)) in enumerate(zip(here.shapes, there.shapes, strict=True))
        for d in range(len(mine))
        if mine[d] != theirs[d]
    )
    sizes = {(here.shapes[t][0][d], there.shapes[t][0][d]) for t, d in places}
    return Length(*sizes.pop(), places) if len(sizes) == 1 else None
