"""How slow copies are follows from their stalls. What windows of a real run see is in test_tuner.py."""

from __future__ import annotations

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
