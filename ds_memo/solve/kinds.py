"""The kinds of the layers' placements as an array, one number of :class:`ds_memo.placement.PlacementKind` per layer call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ds_memo.placement import PlacementKind, spread

Kinds = np.ndarray | Sequence[PlacementKind]

ON_DEVICE = np.array([kind.on_device for kind in PlacementKind])
RECOMPUTES_ATTENTION = np.array([kind.recomputes_attention for kind in PlacementKind])
WITHOUT_GEMMS = np.array([kind.without_gemms for kind in PlacementKind])
"""These three: true or false by kind."""


@lru_cache(maxsize=1 << 12)
def place(layers: int, residents: int, no_recompute: int = 0) -> np.ndarray:
    """Spread so many residents and layers without recompute; all others are swapped.

    Which layers go without recompute depends on their number alone, not on the residents', so that ranks need only agree on that
    number.
    """
    kinds = np.full(layers, PlacementKind.SWAPPED)
    kinds[list(spread(layers, no_recompute))] = PlacementKind.NO_RECOMPUTE
    others = np.flatnonzero(kinds == PlacementKind.SWAPPED)
    kinds[others[list(spread(len(others), residents))]] = PlacementKind.ON_DEVICE
    kinds.flags.writeable = False  # cached
    return kinds


def swapped(kinds: Kinds) -> list[int]:
    """Indices of the swapped layers."""
    return np.flatnonzero(~ON_DEVICE[np.asarray(kinds)]).tolist()


def count(kinds: Kinds, such: np.ndarray) -> int:
    """The number of layers whose kind is `such`, one of the masks above."""
    return int(np.count_nonzero(such[np.asarray(kinds)]))
