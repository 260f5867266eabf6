"""Who lives where: which layers are resident, which share of the others' rows the host holds, whose attention runs twice.

    plain        everything fits the device without checkpointing
    resident     as many layers as the device holds; all of them, if it can
    alpha        of the others: the one with the shortest step that the host holds
    small        at alpha 0 reload buffers are smaller: more residents, or at least fewer bytes
    lean         the host is too small even so: layers stay on the device without GEMM outputs
    last resort  and attention of some is computed again (see ds_memo.solve.last_resort)

Bytes first: the most residents that fit are taken, since a resident layer costs no copy and no GEMM.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from ds_memo.solve.alpha import best_alpha
from ds_memo.solve.costs import RunCosts, host_bytes
from ds_memo.solve.last_resort import last_resort, place_residents
from ds_memo.solve.memory import ALPHA_STEPS, device_bytes, host_cap, swapped_bytes
from ds_memo.solve.refusals import host_use, nothing_fits, of_budget, too_little_device_memory, too_little_host_memory
from ds_memo.solve.schedule import Schedule, plain_step_s


@dataclass(frozen=True)
class Homes:
    """The solver's answer for one rank."""

    alpha: float
    residents: frozenset[int]
    dropped: frozenset[int]
    """Layers whose attention output is computed again."""
    lean: frozenset[int]
    """Layers that stay on the device like residents, but without GEMM outputs."""
    plain: bool
    """Everything fits: no layer is checkpointed at all."""
    step_s: float
    """Predicted seconds of a forward and backward, with head and what else `run` tells of."""
    d2h_stall_s: float
    h2d_stall_s: float
    host_bytes: int
    """Predicted bytes of all host blocks."""
    device_bytes: int
    """Predicted bytes beside parameters, gradients and optimizer states."""
    binding: str
    """The constraint that set alpha or the residents, one sentence."""


def solve(
    run: RunCosts,
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_be_plain: bool = True,
) -> Homes:
    """Find the setting with the shortest step.

    Args:
        run: what is known.
        alpha, resident_layers: obeyed if given.
        may_be_plain: whether leaving the layers uncheckpointed is an answer.

    Raises:
        NothingFits: not even inputs alone do.
    """
    n = len(run.layers)
    plain_bytes = run.working_bytes + sum(layer.plain_bytes for layer in run.layers)
    plain_bytes += max(run.head_bytes, run.backward_bytes + max(layer.working.backward for layer in run.layers))
    if may_be_plain and alpha is None and resident_layers is None and plain_bytes <= run.device_budget:
        sentence = f"everything fits without checkpointing: {of_budget(plain_bytes, run.device_budget)} GiB of device memory"
        everyone, nobody = frozenset(range(n)), frozenset()
        return Homes(1.0, everyone, nobody, nobody, True, plain_step_s(run), 0.0, 0.0, 0, plain_bytes, sentence)
    if alpha is not None:
        return _at(run, alpha, resident_layers)
    full = _most_residents(run, 1.0, resident_layers)
    if full is not None and swapped_bytes(run, full, 0.0) <= run.host_budget:
        homes = _with_best_alpha(run, full)
        if homes.alpha > 0:
            return homes
    small = _most_residents(run, 0.0, resident_layers)
    if small is not None and swapped_bytes(run, small, 0.0) <= run.host_budget:
        return _judged(run, 0.0, small, _why_zero(run, small))
    return _last_resort(run, resident_layers)


def alpha_for_host(budget: int, swapped_layers: int, whole_bytes: int, row_bytes: int) -> float:
    """The largest alpha with swapped_layers · (whole_bytes + alpha · row_bytes) ≤ budget, at most 1; below 0: none fits.

    Args:
        budget: bytes this rank may use on the host.
        swapped_layers: layers that are not resident.
        whole_bytes: bytes of a layer that go to the host whatever alpha is (input, attention output).
        row_bytes: bytes of the outputs that alpha splits.
    """
    if swapped_layers == 0 or row_bytes == 0:
        return 1.0 if swapped_layers * whole_bytes <= budget else -1.0
    return min(1.0, (budget / swapped_layers - whole_bytes) / row_bytes)


def _most_residents(run: RunCosts, alpha: float, asked: int | None) -> frozenset[int] | None:
    """As many as the device holds while the others are swapped, or as many as asked; None: not even none."""
    n = len(run.layers)
    if asked is not None:
        return place_residents(n, asked)
    least = [0, *itertools.accumulate(sorted(layer.frame_bytes for layer in run.layers))]
    for count in range(n, -1, -1):
        if run.working_bytes + least[count] > run.device_budget:
            continue
        residents = place_residents(n, count)
        if device_bytes(run, residents, alpha) <= run.device_budget:
            return residents
    return None


def _at(run: RunCosts, alpha: float, resident_layers: int | None) -> Homes:
    """Alpha is as configured: only the residents are left to choose."""
    residents = _most_residents(run, alpha, resident_layers)
    if residents is None:
        raise too_little_device_memory(run, alpha)
    need = swapped_bytes(run, residents, alpha)
    if need > run.host_budget:
        raise too_little_host_memory(run, alpha, residents, need)
    return _judged(run, alpha, residents, f"as configured: {host_use(run, need, alpha)}")


def _with_best_alpha(run: RunCosts, residents: frozenset[int]) -> Homes:
    swapped = [layer for i, layer in enumerate(run.layers) if i not in residents]
    if not swapped:
        used = device_bytes(run, residents, 1.0)
        sentence = f"device memory: all {len(run.layers)} layers are resident in {of_budget(used, run.device_budget)} GiB"
        return _judged(run, 1.0, residents, sentence)
    cap = host_cap(swapped, run.host_budget)
    schedule = Schedule(run, residents)
    # Up to the next step: where the shortest step is at a multiple itself, rounding must not lose it.
    alpha = math.floor(best_alpha(schedule, cap) * ALPHA_STEPS + 1e-3) / ALPHA_STEPS
    use = host_use(run, swapped_bytes(run, residents, alpha), alpha)
    if alpha >= 1:
        sentence = f"all rows fit the host and their copies hide: {use}"
    elif alpha >= cap:
        sentence = use
    else:
        sentence = _link(schedule, alpha)
    return _judged(run, alpha, residents, sentence)


def _why_zero(run: RunCosts, residents: frozenset[int]) -> str:
    """What keeps alpha at 0 where the host has room for inputs and attention outputs."""
    swapped = [layer for i, layer in enumerate(run.layers) if i not in residents]
    use = host_use(run, host_bytes(swapped, 0.0), 0.0)
    if host_cap(swapped, run.host_budget) <= 0:
        return use
    full = device_bytes(run, residents, 1.0)
    if full > run.device_budget and _most_residents(run, 1.0, None) is None:
        return f"device memory: reload buffers for more than alpha 0 would take {of_budget(full, run.device_budget)} GiB"
    return _link(Schedule(run, residents), 0.0)


def _link(schedule: Schedule, alpha: float) -> str:
    """Which copies alpha stops at: those whose stalls grow most beyond it."""
    here, there = schedule.at(alpha), schedule.at(min(1.0, alpha + 0.01))
    to_host = there.d2h_stall_s - here.d2h_stall_s >= there.h2d_stall_s - here.h2d_stall_s
    stall = here.d2h_stall_s + here.h2d_stall_s
    waits = f", stalls {stall:.3g} s a step" if stall > 1e-3 * here.seconds else ""
    if there.d2h_stall_s <= here.d2h_stall_s and there.h2d_stall_s <= here.h2d_stall_s:
        return f"nothing to gain: storing more rows than alpha {alpha:.4g} saves no time"
    way = "to the host hide behind the forward" if to_host else "from the host hide behind the backward"
    return f"link: copies {way} up to alpha {alpha:.4g}{waits}"


def _last_resort(run: RunCosts, resident_layers: int | None) -> Homes:
    split = last_resort(run, resident_layers)
    if split is None:
        raise nothing_fits(run, resident_layers or 0)
    on_host = host_use(run, split.host_bytes(run), 0.0)
    on_device = f"{of_budget(split.device_bytes(run), run.device_budget)} GiB of device memory"
    if split.dropped:
        again = f"last resort: {len(split.dropped)} of {len(run.layers)} layers compute attention again"
        sentence = f"{again}, {len(split.lean)} are lean; {on_host}, {on_device}"
    else:
        sentence = f"{on_host}: {len(split.lean)} layers are lean, they stay on the device without GEMM outputs; {on_device}"
    return _judged(run, 0.0, split.residents, sentence, split.dropped, split.lean)


def _judged(
    run: RunCosts,
    alpha: float,
    residents: frozenset[int],
    binding: str,
    dropped: frozenset[int] = frozenset(),
    lean: frozenset[int] = frozenset(),
) -> Homes:
    step = Schedule(run, residents, dropped, lean).at(alpha)
    return Homes(
        alpha=alpha,
        residents=residents,
        dropped=dropped,
        lean=lean,
        plain=False,
        step_s=step.seconds,
        d2h_stall_s=step.d2h_stall_s,
        h2d_stall_s=step.h2d_stall_s,
        host_bytes=swapped_bytes(run, residents, alpha, dropped, lean),
        device_bytes=device_bytes(run, residents, alpha, dropped, lean),
        binding=binding,
    )


def as_json(homes: Homes) -> dict[str, Any]:
    """For files and reports."""
    return {**vars(homes), **{name: sorted(getattr(homes, name)) for name in ("residents", "dropped", "lean")}}
