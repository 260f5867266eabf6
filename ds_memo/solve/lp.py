"""The alpha with the shortest step as a linear program for CBC, through python-mip, in a child process.

One variable per point in time, which is "not before" other points plus durations that are affine in alpha; minimise the last one.
A check on ds_memo.solve.alpha, which runs use. CBC has been seen to crash the process it runs in, and prints to its stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from ds_memo.errors import MemoError
from ds_memo.solve.schedule import LEAVING, Leg, Schedule


def best_alphas(jobs: list[tuple[Schedule, float]], time_limit_s: float = 60.0) -> list[float]:
    """For each schedule, the alpha from 0 to its cap with the shortest step.

    Raises:
        MemoError: python-mip is not installed, or CBC failed.
    """
    asked = [
        {
            "head_s": schedule.head_s,
            "cap": cap,
            "scale": schedule.at(0.0).seconds or 1.0,
            "legs": [vars(leg) for leg in schedule.legs],
        }
        for schedule, cap in jobs
    ]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        child = subprocess.run(
            [sys.executable, "-m", "ds_memo.solve.lp", answer.name],
            input=json.dumps(asked),
            text=True,
            capture_output=True,
            timeout=time_limit_s,
        )
        if child.returncode:
            raise MemoError(f"CBC found no alpha (exit status {child.returncode}): {child.stderr.strip()[-300:]}")
        return json.load(answer)


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
        while len(leaving) >= LEAVING:
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
    import mip  # a tenth of a second, and CBC: only in this process

    answers = []
    for job in json.load(sys.stdin):
        legs = [Leg(**leg) for leg in job.pop("legs")]
        answers.append(_solve(mip, legs, **job))
    with open(sys.argv[1], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    _main()
