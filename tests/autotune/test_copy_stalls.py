"""How slow copies are follows from their stalls. What windows of a real run see is in test_tuner.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.autotune.copy_stalls import slowdown, slower
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.solve import runs


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_how_slow_copies_are_follows_from_their_stalls(share: float) -> None:
    """Costs on made-up hardware: a measured profile would depend on this machine."""
    run = runs.run(runs.layer(16 * 1024), 8, link=50e9)
    solution = solve(run, may_skip_recompute=False)
    assert solution.alpha > 0.5
    step = Schedule(slower(run, share), solution.kinds).at(solution.alpha)
    assert slowdown(run, solution, step.d2h_stall_s + step.h2d_stall_s, step.seconds) == pytest.approx(share, rel=0.01)
    assert slowdown(run, solution, solution.d2h_stall_s + solution.h2d_stall_s, solution.step_s) == 1.0


@pytest.mark.parametrize("layers, copies, learned", [(1.25, 1.0, 1.0), (1.25, 0.8, 1.0), (1.25, 0.4, 0.5), (1.0, 0.8, 0.8)])
def test_a_profile_that_flatters_is_corrected_by_steps(layers: float, copies: float, learned: float) -> None:
    """A GPU that clocks higher in the profile than in training, a link that was faster: only their ratio decides what hides.

    Args:
        layers: seconds that layers take in training, over those of the profile.
        copies: bytes per second in training, over those of the profile.
        learned: the share of the profiled bandwidth that the tuner then solves with.
    """
    one = runs.layer(16 * 1024)
    seconds = {name: getattr(one, name) * layers for name in ("forward_s", "backward_s", "replay_s", "gemm_s", "attention_s")}
    profiled = runs.run(one, 8, link=20e9)
    real = slower(replace(profiled, layers=(replace(one, **seconds),) * 8), copies)
    solution = solve(profiled, may_skip_recompute=False)
    assert 0 < solution.alpha < 1
    step = Schedule(real, solution.kinds).at(solution.alpha)
    found = slowdown(profiled, solution, step.d2h_stall_s + step.h2d_stall_s, step.seconds)
    assert found == pytest.approx(learned, abs=0.06)
