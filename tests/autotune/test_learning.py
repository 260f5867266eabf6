"""What is learned from windows of steps: how slow copies are. What windows of a real run see is in test_tuner.py."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest

from ds_memo.autotune.learning import SETTLING, WINDOW, Link, Totals, Windows, slower
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solver import solve
from tests.solve import runs


def passes_of(run: Any, solution: Any, at: Any) -> tuple[Totals, Any]:
    """Return a window of two passes as another schedule has them, and what was solved for."""
    step = Schedule(at, solution.kinds).at(solution.alpha)
    stall_s = step.d2h_stall_s + step.h2d_stall_s
    return Totals(2, 2 * step.seconds, 2 * stall_s), types.SimpleNamespace(run=run, solution=solution)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_how_slow_copies_are_follows_from_their_stalls(share: float) -> None:
    """Costs on made-up hardware: a measured profile would depend on this machine."""
    run = runs.run(runs.layer(16 * 1024), 8, link=50e9)
    solution = solve(run, may_skip_recompute=False)
    assert solution.alpha > 0.5
    assert Link().measured(*passes_of(run, solution, slower(run, share))) == pytest.approx(share, rel=0.01)
    assert Link().measured(*passes_of(run, solution, run)) is None


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
    link = Link()
    link.learn([link.measured(*passes_of(profiled, solution, real)), None])
    assert link.correct(profiled).d2h_bytes_per_s == pytest.approx(learned * 20e9, abs=0.06 * 20e9)


def test_a_window_of_several_kinds_of_passes_is_not_comparable() -> None:
    """Nor is one in which nothing was trained."""
    windows = Windows(Totals)
    for step in range(SETTLING):
        assert windows.stepped(passes=step, now=step) is None
    for number, mixed in enumerate((False, True)):
        for step in range(1, WINDOW + 1):
            seen = windows.stepped(SETTLING + number * WINDOW + step - 1, step)
            if mixed and step == 1:
                windows.another_kind()
        assert seen is not None and (seen[0].passes, seen[1]) == (WINDOW, not mixed)
    for _ in range(WINDOW):
        seen = windows.stepped(SETTLING + 2 * WINDOW - 1, 9.0)
    assert seen is not None and seen[0].passes == 0 and not seen[1]
