"""Placements whose first swapped layers go on to files, where that makes the step shorter, or possible.

Files only add waits: no step is shorter than that of the same placements on a host that holds all. So kinds are taken from the
solutions for larger hosts, as far as files reach, and for each the best alpha is searched. The first that waits for nothing ends
the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ds_memo.solve.alpha import best_alpha
from ds_memo.solve.memory import device_bytes, swapped_bytes
from ds_memo.solve.placement_kinds import Kinds
from ds_memo.solve.refusals import of_budget
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule, Step
from ds_memo.solve.solution import Solution, judged
from ds_memo.units import GIB

_WORTH = 1e-3
"""Least relative gain for which files are written: drives wear."""
_WAITS = 1e-3
"""Share of a step. Waits that are shorter are no constraint."""


def larger_host(run: RunCosts) -> RunCosts:
    """Return the run with the files' budget on the host: the bytes that may be kept in all."""
    assert run.nvme is not None
    return replace(run, host_budget=run.host_budget + run.nvme.budget)


def with_files(run: RunCosts, solved: Callable[[int], Solution | None], best_s: float) -> Solution | None:
    """Return the shortest step with files; None: none is shorter than `best_s` seconds, the best without.

    Args:
        run: with NVMe.
        solved: returns the solution for a host budget, as if there were no files. None: nothing fits.
    """
    best = None
    everything = solved(larger_host(run).host_budget)
    if everything is None:
        return None
    for host_budget in _host_budgets(run, everything):
        found = solved(host_budget)
        if found is None or found.step_s >= best_s * (1 - _WORTH):
            continue
        filed = _best_alpha(run, found)
        if filed is not None and filed.step_s < best_s * (1 - _WORTH):
            best, best_s = filed, filed.step_s
        if best_s <= everything.step_s * (1 + _WORTH):
            break
    return best and replace(best, binding=_binding(run, best, everything))


def configured(run: RunCosts, kinds: Kinds, alpha: float) -> Solution | None:
    """Return the solution with files at a configured alpha; None: they do not help, and `refused` says why."""
    if refused(run, kinds, alpha) is not None:
        return None
    filed = judged(run, alpha, kinds, "", Schedule(run, kinds).files(alpha) or 0)
    return replace(filed, binding=f"as configured: NVMe writes {filed.nvme_bytes / GIB:.4g} GiB a step at alpha {alpha:.4g}")


def refused(run: RunCosts, kinds: Kinds, alpha: float) -> str | None:
    """Return in words why placements do not fit with files; None: they do."""
    schedule = Schedule(run, kinds)
    files = schedule.files(alpha)
    if files is None:
        most = max(schedule.blocks(alpha)) / GIB
        return f"one layer's host blocks of {most:.4g} GiB are larger than the {run.host_budget / GIB:.4g} GiB of host memory"
    return why_not(run, schedule, schedule.at(alpha, files), files)


def _host_budgets(run: RunCosts, everything: Solution) -> list[int]:
    """Return host budgets whose solutions give kinds to try: the whole; what can be written, and read, meanwhile; what may be
    written; and some between."""
    nvme, host = run.nvme, run.host_budget
    assert nvme is not None
    forward_s = sum(layer.forward_s for layer in run.layers)
    hides = min(nvme.write_bytes_per_s * forward_s, nvme.read_bytes_per_s * (everything.step_s - forward_s))
    least = max(0, min(nvme.budget, swapped_bytes(run, everything.kinds, 0.0) - host))
    further = [hides, nvme.most_written_per_s * everything.step_s, *(least * share / 4 for share in (1, 2, 3, 4))]
    found = {host + int(min(nbytes, nvme.budget)) for nbytes in [nvme.budget, *further]}
    return sorted(found, reverse=True)


def _best_alpha(run: RunCosts, found: Solution) -> Solution | None:
    """Return the solution with the best alpha for the kinds of a solution; None: at none they fit."""
    schedule = Schedule(run, found.kinds)

    def seconds(alpha: float) -> float:
        if (files := schedule.files(alpha)) is None:
            return math.inf
        step = schedule.at(alpha, files)
        return step.seconds if why_not(run, schedule, step, files) is None else math.inf

    alpha, best_s = found.alpha, seconds(found.alpha)
    if best_s > found.step_s * (1 + _WORTH):
        cap = 1.0 if device_bytes(run, found.kinds, 1.0) <= run.device_budget else 0.0
        alpha = min(best_alpha(seconds, cap), found.alpha, key=seconds)
        best_s = seconds(alpha)
    return judged(run, alpha, found.kinds, "", schedule.files(alpha) or 0) if best_s < math.inf else None


def _binding(run: RunCosts, filed: Solution, everything: Solution) -> str:
    """Return the sentence that names what binds.

    Args:
        everything: the solution on a host that holds all that files could.
    """
    written = f"writes {filed.nvme_bytes / GIB:.4g} GiB a step at alpha {filed.alpha:.4g}"
    if filed.alpha == everything.alpha and filed.step_s <= everything.step_s * (1 + _WORTH):
        return f"{everything.binding}; NVMe {written}"
    if filed.nvme_stall_s > _WAITS * filed.step_s:
        return f"NVMe: {written}, and compute waits {filed.nvme_stall_s:.3g} s for files"
    return f"NVMe: {written}; {refused(run, everything.kinds, everything.alpha) or 'compute would wait for more'}"


def why_not(run: RunCosts, schedule: Schedule, step: Step, files: int) -> str | None:
    """Return in words why a step must not write so much; None: it may."""
    nvme, written = run.nvme, sum(schedule.blocks(step.alpha)[:files])
    assert nvme is not None
    if written > nvme.budget:
        return f"alpha {step.alpha:.4g} takes {of_budget(written, nvme.budget)} GiB of files"
    per_s = written / step.seconds if step.seconds else 0.0
    if per_s > nvme.most_written_per_s:
        rated = nvme.most_written_per_s / 1e9
        return (
            f"alpha {step.alpha:.4g} writes {per_s / 1e9:.3g} GB/s on average, rated writes are {rated:.3g} GB/s (a rank's share)"
        )
    return None
