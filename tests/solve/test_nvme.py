"""The solver with drives behind the host: where they are used, that their limits hold to the byte, and what binds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.run_costs import NvmeCosts, RunCosts
from ds_memo.solve.solver import Solution, solve
from tests.placements import sets
from tests.solve.runs import layer, random_run, run
from tests.solve.virtual_engine import simulate

GIB = 1 << 30
PLENTY = NvmeCosts(1 << 50, 20e9, 20e9)
ONE = layer(1 << 16)
SMALL = run(ONE, 32, host=int(0.1 * 32 * ONE.frame_bytes))
"""A host that holds a tenth."""


def with_nvme(costs: RunCosts = SMALL, **more: float) -> Solution:
    return solve(replace(costs, nvme=replace(PLENTY, **more)))


def on_a_host_for_all(costs: RunCosts = SMALL) -> Solution:
    return solve(replace(costs, host_budget=1 << 50))


# ---- where they are used


def test_fast_drives_are_as_good_as_host_memory() -> None:
    solution, best = with_nvme(), on_a_host_for_all()
    assert solution.step_s == pytest.approx(best.step_s, rel=1e-3) and solution.step_s < 0.95 * solve(SMALL).step_s
    assert (solution.alpha, solution.kinds) == (best.alpha, best.kinds)
    assert solution.binding.startswith("link") and "NVMe writes" in solution.binding
    assert not sets(solution).attention_recomputed and sets(solve(SMALL)).attention_recomputed


def test_the_earliest_layers_are_written_and_the_host_holds_the_rest() -> None:
    solution = with_nvme()
    files = [placement.nvme for placement in solution.placements]
    swapped = [number for number, kind in enumerate(solution.kinds) if not kind.on_device]
    assert [number for number in swapped if files[number]] == swapped[: sum(files)] and sum(files) == sum(
        files[number] for number in swapped
    )
    blocks = [ONE.host_bytes(placement) for placement in solution.placements]
    written = [nbytes for nbytes, filed in zip(blocks, files, strict=True) if filed]
    assert solution.nvme_bytes == sum(written)
    assert sum(blocks) - sum(written) <= SMALL.host_budget < sum(blocks) - sum(written) + written[-1]
    assert solution.host_bytes == SMALL.host_budget


def test_drives_in_between_are_used_as_far_as_their_writes_hide() -> None:
    steps = [with_nvme(write_bytes_per_s=rate, read_bytes_per_s=rate) for rate in (1e8, 5e8, 1e9, 3e9, 1e10, 2e10)]
    seconds = [solution.step_s for solution in steps]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[2] > seconds[-1]
    assert any(solution.binding.startswith("NVMe: writes") and "compute would wait" in solution.binding for solution in steps)


def test_a_run_that_fits_no_other_way() -> None:
    """Without room for the inputs. It may wait for slow drives, and says so."""
    tight = run(ONE, 32, host=2 * ONE.nbytes("input"), device=2 * ONE.nbytes("input"))
    with pytest.raises(NothingFits, match=r"drives behind it \(memo\.nvme\)"):
        solve(tight)
    solution = with_nvme(tight, write_bytes_per_s=1e8, read_bytes_per_s=1e8)
    assert solution.nvme_stall_s > 0.5 * solution.step_s
    assert solution.binding.startswith("NVMe: writes") and "compute waits" in solution.binding


@pytest.mark.slow
def test_every_solution_keeps_its_budgets_and_takes_the_engines_time() -> None:
    for seed in range(60):
        costs = random_run(seed)
        rates = costs.d2h_bytes_per_s / (1 + seed % 7), costs.h2d_bytes_per_s / (1 + seed % 3)
        nvme = NvmeCosts(int(costs.host_budget * (seed % 5)), *rates)
        costs = replace(costs, host_budget=costs.host_budget // 4, nvme=nvme)
        try:
            solution = solve(costs)
        except NothingFits:
            with pytest.raises(NothingFits):
                solve(replace(costs, nvme=None))
            continue
        assert solution.nvme_bytes <= nvme.budget and solution.host_bytes <= costs.host_budget, seed
        assert solution.device_bytes <= costs.device_budget, seed
        engine = simulate(costs, solution.placements)  # it raises where a block has no room
        assert engine.seconds == pytest.approx(solution.step_s, rel=1e-9), seed
        assert engine.nvme_stall_s == pytest.approx(solution.nvme_stall_s, abs=1e-9 * engine.seconds), seed


# ---- limits


def test_a_budget_of_one_byte_less() -> None:
    written = with_nvme().nvme_bytes
    assert with_nvme(budget=written).nvme_bytes == written
    less = with_nvme(budget=written - 1)
    assert less.nvme_bytes < written and less.alpha < with_nvme().alpha


def test_rated_writes_bind() -> None:
    free = with_nvme()
    rated = 0.5 * free.nvme_bytes / free.step_s
    solution = with_nvme(most_written_per_s=rated)
    assert 0.8 * rated < solution.nvme_bytes / solution.step_s <= rated
    assert solution.binding.startswith("NVMe: writes") and "rated writes are" in solution.binding
    assert free.step_s < solution.step_s < solve(SMALL).step_s
    assert with_nvme(most_written_per_s=1.0) == solve(SMALL)
    assert with_nvme(most_written_per_s=math.nextafter(free.nvme_bytes / free.step_s, math.inf)) == free


def test_refusals_say_what_the_drives_lack() -> None:
    tight = run(ONE, 32, host=2 * ONE.nbytes("input"), device=2 * ONE.nbytes("input"))
    need = 29 * ONE.nbytes("input")  # of 32: two are on the host, one is on the device
    assert with_nvme(tight, budget=need).nvme_bytes == need
    with pytest.raises(NothingFits, match=r"host memory and NVMe: .* more room on drives \(memo\.nvme\.gib\)") as small:
        with_nvme(tight, budget=need - 1)
    assert small.value.needed == small.value.budget + 1
    with pytest.raises(NothingFits, match=r"Those of memo\.nvme are not enough: .* rated writes are 0\.01"):
        with_nvme(tight, most_written_per_s=1e7)
    with pytest.raises(NothingFits, match=r"one layer's host blocks of 0\.5 GiB are larger"):
        with_nvme(replace(tight, host_budget=ONE.nbytes("input") - 1))


def test_a_configured_alpha() -> None:
    solution = solve(replace(SMALL, nvme=PLENTY), alpha=0.5)
    assert solution.alpha == 0.5 and solution.nvme_bytes > 0
    assert solution.binding.startswith("as configured: NVMe writes")
    with pytest.raises(NothingFits, match=r"at alpha 0\.5"):
        solve(SMALL, alpha=0.5)
    enough = solution.nvme_bytes
    assert solve(replace(SMALL, nvme=replace(PLENTY, budget=enough)), alpha=0.5) == solution
    with pytest.raises(NothingFits, match="of files"):
        solve(replace(SMALL, nvme=replace(PLENTY, budget=enough - 1)), alpha=0.5)
