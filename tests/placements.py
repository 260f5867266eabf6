"""Conversions between kinds of placement and sets of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.solver import Solution


class Sets(NamedTuple):
    """Indices of layer calls. A swapped one is in none of these, or in `attention_recomputed` alone."""

    on_device: frozenset[int]
    without_gemms: frozenset[int]
    attention_recomputed: frozenset[int]
    no_recompute: frozenset[int]


def sets(solution: Solution) -> Sets:
    found = dict(enumerate(solution.kinds))
    return Sets(
        on_device=frozenset(i for i, kind in found.items() if kind is PlacementKind.ON_DEVICE),
        without_gemms=frozenset(i for i, kind in found.items() if kind.without_gemms),
        attention_recomputed=frozenset(i for i, kind in found.items() if kind.recomputes_attention),
        no_recompute=frozenset(i for i, kind in found.items() if kind is PlacementKind.NO_RECOMPUTE),
    )


def kinds(
    layers: int,
    on_device: Collection[int] = (),
    without_gemms: Collection[int] = (),
    attention_recomputed: Collection[int] = (),
    no_recompute: Collection[int] = (),
) -> list[PlacementKind]:
    """Return one kind per layer. Layers in no set are swapped."""

    def kind(layer: int) -> PlacementKind:
        if layer in no_recompute:
            return PlacementKind.NO_RECOMPUTE
        if layer in on_device:
            return PlacementKind.ON_DEVICE
        if layer in without_gemms:
            return PlacementKind.FULL_RECOMPUTE if layer in attention_recomputed else PlacementKind.GEMMS_RECOMPUTED
        return PlacementKind.SWAPPED_ATTENTION_RECOMPUTED if layer in attention_recomputed else PlacementKind.SWAPPED

    return [kind(layer) for layer in range(layers)]


def placed(kinds_of_layers: Iterable[PlacementKind], alpha: float) -> list[Placement]:
    return [Placement(kind, alpha) for kind in kinds_of_layers]


def swapped_at(alpha: float) -> Placement:
    return Placement(PlacementKind.SWAPPED, alpha)
