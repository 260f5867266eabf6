"""The kinds of the layer calls' placements, in the order of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ds_memo.placement import PlacementKind, spread

Kinds = Sequence[PlacementKind]

FIRST_ON_DEVICE = PlacementKind.GEMMS_RECOMPUTED


@lru_cache(maxsize=1 << 12)
def place(layers: int, residents: int, no_recompute: int = 0) -> tuple[PlacementKind, ...]:
    """Return the kinds with this many residents and layers without recompute, spread evenly; the others are swapped.

    The layers without recompute depend on their number alone, not on the residents', so ranks need only agree on that number.
    """
    kinds = [PlacementKind.SWAPPED] * layers
    put(kinds, range(layers), no_recompute, PlacementKind.NO_RECOMPUTE)
    put(kinds, swapped(kinds), residents, PlacementKind.ON_DEVICE)
    return tuple(kinds)


def put(kinds: list[PlacementKind], layers: Sequence[int], count: int, kind: PlacementKind) -> None:
    """Give `count` of these layers another kind, spread evenly."""
    for number in spread(len(layers), count):
        kinds[layers[number]] = kind


def swapped(kinds: Kinds) -> list[int]:
    """Return the indices of the swapped layers."""
    return [index for index, kind in enumerate(kinds) if kind < FIRST_ON_DEVICE]
