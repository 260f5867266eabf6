"""Which layers do not store their input: those of a group but its first, whose inputs follow from it (ds_memo.tiles.groups).

The backward stores a group's inputs before it comes to them. So that a step never holds more on the host than after its forward,
a group is no larger than what the layers above it have freed by then. Groups get longer from the last layer down: 1, 3, 7, …
where an input is as large as attention's output. Each input that is left out costs one more run of a post, however long the
group is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_memo.placement import PlacementKind

ALL = 64
"""Layers, more than any group has: groups of 1, 3, 7, 15, 31 and 63 are 120 layers."""


def without_inputs(
    kinds: Sequence[PlacementKind], every: int, follows: Sequence[bool], inputs: Sequence[int], blocks: Sequence[int]
) -> tuple[PlacementKind, ...]:
    """Return the kinds with as few stored inputs as groups of at most `every` layers have.

    Args:
        kinds: of the layers' placements, in the order of the forward.
        follows: False: the layer's input is not the output of the layer before, or one of the two does not run in tiles.
        inputs: bytes of each layer's input.
        blocks: bytes that each layer has on the host if it is swapped and stores its input.
    """
    found, freed, held, size, of_group = list(kinds), 0, 0, 1, 0
    for index in range(len(kinds) - 1, -1, -1):
        if kinds[index] is PlacementKind.SWAPPED:
            of_group += blocks[index]
        elif kinds[index] is PlacementKind.SWAPPED_ATTENTION_RECOMPUTED:
            of_group += inputs[index]
        below = kinds[index - 1] if index else PlacementKind.NO_RECOMPUTE
        may = kinds[index] is PlacementKind.SWAPPED and follows[index] and keeps_attention(below)
        if may and size < every and held + inputs[index] <= freed:
            found[index] = PlacementKind.SWAPPED_WITHOUT_INPUT
            held, size, of_group = held + inputs[index], size + 1, of_group - inputs[index]
        else:
            freed, held, size, of_group = freed + of_group, 0, 1, 0
    return tuple(found)


def keeps_attention(kind: PlacementKind) -> bool:
    """Return True if the backward can compute what such a layer has returned without attention."""
    return not kind.recomputes_attention and kind is not PlacementKind.NO_RECOMPUTE
