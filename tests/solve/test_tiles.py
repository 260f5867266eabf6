"""Layers in tiles: two tiles of a frame are on the device, reloads hide behind tiles, and the shortest way to run is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.solve.headroom import shortest
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import LayerCosts, PeakBytes, RunCosts, TileCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.placements import swapped_at
from tests.solve.runs import LLAMA, layer, run

TOKENS, LAYERS = 1 << 15, 8
UNIT = TOKENS * 4096 * 2
WHOLE = replace(layer(TOKENS, LLAMA), working=PeakBytes(20 * UNIT, 26 * UNIT), working_at_0=PeakBytes(20 * UNIT, 33 * UNIT))
WHOLE = replace(WHOLE, working_without_attention=WHOLE.working_at_0)


def tiled(count: int = 8, units: float = 6.0, slower: float = 1.05) -> LayerCosts:
    """Return WHOLE in tiles.

    Args:
        units: of its working set.
        slower: share of its time that it takes.
    """
    working = PeakBytes(int(4.5 * UNIT), int(units * UNIT))
    backward_s = slower * (WHOLE.backward_s + WHOLE.gemm_s + WHOLE.replay_s)
    costs = replace(WHOLE, forward_s=slower * WHOLE.forward_s, backward_s=backward_s - WHOLE.gemm_s - WHOLE.replay_s)
    parts = TileCosts(count, post_backward_s=0.6 * backward_s, pre_backward_s=0.1 * backward_s, pre_again_s=0.05 * backward_s)
    again = replace(working, backward=working.backward + WHOLE.attention_bytes)
    return replace(costs, working=working, working_at_0=working, working_without_attention=again, in_tiles=parts)


def runs(device: float, host: float = 1e3, **how: float) -> list[RunCosts]:
    """Return both candidates.

    Args:
        device, host: budgets in units.
    """
    budgets = {"host": int(host * UNIT), "device": int(device * UNIT)}
    return [run(WHOLE, LAYERS, **budgets), replace(run(tiled(**how), LAYERS, **budgets), tiles=Tiles(TOKENS // 8, 8))]


def as_it_is(costs: RunCosts) -> RunCosts:
    """Return a run that has no headroom as it is."""
    return costs


# ---- bytes


def all_parts_alike(working: PeakBytes) -> PeakBytes:
    """Return a working set that attention's backward does not need more of than others."""
    return replace(working, tiles_backward=working.backward)


def test_a_layer_that_recomputes_attention_stores_its_input_alone() -> None:
    costs = runs(40)[1].each(
        lambda layer: replace(
            layer,
            working_at_0=all_parts_alike(layer.working_at_0),
            working_without_attention=all_parts_alike(layer.working_without_attention),
        )
    )
    kept, again = (device_bytes(costs, [kind] * LAYERS, 0.0) for kind in list(PlacementKind)[:2])
    layer = costs.layers[0]
    assert again == kept - 2 * layer.attention_bytes / 8, "two tiles' buffers are smaller"
    stored = layer.host_bytes(Placement(PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, 0.0))
    assert stored == pytest.approx(layer.nbytes("input"), rel=0.01)


def test_host_bytes_are_those_of_the_whole_but_for_pages() -> None:
    for alpha, share in ((0.0, 0.0), (0.5, 0.5), (0.6, 0.5), (1.0, 1.0)):
        here, whole = tiled().host_bytes(swapped_at(alpha)), WHOLE.host_bytes(swapped_at(share))
        assert 0 <= here - whole <= 8 * (4096 + 256), "only whole tiles are stored"
        assert tiled().stored_bytes(swapped_at(alpha)) == WHOLE.stored_bytes(swapped_at(share))


# ---- seconds


@pytest.mark.parametrize("link", (2e9, 10e9, 25e9, 50e9, 400e9))
def test_the_step_is_convex_in_alpha(link: float) -> None:
    costs = replace(run(tiled(64), LAYERS, link=link), tiles=Tiles(512))
    schedule = Schedule(costs, place(LAYERS, 0))
    seconds = [schedule.at(number / 64).seconds for number in range(65)]
    assert all(a + c >= 2 * b - 1e-9 for a, b, c in zip(seconds, seconds[1:], seconds[2:], strict=False))


def test_a_slow_link_stores_no_tile() -> None:
    """A stored tile is many times as large as another, and hides behind one tile alone."""
    slow, fast = (solve(replace(run(tiled(64), LAYERS, link=link), tiles=Tiles(512)), resident_layers=0) for link in (8e9, 4e11))
    assert slow.alpha == 0 and fast.alpha == 1


def test_alpha_counts_whole_tiles() -> None:
    """A share of three and a half tiles would be the best of all shares; of whole tiles four are better than three."""
    costs = replace(run(tiled(8), LAYERS, link=30e9), tiles=Tiles(TOKENS // 8))
    found = solve(costs, resident_layers=0)
    schedule = Schedule(costs, found.kinds)
    assert found.step_s == min(schedule.at(number / 8).seconds for number in range(9))


def test_where_two_stored_tiles_have_no_room_up_to_half_are_stored() -> None:
    """Then no two of them are neighbours."""
    costs = replace(run(tiled(4), LAYERS, link=4e11, device=14 * UNIT), tiles=Tiles(TOKENS // 4))
    narrow = replace(costs, device_budget=11 * UNIT)
    most, half = solve(costs, resident_layers=0), solve(narrow, resident_layers=0)
    assert device_bytes(narrow, half.kinds, 1.0) > narrow.device_budget >= device_bytes(narrow, half.kinds, 0.5)
    assert (most.alpha, half.alpha) == (1.0, 0.5)
    assert "reload buffers for more than alpha 0.5 would take" in half.binding
    assert most.step_s < half.step_s < Schedule(narrow, half.kinds).at(0.0).seconds


# ---- which is taken


def test_whole_where_that_is_shortest() -> None:
    _, solution = shortest(runs(300), as_it_is)
    assert {placement.tiles for placement in solution.placements} == {None}


def test_tiles_where_the_whole_does_not_fit() -> None:
    whole, in_tiles = runs(10)
    with pytest.raises(NothingFits):
        solve(whole)
    taken, solution = shortest([whole, in_tiles], as_it_is)
    assert taken is in_tiles
    assert {placement.tiles for placement in solution.placements} == {Tiles(TOKENS // 8, 8)}
    assert solution.device_bytes <= 10 * UNIT


def test_tiles_where_they_are_shorter() -> None:
    """Both fit: with tiles there is room for residents."""
    whole, in_tiles = runs(45, slower=1.0)
    one, other = solve(whole), solve(in_tiles)
    assert other.step_s < one.step_s
    assert shortest([whole, in_tiles], as_it_is)[1] == other


def test_both_memories_are_used_before_attention_is_recomputed() -> None:
    """The host is too small for all, so layers stay on the device without GEMM outputs."""
    solution = solve(runs(20, host=8)[1], may_skip_recompute=False)
    assert not any(kind.recomputes_attention for kind in solution.kinds)
    assert PlacementKind.GEMMS_RECOMPUTED in solution.kinds and PlacementKind.SWAPPED in solution.kinds
    assert solution.host_bytes <= 8 * UNIT + LAYERS * 8 * 4096 and solution.device_bytes <= 20 * UNIT


@pytest.mark.parametrize("differs", [False, True])
def test_attention_is_recomputed_in_tiles_where_neither_memory_has_room(differs: bool) -> None:
    costs = tiled()
    costs = replace(costs, in_tiles=replace(costs.in_tiles, result_differs=differs))
    short = replace(run(costs, LAYERS, host=int(10 * UNIT), device=int(10.5 * UNIT)), tiles=Tiles(TOKENS // 8, 8))
    solution = solve(short)
    again = [kind for kind in solution.kinds if kind.recomputes_attention]
    assert 0 < len(again) < LAYERS and solution.alpha == 0
    units = {PlacementKind.SWAPPED: 2, PlacementKind.SWAPPED_ATTENTION_RECOMPUTED: 1}
    assert solution.host_bytes == pytest.approx(sum(units.get(kind, 0) for kind in solution.kinds) * UNIT, rel=0.03)
    assert solution.step_s > solve(replace(short, host_budget=100 * UNIT)).step_s


def test_nothing_fits_says_what_tiles_need() -> None:
    whole, in_tiles = runs(5)
    with pytest.raises(NothingFits) as caught:
        shortest([whole, in_tiles], as_it_is)
    needs = device_bytes(in_tiles, [PlacementKind.SWAPPED_ATTENTION_RECOMPUTED] * LAYERS, 0.0)
    assert caught.value.needed == needs < 10 * UNIT


def test_a_given_alpha_and_given_residents_hold_in_tiles() -> None:
    _, solution = shortest(runs(60)[1:], as_it_is, alpha=0.5, resident_layers=1)
    assert solution.alpha == 0.5
    assert [placement.kind for placement in solution.placements].count(PlacementKind.ON_DEVICE) == 1
    assert solution.placements[0] == Placement(PlacementKind.SWAPPED, 0.5, tiles=Tiles(TOKENS // 8, 8))


def test_kinds_that_cannot_be_tiled_stand_beside_those_that_can() -> None:
    costs = run(WHOLE, LAYERS, host=1 << 50, device=60 * UNIT)
    mixed = replace(costs, layers=(tiled(), WHOLE) * (LAYERS // 2), tiles=Tiles(TOKENS // 8, 8))
    solution = solve(mixed, may_skip_recompute=False)
    assert solution.device_bytes > 26 * UNIT, "a whole layer's working set"
