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
"""Three masks, indexed by kind."""


@lru_cache(maxsize=1 << 12)
def place(layers: int, residents: int, no_recompute: int = 0) -> np.ndarray:
    """Return the kinds with this many residents and layers without recompute, spread evenly; the others are swapped.

    The layers without recompute depend on their number alone, not on the residents', so ranks need only agree on that number.
    """
    kinds = np.full(layers, PlacementKind.SWAPPED)
    kinds[list(spread(layers, no_recompute))] = PlacementKind.NO_RECOMPUTE
    others = np.flatnonzero(kinds == PlacementKind.SWAPPED)
    kinds[others[list(spread(len(others), residents))]] = PlacementKind.ON_DEVICE
    kinds.flags.writeable = False  # cached
    return kinds


def swapped(kinds: Kinds) -> list[int]:
    """Return the indices of the swapped layers."""
    return np.flatnonzero(~ON_DEVICE[np.asarray(kinds)]).tolist()


def count(kinds: Kinds, mask: np.ndarray) -> int:
    """Return the number of layers whose kind is in one of the masks above."""
    return int(np.count_nonzero(mask[np.asarray(kinds)]))
