"""The alpha with the shortest step as a linear program for CBC, through python-mip, in a process of its own.

One variable per point in time, which is "not before" other points plus durations affine in alpha; the last one is minimised.
ds_memo.solve.alpha is compared with it. CBC can crash the process that it runs in, and prints to its stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ds_memo.solve.legs import Leg
from ds_memo.solve.schedule import Schedule
from tests.processes import python


def best_alphas(jobs: list[tuple[Schedule, float]], answers: Path) -> list[float]:
    """Return for each schedule the alpha from 0 to its cap with the shortest step; `answers` is a file to write."""
    asked = [
        {
            "head_s": schedule.run.head_s,
            "cap": cap,
            "scale": schedule.at(0.0).seconds or 1.0,
            "legs": [vars(leg) for leg in schedule.legs],
        }
        for schedule, cap in jobs
    ]
    child = python("-m", "tests.solve.lp", answers, stdin=json.dumps(asked))
    assert child.returncode == 0, child.stderr
    return json.loads(answers.read_text())


def _solve(mip: Any, legs: list[Leg], head_s: float, cap: float, scale: float) -> float:
    model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    alpha = model.add_var(lb=0.0, ub=cap)

    def not_before(*times: Any) -> Any:
        moment = model.add_var(lb=0.0)
        for time in times:
            model.add_constr(moment >= time)
        return moment

    def affine(seconds: float, per_alpha: float) -> Any:
        return seconds / scale + per_alpha / scale * alpha  # scaled, so that the tolerances of CBC are relative

    now: Any = affine(0.0, 0.0)
    out = back = now
    leaving: list[Any] = []
    for leg in legs:
        while len(leaving) >= 2:
            now = not_before(now, leaving.pop(0))
        for after, seconds, per_alpha in leg.copies:
            out = not_before(out, now + after / scale) + affine(seconds, per_alpha)
        now = now + leg.forward_s / scale
        if leg.copies:
            leaving.append(out)
    now = not_before(now + head_s / scale, *leaving)
    ahead = -1
    for index in range(len(legs) - 1, -1, -1):
        leg = legs[index]
        if leg.copies:
            if ahead != index:
                back = not_before(now, back) + affine(leg.reload_s, leg.reload_per_alpha)
            now = not_before(now, back)
            ahead = -1
        below = next((i for i in range(index - 1, -1, -1) if legs[i].copies), -1)
        if ahead < 0 <= below and legs[below].ahead:
            ahead, back = below, not_before(now, back) + affine(legs[below].reload_s, legs[below].reload_per_alpha)
        now = now + affine(leg.backward_s + leg.replay_s, -leg.saved_s)
    model.objective = not_before(now)
    status = model.optimize()
    if status != mip.OptimizationStatus.OPTIMAL:
        raise RuntimeError(str(status))
    return min(cap, max(0.0, alpha.x))


def _main() -> None:
    import mip

    answers = []
    for job in json.load(sys.stdin):
        legs = [Leg(**leg) for leg in job.pop("legs")]
        answers.append(_solve(mip, legs, **job))
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    _main()
