"""The placement of every layer call, and the share alpha of the swapped ones' rows that goes to the host.

docs/placement.md lists the placements, and what is tried in which order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from ds_memo.placement import PlacementKind
from ds_memo.solve.alpha import ALPHA_STEPS, best_alpha
from ds_memo.solve.last_resort import last_resort
from ds_memo.solve.memory import device_bytes, host_cap, most_that_fit, swapped_bytes
from ds_memo.solve.nvme import configured, larger_host, refused, with_files
from ds_memo.solve.placement_kinds import Kinds, place, swapped
from ds_memo.solve.refusals import (
    NothingFits,
    files_too_small,
    host_use,
    host_words,
    nothing_fits,
    of_budget,
    too_little_device_memory,
    too_little_host_memory,
)
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.solve.solution import Solution, judged

_SHORTER = 1e-6
"""Least relative gain for a step to count as shorter."""
_STALLS = 1e-3
"""Share of a step. If compute waits longer than this for copies, fewer copies are tried."""


def solve(
    run: RunCosts,
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_skip_recompute: bool = True,
    unplanned_overhead: float = 1.0,
) -> Solution:
    """Find the placements with the shortest step.

    Args:
        run: seconds, bytes and budgets of this rank.
        alpha, resident_layers: fixed values; None: solved.
        may_skip_recompute: True if layers may go without recompute. Ignored if alpha or resident_layers is fixed.
        unplanned_overhead: device bytes that a pass without any checkpointing takes for each byte that it requests. Above 1 if
            only such a pass has no planned addresses; then one resident layer costs next to nothing.

    Raises:
        NothingFits: not even the inputs alone fit.
    """
    if alpha is not None:
        return _at(run, alpha, resident_layers)
    without_files = partial(_solved, resident_layers=resident_layers, may_skip=may_skip_recompute, overhead=unplanned_overhead)
    return without_files(run) if run.nvme is None else _with_files(run, without_files)


def _with_files(run: RunCosts, without_files: Callable[[RunCosts], Solution]) -> Solution:
    """Return the solution with the shortest step, with files or without."""
    refusals: dict[int, NothingFits] = {}

    @cache
    def solved(host_budget: int) -> Solution | None:
        nvme = run.nvme if host_budget > run.host_budget else None
        try:
            return without_files(replace(run, host_budget=host_budget, nvme=nvme))
        except NothingFits as refusal:
            refusals[host_budget] = refusal
            return None

    best, reach = solved(run.host_budget), larger_host(run).host_budget
    filed = with_files(run, solved, math.inf if best is None else best.step_s)
    if filed is not None:
        return filed
    if best is not None:
        return best
    if (everything := solved(reach)) is None:
        raise refusals[reach]
    why = refused(run, everything.kinds, 0.0)
    assert why is not None  # else they were a solution
    raise files_too_small(refusals[run.host_budget], why)


def _solved(run: RunCosts, resident_layers: int | None, may_skip: bool, overhead: float) -> Solution:
    """Return the solution without files."""
    may_skip = may_skip and resident_layers is None
    nothing = place(len(run.layers), residents=0, no_recompute=len(run.layers))
    if may_skip and _fits(run, nothing, 1.0, overhead):
        used = of_budget(device_bytes(run, nothing, 1.0), run.device_budget)
        return judged(run, 1.0, nothing, f"everything fits without checkpointing: {used} GiB of device memory")
    solution = _checkpointed(run, resident_layers)
    if solution.alpha > 0 and may_skip:
        solution = _without_some_recompute(run, solution)
    return _with_fewer_copies(run, resident_layers, solution)


def alpha_for_host(budget: int, swapped_layers: int, whole_bytes: int, split_bytes: int) -> float:
    """Return the largest alpha with swapped_layers · (whole_bytes + alpha · split_bytes) ≤ budget, at most 1; below 0: none fits.

    Args:
        budget: bytes this rank may use on the host.
        swapped_layers: number of layers that are not resident.
        whole_bytes: bytes of a layer that go to the host at any alpha (input, attention output).
        split_bytes: bytes of the outputs that alpha splits.
    """
    if swapped_layers == 0 or split_bytes == 0:
        return 1.0 if swapped_layers * whole_bytes <= budget else -1.0
    return min(1.0, (budget / swapped_layers - whole_bytes) / split_bytes)


def _fits(run: RunCosts, kinds: Kinds, alpha: float, overhead: float = 1.0) -> bool:
    return device_bytes(run, kinds, alpha) * overhead <= run.device_budget


def _most_residents(run: RunCosts, alpha: float, asked: int | None, no_recompute: int = 0) -> Kinds | None:
    """Return the kinds with `asked` residents or, if None, as many as the device holds. None: the device does not hold them."""
    n = len(run.layers)

    def placed(residents: int) -> Kinds:
        return run.without_inputs(place(n, residents, no_recompute))

    if asked is not None:
        kinds = run.without_inputs(place(n, asked))
        return kinds if _fits(run, kinds, alpha) else None
    residents = most_that_fit(n - no_recompute, lambda residents: _fits(run, placed(residents), alpha))
    return placed(residents) if residents >= 0 else None


def _at(run: RunCosts, alpha: float, resident_layers: int | None) -> Solution:
    """Return the solution at a configured alpha, and perhaps configured residents. Without these, alpha 0 may come to the last
    resort, as alpha that is solved for."""
    placed = run.without_inputs(place(len(run.layers), resident_layers or 0))
    kinds = _most_residents(run, alpha, None) if resident_layers is None else placed
    need = 0 if kinds is None else swapped_bytes(run, kinds, alpha)
    if kinds is not None and need <= run.host_budget:
        return judged(run, alpha, kinds, f"as configured: {host_use(replace(run, nvme=None), need, alpha)}")
    if kinds is not None and run.nvme is not None and (filed := configured(run, kinds, alpha)) is not None:
        return filed
    if alpha == 0 and resident_layers is None:
        return _with_fewer_copies(run, None, _last_resort(run, None, most=0.0), most=0.0)
    if kinds is None:
        raise too_little_device_memory(run, alpha)
    raise too_little_host_memory(run, alpha, kinds, need, None if run.nvme is None else refused(run, kinds, alpha))


def _swapping(run: RunCosts, resident_layers: int | None, no_recompute: int = 0) -> Solution | None:
    """Return the solution with the best alpha; None: device or host is too small for any above 0."""
    tried: dict[tuple[PlacementKind, ...], float] = {}
    for most in _buffer_steps(run):
        if (kinds := _most_residents(run, most, resident_layers, no_recompute)) is not None:
            tried.setdefault(tuple(kinds), most)
    found = [_swapping_up_to(most, run, kinds, no_recompute) for kinds, most in tried.items()]
    return min((solution for solution in found if solution is not None), key=lambda solution: solution.step_s, default=None)


def _buffer_steps(run: RunCosts) -> tuple[float, ...]:
    """Return the alphas above which reload buffers take no more: up to half of the tiles, stored ones are no neighbours."""
    return (1.0,) if run.tiles is None else (1.0, 0.5)


def _swapping_up_to(most: float, run: RunCosts, kinds: Kinds, no_recompute: int) -> Solution | None:
    """Return the solution with the best alpha up to `most`; None: the host is too small for any."""
    if swapped_bytes(run, kinds, 0.0) > run.host_budget:
        return None
    if not swapped(kinds):
        used = of_budget(device_bytes(run, kinds, 1.0), run.device_budget)
        return judged(run, 1.0, kinds, f"device memory: {_in_words(len(kinds), no_recompute)} in {used} GiB")
    cap = min(most, host_cap(run, kinds))
    schedule = Schedule(run, kinds)
    alpha = best_alpha(lambda alpha: schedule.at(alpha).seconds, cap)
    use = host_use(run, swapped_bytes(run, kinds, alpha), alpha)
    if alpha >= 1:
        sentence = f"nothing: all rows fit the host and their copies hide; {use}"
    elif alpha >= cap == most:
        full = of_budget(device_bytes(run, kinds, 1.0), run.device_budget)
        sentence = f"device memory: reload buffers for more than alpha {alpha:.4g} would take {full} GiB"
    elif alpha >= cap:
        sentence = use
    else:
        sentence = _link(schedule, alpha)
    return judged(run, alpha, kinds, sentence)


def _checkpointed(run: RunCosts, resident_layers: int | None) -> Solution:
    solution = _swapping(run, resident_layers)
    if solution is not None and solution.alpha > 0:
        return solution
    small = _most_residents(run, 0.0, resident_layers)
    if small is not None and swapped_bytes(run, small, 0.0) <= run.host_budget:
        return judged(run, 0.0, small, _why_zero(run, small, resident_layers))
    return _last_resort(run, resident_layers)


def _last_resort(run: RunCosts, resident_layers: int | None, most: float = 1.0) -> Solution:
    """Return the solution that recomputes least, with at most this alpha.

    Raises:
        NothingFits: not even the inputs alone fit.
    """
    kinds = last_resort(run, resident_layers)
    if kinds is None:
        raise nothing_fits(run, resident_layers or 0)
    because = "last resort" if any(kind.recomputes_attention for kind in kinds) else host_words(run)
    return _with_rows(run, kinds, because, most)


def _with_fewer_copies(run: RunCosts, resident_layers: int | None, solution: Solution, most: float = 1.0) -> Solution:
    """Try less host memory if compute waits for copies: as much as can hide at best, then none.

    Args:
        most: the largest alpha.
    """
    if solution.d2h_stall_s + solution.h2d_stall_s <= _STALLS * solution.step_s:
        return solution
    forward_s = sum(layer.forward_s for layer in run.layers)
    backward_s = sum(layer.backward_s + layer.replay_s for layer in run.layers)
    hides = int(min(run.d2h_bytes_per_s * forward_s, run.h2d_bytes_per_s * backward_s))
    best = solution
    for host_budget in (min(hides, run.host_budget), 0):
        kinds = last_resort(replace(run, host_budget=host_budget), resident_layers)
        if kinds is None:
            break
        fewer = _with_rows(run, kinds, "link: compute would wait for more copies", most)
        best = min(best, fewer, key=lambda solution: solution.step_s)
    return best if best.step_s < solution.step_s * (1 - _SHORTER) else solution


def _without_some_recompute(run: RunCosts, solution: Solution) -> Solution:
    """Return the solution whose number of layers without recompute makes the step shortest, by bisection: the time is nearly
    convex in that number."""
    n = len(run.layers)
    tried: dict[int, Solution | None] = {0: solution}

    def step_s(number: int) -> float:
        if number not in tried:
            tried[number] = _swapping(run, None, number)
        found = tried[number]
        return found.step_s if found is not None and found.alpha > 0 else math.inf

    least = min(_buffer_steps(run))
    high = most_that_fit(n - 1, lambda number: _fits(run, place(n, 0, number), least))
    most_that_fit(high - 1, lambda number: step_s(number + 1) < step_s(number))
    step_s(high)
    best = tried[min(tried, key=lambda number: (step_s(number), number))]
    return best if best is not None and best.step_s < solution.step_s * (1 - _SHORTER) else solution


def _in_words(layers: int, no_recompute: int) -> str:
    """Return the words for a solution that swaps nothing."""
    some = f"{no_recompute} of {layers} layers run without recompute, the others are resident"
    return some if no_recompute else f"all {layers} layers are resident"


def _why_zero(run: RunCosts, kinds: Kinds, resident_layers: int | None) -> str:
    """Return the sentence that says what keeps alpha at 0."""
    use = host_use(run, swapped_bytes(run, kinds, 0.0), 0.0)
    if host_cap(run, kinds) <= 0:
        return use
    least = min(_buffer_steps(run))
    full = device_bytes(run, kinds, least)
    if full > run.device_budget and _most_residents(run, least, resident_layers) is None:
        return f"device memory: reload buffers for more than alpha 0 would take {of_budget(full, run.device_budget)} GiB"
    return _link(Schedule(run, kinds), 0.0)


def _link(schedule: Schedule, alpha: float) -> str:
    """Return the sentence that names the copies that limit alpha: those whose stalls grow most beyond it."""
    more = max(1 / ALPHA_STEPS, *(1 / timing.tiles.count for timing in schedule.timings if timing.tiles is not None), 0.0)
    here, there = schedule.at(alpha), schedule.at(min(1.0, alpha + more))
    to_host = there.d2h_stall_s - here.d2h_stall_s >= there.h2d_stall_s - here.h2d_stall_s
    stall = here.d2h_stall_s + here.h2d_stall_s
    waits = f", stalls {stall:.3g} s a step" if stall > 1e-3 * here.seconds else ""
    if there.d2h_stall_s <= here.d2h_stall_s and there.h2d_stall_s <= here.h2d_stall_s:
        return f"nothing to gain: storing more rows than alpha {alpha:.4g} saves no time"
    way = "to the host hide behind the forward" if to_host else "from the host hide behind the backward"
    return f"link: copies {way} up to alpha {alpha:.4g}{waits}"


def _with_rows(run: RunCosts, kinds: Kinds, because: str, most: float) -> Solution:
    """Return the solution for kinds that were packed at alpha 0, with the best alpha up to `most` that still fits."""
    n, alpha = len(run.layers), 0.0
    fits = next((step for step in _buffer_steps(run) if _fits(run, kinds, step)), 0.0)
    if swapped(kinds) and fits:
        schedule = Schedule(run, kinds)
        most = min(most, fits, max(0.0, host_cap(run, kinds)))
        alpha = best_alpha(lambda alpha: schedule.at(alpha).seconds, most)
    attention, gemms = sum(kind.recomputes_attention for kind in kinds), sum(kind.without_gemms for kind in kinds)
    again = f"{attention} of {n} layers recompute attention; " if attention else ""
    computed = sum(kind is PlacementKind.SWAPPED_WITHOUT_INPUT for kind in kinds)
    again += f"{computed} of {n} layers compute their input; " if computed else ""
    without = f"{gemms} of {n} layers stay on the device without GEMM outputs; " if gemms else ""
    on_host = f"{of_budget(swapped_bytes(run, kinds, alpha), run.host_budget)} GiB of {host_words(run)} at alpha {alpha:.4g}"
    on_device = f"{of_budget(device_bytes(run, kinds, alpha), run.device_budget)} GiB of device memory"
    return judged(run, alpha, kinds, f"{because}: {again}{without}{on_host}, {on_device}")
