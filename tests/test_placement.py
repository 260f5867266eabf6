"""A placement: the kind decides which rows stay on the device; alpha counts for swapped calls only."""

from __future__ import annotations

import dataclasses

import pytest

from ds_memo.placement import EVEN_ROWS, UNDECIDED, Placement, PlacementKind, stored_rows

SHARE = {
    PlacementKind.GEMMS_RECOMPUTED: 0.0,
    PlacementKind.FULL_RECOMPUTE: 0.0,
    PlacementKind.ON_DEVICE: 1.0,
    PlacementKind.NO_RECOMPUTE: 1.0,
}


@pytest.mark.parametrize("kind", PlacementKind)
def test_alpha_is_undecided_for_swapped_calls_alone(kind: PlacementKind) -> None:
    assert Placement(kind).alpha == SHARE.get(kind, UNDECIDED)
    assert Placement(kind, 0.3).alpha == SHARE.get(kind, 0.3)
    assert kind.on_device is (kind in SHARE)


@pytest.mark.parametrize("kind", [PlacementKind.SWAPPED, PlacementKind.GEMMS_RECOMPUTED])
def test_the_next_kind_is_the_same_with_attention_recomputed(kind: PlacementKind) -> None:
    """The solver adds 1 to the kinds in its arrays."""
    again = PlacementKind(kind + 1)
    assert (kind.recomputes_attention, again.recomputes_attention) == (False, True)
    assert (again.on_device, again.without_gemms) == (kind.on_device, kind.without_gemms)


def test_a_copy_with_another_alpha_stays_what_it_is() -> None:
    """The policy makes such copies to identify passes by their memory requests."""
    swapped, resident = Placement(PlacementKind.SWAPPED, 0.2), Placement(PlacementKind.ON_DEVICE)
    assert dataclasses.replace(swapped, alpha=0.5) == Placement(PlacementKind.SWAPPED, 0.5)
    assert dataclasses.replace(resident, empty_frame=False) == resident


@pytest.mark.parametrize("rows", [1, 128, 1_000, 1_023, 1_024, 1_100, 4_096, 65_537])
def test_rows_are_stored_by_alpha(rows: int) -> None:
    """Never more than alpha says, all or none at the ends, more at a larger alpha: the solver bisects."""
    alphas = [step / 997 for step in range(998)]
    stored = [stored_rows(alpha, rows) for alpha in alphas]
    assert (stored[0], stored[-1]) == (0, rows) and stored == sorted(stored)
    for alpha, number in zip(alphas, stored, strict=True):
        if rows < 1_024:
            assert number == int(alpha * rows)
        else:
            assert alpha * rows - EVEN_ROWS < number <= alpha * rows
            assert number == 0 or (rows - number) % EVEN_ROWS == 0
