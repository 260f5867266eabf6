"""The solver keeps every budget, moves the right way with each, and is never worse than the paper's alpha."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.paper_alpha import paper_alpha
from ds_memo.placement import spread
from ds_memo.solve.alpha import ALPHA_STEPS, best_alpha
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import ALIGN, PAGE, RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.placements import kinds, sets, swapped_at
from tests.solve.runs import layer, random_run, run

SEEDS = range(300)


def test_the_sizes_are_rounded_as_the_engine_rounds_them() -> None:
    from ds_memo.swap import frame, host_slab

    assert (ALIGN, PAGE) == (frame.ALIGN, host_slab.PAGE)


# ---- the paper's program


def test_the_papers_alpha() -> None:
    # 7B at 64 Ki tokens on 8 ranks: S = 8192 tokens × 4096 × 2 bytes for each unit.
    unit = 8192 * 4096 * 2
    assert paper_alpha(unit, unit, 14 * unit, 10e9, (2 + 7) * unit / 10e9, 32, 1 << 50) == pytest.approx(0.5)
    assert paper_alpha(unit, unit, 14 * unit, 10e9, 1e9, 32, 30 * 9 * unit) == pytest.approx(0.5)
    assert paper_alpha(unit, unit, 14 * unit, 10e9, 1e9, 32, 1 << 50) == 1.0
    assert paper_alpha(unit, unit, 14 * unit, 10e9, 2 * unit / 10e9, 32, 1 << 50) == 0.0
    assert paper_alpha(unit, unit, 14 * unit, 10e9, 1.9 * unit / 10e9, 32, 1 << 50) is None
    assert paper_alpha(unit, unit, 14 * unit, 10e9, 1e9, 32, 59 * unit) is None
    assert paper_alpha(unit, unit, 14 * unit, 10e9, 1e9, 2, 0) == 1.0  # nothing is swapped


# ---- properties


def answer(costs: RunCosts, **how: bool) -> object:
    try:
        return solve(costs, **how)
    except NothingFits as nothing:
        return nothing


@cache
def answers() -> list[Any]:
    return [answer(random_run(seed)) for seed in SEEDS]


def test_budgets_are_kept() -> None:
    for seed, solution in zip(SEEDS, answers(), strict=True):
        costs = random_run(seed)
        if isinstance(solution, NothingFits):
            assert solution.needed > solution.budget, seed
            continue
        assert 0 <= solution.alpha <= 1, seed
        assert solution.host_bytes <= costs.host_budget and solution.device_bytes <= costs.device_budget, seed
        on_device, without_gemms, _, no_recompute = sets(solution)
        swapped = set(range(len(costs.layers))) - on_device - without_gemms - no_recompute
        assert solution.host_bytes == sum(costs.layers[i].host_bytes(solution.placements[i]) for i in swapped), seed
        assert all(solution.placements[i].alpha == solution.alpha for i in swapped), seed
        assert solution.device_bytes == device_bytes(costs, solution.kinds, solution.alpha), seed
        assert solution.no_recompute == (len(no_recompute) == len(costs.layers)), seed


def test_the_seeds_reach_every_kind_of_answer() -> None:
    found = [solution for solution in answers() if not isinstance(solution, NothingFits)]
    assert len(found) < len(SEEDS)
    assert any(solution.no_recompute for solution in found)
    by_kind = [sets(solution) for solution in found]
    assert any(it.attention_recomputed for it in by_kind)
    assert any(it.no_recompute and it.on_device and solution.host_bytes for it, solution in zip(by_kind, found, strict=True))
    assert any(it.without_gemms and it.on_device for it in by_kind)
    assert any(it.without_gemms and not it.attention_recomputed for it in by_kind)
    assert any(it.without_gemms - it.attention_recomputed and it.attention_recomputed - it.without_gemms for it in by_kind)
    assert any(
        solution.alpha == 0 and not it.attention_recomputed | it.without_gemms
        for it, solution in zip(by_kind, found, strict=True)
    )
    assert sum(0 < solution.alpha < 1 for solution in found) > 50
    for start in (
        "everything fits",
        "device memory: all",
        "last resort: ",
        "host memory: ",
        "link: copies to",
        "nothing: all rows",
    ):
        assert any(solution.binding.startswith(start) for solution in found), start


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["host_budget", "device_budget"])
def test_more_of_a_budget_is_hardly_ever_worse(budget: str) -> None:
    """The step gets longer in few of these runs of like layers, and not by much: layers are packed whole."""
    worst: list[float] = []
    for seed in SEEDS[:50]:
        costs, best, longer = random_run(seed, most_kinds=1), math.inf, 0.0
        for tenths in range(1, 31):
            solution = answer(replace(costs, **{budget: getattr(costs, budget) * tenths // 10}))
            assert best == math.inf or not isinstance(solution, NothingFits)
            step_s = math.inf if isinstance(solution, NothingFits) else solution.step_s
            longer, best = max(longer, step_s / best - 1 if best < math.inf else 0.0), min(best, step_s)
        worst.append(longer)
    assert max(worst) < 0.2
    assert sum(longer > 0.01 for longer in worst) <= 0.1 * len(worst)


def test_never_worse_than_the_papers_alpha() -> None:
    """In the same cost model, wherever the paper's solution (two residents, full buffers, alpha from its program) is allowed."""
    compared = 0
    for seed in SEEDS:
        costs = random_run(seed)
        n = len(costs.layers)
        two_residents = place(n, 2)
        link, host = costs.d2h_bytes_per_s, costs.host_budget
        bounds = [
            paper_alpha(one.nbytes("input", "choice"), one.attention_bytes, one.split_bytes, link, one.forward_s, n, host)
            for one in costs.layers
        ]
        if None in bounds or device_bytes(costs, two_residents, 1.0) > costs.device_budget:
            continue
        compared += 1
        papers = Schedule(costs, two_residents).at(min(bounds))
        assert solve(costs).step_s <= papers.seconds * (1 + 1e-3), seed
    assert compared > 80


def test_the_search_finds_the_best_of_the_grid() -> None:
    for seed in SEEDS[:50]:
        costs = random_run(seed)
        layers = len(costs.layers)
        schedule = Schedule(costs, kinds(layers, on_device=spread(layers, 1), attention_recomputed={0}))
        seconds = [schedule.at(i / ALPHA_STEPS).seconds for i in range(ALPHA_STEPS + 1)]
        assert all(a + c >= 2 * b - 1e-9 for a, b, c in zip(seconds, seconds[1:], seconds[2:], strict=False)), "convex"
        tried: list[float] = []
        found = best_alpha(lambda alpha: tried.append(alpha) or schedule.at(alpha).seconds, 1.0)  # noqa: B023
        assert schedule.at(found).seconds <= min(seconds) * (1 + 1e-8) and len(tried) <= 30, seed


def test_the_search_finds_steps_that_are_not_convex() -> None:
    """It leaves out alphas that do not fit, and of like steps takes the smallest alpha."""
    two_valleys = lambda alpha: (alpha - 0.3) ** 2 * (alpha - 0.9) ** 2 + 0.1 * alpha  # noqa: E731
    found = two_valleys(best_alpha(two_valleys, 1.0))
    assert found <= min(two_valleys(i / ALPHA_STEPS) for i in range(ALPHA_STEPS + 1)) * (1 + 1e-6)
    assert best_alpha(lambda alpha: 1 - alpha if alpha <= 0.46 else math.inf, 1.0) == 0.46
    assert best_alpha(lambda alpha: 1.0, 1.0) == best_alpha(lambda alpha: alpha, 0.5) == best_alpha(lambda alpha: 1.0, 0.0) == 0


# ---- regimes and their sentences


def test_what_binds() -> None:
    short, middle, long = layer(1024), layer(16384), layer(256 * 1024)
    found = {
        "everything fits without checkpointing": solve(run(short, 8, device=8 * short.no_recompute_bytes)),
        "device memory: all 8 layers are resident": solve(run(short, 8, device=8 * short.frame_bytes)),
        "nothing: all rows fit the host and their copies hide": solve(run(long, 16, link=40e9, device=2 * long.frame_bytes)),
        "host memory: ": solve(run(long, 32, link=40e9, host=int(30 * (long.whole_bytes + 0.37 * long.split_bytes)))),
        "link: copies to the host hide behind the forward up to alpha": solve(run(middle, 32, link=25e9)),
        "link: copies from the host hide behind the backward": solve(replace(run(middle, 32, link=200e9), h2d_bytes_per_s=8e9)),
    }
    for says, solution in found.items():
        assert solution.binding.startswith(says)
    fits, resident, nothing, host, link, back = found.values()
    assert fits.no_recompute and fits.host_bytes == 0
    assert not solve(run(short, 8, device=8 * short.no_recompute_bytes - 1)).no_recompute
    assert (sets(resident).on_device, resident.host_bytes) == (frozenset(range(8)), 0)
    # And a reload buffer; the last swapped frame has left the device by then.
    assert len(sets(solve(run(short, 8, device=8 * short.frame_bytes - 1))).on_device) == 6
    assert (nothing.alpha, sets(nothing).on_device) == (1.0, {15})  # the last one needs no more on the device than swapped
    assert host.alpha == pytest.approx(0.37, abs=2e-4) and 0 < back.alpha < 1
    # In the long run a layer's copies take as long as its forward.
    assert (middle.whole_bytes + link.alpha * middle.split_bytes) / 25e9 == pytest.approx(middle.forward_s, rel=0.1)


@pytest.mark.parametrize("budget, where", [("host_budget", "host memory"), ("device_budget", "device memory")])
def test_nothing_fits(budget: str, where: str) -> None:
    one = layer(64 * 1024)
    costs = run(one, 32, host=31 * one.nbytes("input"), device=2 * one.nbytes("input"))  # the last one is on the device
    with pytest.raises(NothingFits, match=f"{where}.*GiB are missing.*sequence-parallel ranks"):
        solve(replace(costs, **{budget: getattr(costs, budget) - 1}))


def test_head_and_loss_take_room() -> None:
    one = layer(1024)
    enough = run(one, 8, device=8 * one.no_recompute_bytes + 99, head_bytes=99)
    assert solve(enough).no_recompute and not solve(replace(enough, head_bytes=100)).no_recompute


def test_no_recompute_without_planned_addresses_needs_more_room() -> None:
    """A step that barely fits calls cudaMalloc again and again; with one resident layer it has planned addresses."""
    one = layer(1024)
    enough = math.ceil(8 * one.no_recompute_bytes * 1.1)
    assert solve(run(one, 8, device=enough), unplanned_overhead=1.1).no_recompute
    solution = solve(run(one, 8, device=enough - 8), unplanned_overhead=1.1)
    assert (
        not solution.no_recompute
        and len(sets(solution).no_recompute) == 7
        and solution.step_s < 1.02 * solve(run(one, 8, device=enough)).step_s
    )


def test_non_layer_memory() -> None:
    one = layer(1024)
    frame, two_residents = one.frame_bytes, place(8, 2)
    alone = run(one, 8, device=8 * frame)
    need = device_bytes(alone, two_residents, 1.0)

    def grows(**others: Any) -> int:
        return device_bytes(replace(alone, **others), two_residents, 1.0) - need

    assert grows(working_bytes=5) == grows(backward_bytes=(5,) * 8) == 5
    first, last = grows(backward_bytes=(10 * frame, *[0] * 7)), grows(backward_bytes=(*[0] * 7, 10 * frame))
    assert last == first + 2 * frame  # a resident below it, and one on its way back
    assert 0 < grows(forward_bytes=10 * frame) <= 10 * frame
    others = replace(alone, working_bytes=5, head_bytes=6, forward_bytes=7, backward_bytes=(8,) * 8)
    assert others.non_layer_bytes() == {"forward": 7, "head": 6, "backward": 8, "always": 5}
    assert others.layers_alone() == alone and set(alone.non_layer_bytes().values()) == {0}


# ---- what is configured


def test_what_is_configured_is_obeyed() -> None:
    one = layer(16384)
    costs = run(one, 32)
    assert solve(costs, alpha=0.9).alpha == 0.9
    assert sets(solve(costs, alpha=0.9)).on_device == spread(32, 2)
    assert len(sets(solve(replace(costs, device_budget=10 * one.frame_bytes), resident_layers=7)).on_device) == 7
    both = solve(costs, alpha=0.25, resident_layers=0)
    assert (both.alpha, sets(both).on_device, both.no_recompute) == (0.25, frozenset(), False)
    assert both.binding.startswith("as configured: host memory")
    plenty = replace(costs, device_budget=1 << 60)
    assert solve(plenty).no_recompute
    assert not solve(plenty, alpha=1.0).no_recompute
    assert not solve(plenty, resident_layers=32).no_recompute


def test_with_configured_residents_alpha_obeys_the_device() -> None:
    """Reload buffers are smaller at alpha 0. If even those do not fit, the error says so."""
    one = layer(16384)
    costs = run(one, 32, host=1 << 50)
    for residents in (0, 7):
        least = device_bytes(costs, place(32, residents), 0.0)
        assert least < device_bytes(costs, place(32, residents), 1.0)
        solution = solve(replace(costs, device_budget=least), resident_layers=residents)
        assert (solution.alpha, len(sets(solution).on_device), solution.device_bytes) == (0.0, residents, least)
        with pytest.raises(NothingFits, match=f"the {residents} resident layers asked for" if residents else "no resident layer"):
            solve(replace(costs, device_budget=least // 4), resident_layers=residents)


def test_a_configured_alpha_that_does_not_fit() -> None:
    one = layer(16384)
    with pytest.raises(NothingFits, match=r"need .* GiB at alpha 0\.9, .* memo\.alpha of at most 0\.\d+ fits"):
        solve(run(one, 32, host=30 * one.host_bytes(swapped_at(0.5))), alpha=0.9)
    with pytest.raises(NothingFits, match=r"memo\.alpha 0 without memo\.resident_layers fits"):
        solve(run(one, 32, host=29 * one.host_bytes(swapped_at(0.0))), alpha=0.9)
    with pytest.raises(NothingFits, match=r"even memo\.alpha 0 does not fit"):
        solve(run(one, 32, host=0, device=2 * one.frame_bytes), alpha=0.9)


def test_a_configured_alpha_keeps_the_budgets_or_is_refused() -> None:
    for seed in SEEDS[:100]:
        costs, alpha = random_run(seed), seed % 5 / 4
        try:
            solution = solve(costs, alpha=alpha)
        except NothingFits as nothing:
            assert nothing.needed > nothing.budget, seed
        else:
            assert solution.alpha == alpha, seed
            assert solution.device_bytes <= costs.device_budget and solution.host_bytes <= costs.host_budget, seed


# ---- placement


@pytest.mark.parametrize("n, k, where", [(8, 2, {6, 7}), (8, 1, {7}), (8, 0, set()), (2, 5, {0, 1}), (10, 4, {2, 6, 8, 9})])
def test_residents_are_last_and_spread(n: int, k: int, where: set[int]) -> None:
    assert spread(n, k) == where
