"""The last resort against every possible split, and against torch.utils.checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ds_memo.placement import PlacementKind, spread
from ds_memo.solve.memory import device_bytes, swapped_bytes
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.placements import kinds, sets
from tests.solve.runs import GPT, LLAMA, layer, run

KI = 1024
LAYERS = 10
FAST = 1e15
"""A link so fast that compute never waits."""
BUDGETS = (0, 2, 5, 9, 14, 19)
"""Device budgets in inputs of a layer, beyond two reload buffers."""


def again_s(costs: RunCosts, kinds: Sequence[PlacementKind]) -> float:
    """Return the seconds of GEMMs and attention that replays compute at alpha 0."""
    return sum(
        (kind is not PlacementKind.ON_DEVICE) * one.gemm_s + kind.recomputes_attention * one.attention_s
        for one, kind in zip(costs.layers, kinds, strict=True)
    )


def every_split(layers: int) -> list[list[PlacementKind]]:
    """Yield the splits of like layers by the number of each kind, residents last, swapped first."""
    splits = []
    for residents, without_gemms, again, again_on_device in itertools.product(range(layers + 1), repeat=4):
        swapped = layers - residents - without_gemms
        if swapped < 0 or again_on_device > without_gemms or again > swapped:
            continue
        splits.append(
            kinds(
                layers,
                on_device=range(layers - residents, layers),
                without_gemms=range(swapped, swapped + without_gemms),
                attention_recomputed={*range(again), *range(swapped, swapped + again_on_device)},
            )
        )
    return splits


@pytest.mark.slow
@pytest.mark.parametrize("shape, tokens", [(GPT, 2 * KI), (LLAMA, 32 * KI)], ids=str)
def test_no_split_computes_much_less_again(shape: tuple, tokens: int) -> None:
    """If GEMMs are recomputed on the device, or attention is, all other splits are tried. None saves more than the attention of
    two layers or the GEMMs of one layer, the error of packing whole layers."""
    one = layer(tokens, shape=shape)
    unit = one.nbytes("input")
    seen = dict.fromkeys(("without_gemms", "attention_recomputed", "on_device"), 0)
    for host, device in itertools.product(BUDGETS, BUDGETS):
        costs = run(one, LAYERS, FAST, host * unit, 4 * unit + device * unit)
        fitting = [
            split
            for split in every_split(LAYERS)
            if swapped_bytes(costs, split, 0.0) <= costs.host_budget and device_bytes(costs, split, 0.0) <= costs.device_budget
        ]
        try:
            solution = solve(costs)
        except NothingFits:
            assert not fitting, (host, device)
            continue
        assert solution.host_bytes <= costs.host_budget and solution.device_bytes <= costs.device_budget
        if not sets(solution).without_gemms | sets(solution).attention_recomputed:
            continue
        assert solution.binding.startswith("last resort: " if sets(solution).attention_recomputed else "host memory: ")
        best = min(again_s(costs, split) for split in fitting)
        assert again_s(costs, solution.kinds) <= best + max(2 * one.attention_s, one.gemm_s), (host, device, solution)
        for kind in seen:
            seen[kind] += bool(getattr(sets(solution), kind))
    assert all(seen[kind] for kind in ("without_gemms", "attention_recomputed")), seen
    assert seen["on_device"] or tokens > 2 * KI, seen


def test_where_the_host_has_nothing_this_is_torchs_checkpoint() -> None:
    """It needs no more device memory either: inputs of all layers, and the working memory of one layer."""
    one = layer(512 * KI)
    costs = run(one, 32, host=0, device=32 * one.nbytes("input"))
    solution = solve(costs)
    assert sets(solution).without_gemms == sets(solution).attention_recomputed == frozenset(range(32))
    assert (solution.host_bytes, solution.device_bytes) == (0, costs.device_budget)
    assert solution.d2h_stall_s == solution.h2d_stall_s == 0
    with pytest.raises(NothingFits) as caught:
        solve(replace(costs, device_budget=costs.device_budget - 1))
    assert (caught.value.where, caught.value.device_needed) == ("host", costs.device_budget)
    assert "the device has room for those of" in str(caught.value)
    roomier = solve(replace(costs, device_budget=costs.device_budget + 5 * one.attention_bytes))
    assert len(sets(roomier).attention_recomputed) == 27


@pytest.mark.parametrize("host, device", [(0, 32), (0, 40), (8, 30), (20, 30), (30, 4)])
@pytest.mark.parametrize("link", [2e9, FAST])
def test_alpha_0_is_the_same_whether_it_is_solved_for_or_configured(host: int, device: int, link: float) -> None:
    """A configured 0 was refused where attention has to run again."""
    one = layer(128 * KI)
    unit = one.nbytes("input")
    costs = run(one, 32, link, host * unit, 2 * one.frame_bytes + device * unit)
    solved = solve(costs)
    assert solved.alpha == 0 and sets(solved).attention_recomputed | sets(solved).without_gemms
    assert solve(costs, alpha=0.0) == solved
    with pytest.raises(NothingFits, match=r"memo\.alpha 0 without memo\.resident_layers fits"):
        solve(costs, alpha=0.5)


# ---- copies that take longer than compute


def test_waiting_for_copies_is_no_answer_where_something_else_is_faster() -> None:
    """With a slow link, layers on the device without GEMM outputs leave less to swap, or nothing."""
    one = layer(16 * KI)
    slow = run(one, 32, link=2e9, device=2 * one.frame_bytes + 80 * one.nbytes("input"))
    solution = solve(slow)
    swaps_more = Schedule(slow, kinds(32, on_device=spread(32, 8)))
    assert solution.binding.startswith("link: compute would wait for more copies") and sets(solution).without_gemms
    assert solution.d2h_stall_s + solution.h2d_stall_s < 0.01 * solution.step_s
    assert solution.step_s < 0.9 * min(swaps_more.at(alpha).seconds for alpha in (0.0, 0.1, 0.5))
    assert not sets(solve(run(one, 32, link=50e9, device=slow.device_budget))).without_gemms


def test_never_slower_than_full_recompute() -> None:
    """Nor slower than recompute with attention outputs kept on the device, if they fit."""
    for case in itertools.product((0.2e9, 2e9, 10e9, 50e9), (2 * KI, 16 * KI, 128 * KI), (34, 60, 150, 250)):
        link, tokens, device = case
        one = layer(tokens)
        costs = run(one, 32, link, device=device * one.nbytes("input"))
        recompute = [[PlacementKind.FULL_RECOMPUTE] * 32, [PlacementKind.GEMMS_RECOMPUTED] * 32]
        fitting = [rival for rival in recompute if device_bytes(costs, rival, 0.0) <= costs.device_budget]
        assert fitting
        assert solve(costs).step_s <= min(Schedule(costs, rival).at(0.0).seconds for rival in fitting) * (1 + 1e-9), case
