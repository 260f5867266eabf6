"""Layers without recompute: the best use of device memory once the copies hide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_memo.placement import PlacementKind
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.run_costs import PeakBytes
from ds_memo.solve.solver import solve
from tests.placements import sets, swapped_at
from tests.solve.runs import layer, run

KI = 1024


def test_some_layers_go_without_checkpointing() -> None:
    """Copies hide, so resident layers save nothing, and memory saves more as a skipped replay."""
    one = layer(256 * KI)
    costs = run(one, 32, link=40e9, device=10 * one.no_recompute_bytes)
    solution, checkpointed = solve(costs), solve(costs, may_skip_recompute=False)
    assert len(sets(solution).no_recompute) == 9 and not solution.no_recompute and solution.alpha == checkpointed.alpha == 1.0
    assert len(sets(checkpointed).on_device) > 15 and not sets(checkpointed).no_recompute
    assert solution.step_s == pytest.approx(checkpointed.step_s - 9 * one.replay_s, rel=1e-3)
    assert solution.host_bytes == (23 - len(sets(solution).on_device)) * one.host_bytes(swapped_at(1.0))
    assert solution.device_bytes == device_bytes(costs, solution.kinds, 1.0) <= costs.device_budget
    assert not sets(solve(costs, resident_layers=2)).no_recompute and not sets(solve(costs, alpha=1.0)).no_recompute


def test_between_all_resident_and_no_recompute() -> None:
    """Layers go without recompute one after the other, and each saves its replay."""
    one = layer(16 * KI)
    before = math.inf
    for count in range(9):
        solution = solve(run(one, 8, device=count * one.no_recompute_bytes + (8 - count) * one.frame_bytes))
        assert (len(sets(solution).no_recompute), solution.host_bytes, solution.no_recompute) == (count, 0, count == 8)
        assert solution.step_s < before
        before = solution.step_s


def test_a_layer_without_recompute_takes_as_much_as_a_resident_one_in_its_backward() -> None:
    """The replay makes autograd's saved tensors: the two are alike in the layer's own backward, but not below it."""
    one = replace(layer(16 * KI), working=PeakBytes(forward=10**9, backward=10**9))
    only = run(one, 1)
    alike = device_bytes(only, place(1, 1), 1.0), device_bytes(only, place(1, 0, 1), 1.0)
    assert alike == (one.frame_bytes + 10**9, max(one.no_recompute_bytes, one.frame_bytes + 10**9))
    two = run(one, 2)
    resident, no_recompute = (device_bytes(two, kinds, 1.0) for kinds in (place(2, 2), place(2, 0, 2)))
    assert no_recompute - resident == one.no_recompute_bytes - one.frame_bytes + alike[1] - alike[0]


def test_ranks_that_agree_on_a_number_agree_on_the_layers() -> None:
    few, many = place(24, 3, 5), place(24, 11, 5)
    for kinds, residents in ((few, 3), (many, 11)):
        assert (kinds.count(PlacementKind.ON_DEVICE), kinds.count(PlacementKind.NO_RECOMPUTE)) == (residents, 5)
    here, there = ([i for i, kind in enumerate(kinds) if kind == PlacementKind.NO_RECOMPUTE] for kinds in (few, many))
    assert here == there
