"""Who lives where: which layers are resident, which share of the others' rows the host holds, whose attention runs twice.

    plain        everything fits the device without checkpointing
    resident     as many layers as the device holds; all of them, if it can
    alpha        of the others: the one with the shortest step that the host holds
    small        at alpha 0 reload buffers are smaller: more residents, or at least fewer bytes
    last resort  attention outputs of some layers are computed again, so that what must be stored is the inputs alone

Bytes first: the most residents that fit are taken, since a resident layer costs no copy and no GEMM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ds_memo.errors import MemoError
from ds_memo.solve.alpha import best_alpha
from ds_memo.solve.costs import LayerCosts, RunCosts, Working, host_bytes
from ds_memo.solve.schedule import Schedule, plain_step_s

GIB = 1 << 30
_STEPS = 10_000
"""Alpha is rounded down to a multiple of 1 / _STEPS: it is read by people, and rounding down keeps every budget."""


class NothingFits(MemoError):
    """No setting keeps the budgets.

    Attributes:
        where: "host" or "device".
        needed, budget: bytes; `needed` is the least any setting takes.
    """

    def __init__(self, message: str, where: str, needed: int, budget: int) -> None:
        super().__init__(message)
        self.where = where
        self.needed = needed
        self.budget = budget


@dataclass(frozen=True)
class Homes:
    """The solver's answer for one rank."""

    alpha: float
    residents: frozenset[int]
    dropped: frozenset[int]
    """Layers whose attention output is computed again."""
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
        sentence = f"everything fits without checkpointing: {_of(plain_bytes, run.device_budget)} GiB of device memory"
        return Homes(1.0, frozenset(range(n)), frozenset(), True, plain_step_s(run), 0.0, 0.0, 0, plain_bytes, sentence)
    if alpha is not None:
        return _at(run, alpha, resident_layers)
    full = _most_residents(run, 1.0, resident_layers)
    if full is not None and _host(run, full, 0.0) <= run.host_budget:
        homes = _with_best_alpha(run, full)
        if homes.alpha > 0:
            return homes
    small = _most_residents(run, 0.0, resident_layers)
    if small is not None and _host(run, small, 0.0) <= run.host_budget:
        return _judged(run, 0.0, small, frozenset(), _why_zero(run, small))
    return _last_resort(run, resident_layers)


def place_residents(layers: int, residents: int) -> frozenset[int]:
    """Indices of the resident layers: the last two first (their backward starts at once), the others spread evenly."""
    last = range(layers - min(residents, 2, layers), layers)
    rest, room = max(0, min(residents, layers) - len(last)), layers - len(last)
    return frozenset(last) | {(2 * i + 1) * room // (2 * rest) for i in range(rest)}


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


def host_cap(layers: Sequence[LayerCosts], budget: int) -> float:
    """The largest alpha, in steps of 1 / 10 000, at which the blocks of these swapped layers fit; below 0: none does."""
    low, high = -1, _STEPS  # low fits, or is below 0
    while low < high:
        middle = (low + high + 1) // 2
        if host_bytes(layers, middle / _STEPS) <= budget:
            low = middle
        else:
            high = middle - 1
    return low / _STEPS


def device_bytes(run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int] = ()) -> int:
    """The most alive at once in a pass, as ds_memo.swap.engine lets frames come and go.

    forward    a layer runs beside the resident frames below it and one swapped frame on its way out
    between    all resident frames and two swapped ones are there, beside head and loss
    backward   a layer runs beside its own frame, the resident frames below it and the reload of the next swapped one (but one
               whose attention is computed again comes back when it is wanted), and beside gradients on their way
    """
    frames = _frames(run, residents, alpha, dropped)
    held = leaving = before = peak = 0
    for index, (frame, working) in enumerate(frames):
        peak = max(peak, held + leaving + working.forward)
        if index in residents:
            held += frame
        else:
            before, leaving = leaving, frame
    peak = max(peak, held + before + leaving + run.head_bytes)
    below = len(frames) - 1
    for index in range(len(frames) - 1, -1, -1):
        frame, working = frames[index]
        if index in residents:
            held -= frame
        below = min(below, index - 1)
        while below >= 0 and below in residents:
            below -= 1
        reload = frames[below][0] if below >= 0 and below not in dropped else 0
        peak = max(peak, held + frame + reload + working.backward + run.backward_bytes)
    return run.working_bytes + peak


def bytes_at_head(run: RunCosts, homes: Homes) -> int:
    """What layers keep on the device between the forward and the backward: the resident frames and two swapped ones."""
    if homes.plain:
        return sum(layer.plain_bytes for layer in run.layers)
    frames = _frames(run, homes.residents, homes.alpha, homes.dropped)
    swapped = [frame for index, (frame, _) in enumerate(frames) if index not in homes.residents]
    return sum(frame for frame, _ in frames) - sum(swapped[:-2])


def _frames(run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int]) -> list[tuple[int, Working]]:
    """Of each layer, as _on_device tells."""
    return [
        _on_device(layer, 1.0, False) if index in residents else _on_device(layer, alpha, index in dropped)
        for index, layer in enumerate(run.layers)
    ]


def _on_device(layer: LayerCosts, alpha: float, drops_attention: bool) -> tuple[int, Working]:
    """Bytes of a layer's frame while it is on the device, and what the layer needs besides."""
    if alpha > 0:
        without = layer.small_frame_bytes - layer.smallest_frame_bytes if drops_attention else 0
        return layer.frame_bytes - without, layer.working
    if drops_attention:
        return layer.smallest_frame_bytes, layer.working_without_attention
    return layer.small_frame_bytes, layer.working_at_0


def _most_residents(run: RunCosts, alpha: float, asked: int | None, drops_attention: bool = False) -> frozenset[int] | None:
    """As many as the device holds while the others are swapped, or as many as asked; None: not even none."""
    n = len(run.layers)
    if asked is not None:
        return place_residents(n, asked)
    least = [0, *itertools.accumulate(sorted(layer.frame_bytes for layer in run.layers))]
    for count in range(n, -1, -1):
        if run.working_bytes + least[count] > run.device_budget:
            continue
        residents = place_residents(n, count)
        if device_bytes(run, residents, alpha, range(n) if drops_attention else ()) <= run.device_budget:
            return residents
    return None


def _host(run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int] = ()) -> int:
    kept = [layer for i, layer in enumerate(run.layers) if i not in residents and i not in dropped]
    return host_bytes(kept, alpha) + sum(run.layers[i].host_bytes(alpha, keeps_attention=False) for i in dropped)


def _at(run: RunCosts, alpha: float, resident_layers: int | None) -> Homes:
    """Alpha is as configured: only the residents are left to choose."""
    residents = _most_residents(run, alpha, resident_layers)
    if residents is None:
        raise _no_device_memory_at(run, alpha)
    need = _host(run, residents, alpha)
    if need > run.host_budget:
        cap = host_cap([layer for i, layer in enumerate(run.layers) if i not in residents], run.host_budget)
        fits = f"memo.alpha of at most {cap:.4g} fits" if cap >= 0 else "even memo.alpha 0 does not fit; leave it out"
        raise NothingFits(
            f"host memory: {len(run.layers) - len(residents)} swapped layers need {need / GIB:.3g} GiB at alpha {alpha}, "
            f"{run.host_budget / GIB:.3g} GiB are available to this rank; {fits}. More memo.resident_layers, a larger "
            "memo.host_memory_gib, a smaller batch or more sequence-parallel ranks help too.",
            "host",
            need,
            run.host_budget,
        )
    return _judged(run, alpha, residents, frozenset(), f"as configured: {_host_use(run, need, alpha)}")


def _with_best_alpha(run: RunCosts, residents: frozenset[int]) -> Homes:
    swapped = [layer for i, layer in enumerate(run.layers) if i not in residents]
    if not swapped:
        used = device_bytes(run, residents, 1.0)
        sentence = f"device memory: all {len(run.layers)} layers are resident in {_of(used, run.device_budget)} GiB"
        return _judged(run, 1.0, residents, frozenset(), sentence)
    cap = host_cap(swapped, run.host_budget)
    schedule = Schedule(run, residents)
    # Up to the next step: where the shortest step is at a multiple itself, rounding must not lose it.
    alpha = math.floor(best_alpha(schedule, cap) * _STEPS + 1e-3) / _STEPS
    use = _host_use(run, _host(run, residents, alpha), alpha)
    if alpha >= 1:
        sentence = f"all rows fit the host and their copies hide: {use}"
    elif alpha >= cap:
        sentence = use
    else:
        sentence = _link(schedule, alpha)
    return _judged(run, alpha, residents, frozenset(), sentence)


def _why_zero(run: RunCosts, residents: frozenset[int]) -> str:
    """What keeps alpha at 0 where the host has room for inputs and attention outputs."""
    swapped = [layer for i, layer in enumerate(run.layers) if i not in residents]
    use = _host_use(run, host_bytes(swapped, 0.0), 0.0)
    if host_cap(swapped, run.host_budget) <= 0:
        return use
    full = device_bytes(run, residents, 1.0)
    if full > run.device_budget and _most_residents(run, 1.0, None) is None:
        return f"device memory: reload buffers for more than alpha 0 would take {_of(full, run.device_budget)} GiB"
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
    """Attention outputs of as many layers as must are computed again: cheapest seconds per byte first."""
    n = len(run.layers)
    residents = _most_residents(run, 0.0, resident_layers)
    dropped: set[int] = set()
    if residents is not None:
        cheapest = [i for i in range(n) if i not in residents and run.layers[i].attention_bytes]
        cheapest.sort(key=lambda i: run.layers[i].attention_s / run.layers[i].attention_bytes)
        need = _host(run, residents, 0.0)
        for index in cheapest:
            if need <= run.host_budget:
                break
            dropped.add(index)
            layer = run.layers[index]
            need -= layer.host_bytes(0.0) - layer.host_bytes(0.0, keeps_attention=False)
    tight = residents is not None and device_bytes(run, residents, 0.0, dropped) > run.device_budget
    if residents is None or tight or need > run.host_budget:  # all of them, which makes reload buffers smaller too
        residents = _most_residents(run, 0.0, resident_layers, drops_attention=True)
        if residents is None:
            raise _no_device_memory(run)
        dropped = set(range(n)) - residents
        need = _host(run, residents, 0.0, dropped)
        if need > run.host_budget:
            raise _no_host_memory(run, n - len(residents), need)
    used = device_bytes(run, residents, 0.0, dropped)
    sentence = (
        f"last resort: attention of {len(dropped)} of {n - len(residents)} swapped layers is computed again; "
        f"{_host_use(run, need, 0.0)}, {_of(used, run.device_budget)} GiB of device memory"
    )
    return _judged(run, 0.0, residents, frozenset(dropped), sentence)


def _judged(run: RunCosts, alpha: float, residents: frozenset[int], dropped: frozenset[int], binding: str) -> Homes:
    step = Schedule(run, residents, dropped).at(alpha)
    return Homes(
        alpha=alpha,
        residents=residents,
        dropped=dropped,
        plain=False,
        step_s=step.seconds,
        d2h_stall_s=step.d2h_stall_s,
        h2d_stall_s=step.h2d_stall_s,
        host_bytes=_host(run, residents, alpha, dropped),
        device_bytes=device_bytes(run, residents, alpha, dropped),
        binding=binding,
    )


def _no_device_memory_at(run: RunCosts, alpha: float) -> NothingFits:
    need, least = (device_bytes(run, (), at) for at in (alpha, 0.0))
    others = "a smaller batch or shorter sequences, a higher ZeRO stage, a tiled loss"
    if alpha > 0 and least <= run.device_budget:
        others = f"memo.alpha 0, which needs {least / GIB:.3g} GiB, or none, {others}"
    return _nothing_fits(
        "device",
        f"device memory: even with no resident layer a step at alpha {alpha} needs {need / GIB:.3g} GiB beside the model's "
        f"states, {run.device_budget / GIB:.3g} GiB are free",
        others,
        need,
        run.device_budget,
    )


def _no_device_memory(run: RunCosts) -> NothingFits:
    need = device_bytes(run, (), 0.0, range(len(run.layers)))
    return _nothing_fits(
        "device",
        f"device memory: even with no resident layer and alpha 0 a step needs {need / GIB:.3g} GiB beside the model's states, "
        f"{run.device_budget / GIB:.3g} GiB are free",
        "a smaller batch or shorter sequences, a higher ZeRO stage, a tiled loss",
        need,
        run.device_budget,
    )


def _no_host_memory(run: RunCosts, swapped: int, need: int) -> NothingFits:
    return _nothing_fits(
        "host",
        f"host memory: the inputs of {swapped} swapped layers alone need {need / GIB:.3g} GiB, "
        f"{run.host_budget / GIB:.3g} GiB are available to this rank",
        "a smaller batch or shorter sequences, more host memory (memo.host_memory_gib, the container's limit, `ulimit -l`)",
        need,
        run.host_budget,
    )


def _nothing_fits(where: str, what: str, others: str, need: int, budget: int) -> NothingFits:
    missing = f"{(need - budget) / GIB:.3g} GiB are missing"
    return NothingFits(f"{what}: {missing}. What helps: {_more_ranks(need, budget)}, {others}.", where, need, budget)


def _more_ranks(need: int, budget: int) -> str:
    times = math.ceil(need / budget) if budget > 0 else 0
    return f"{times} times as many sequence-parallel ranks (on as many more nodes)" if times else "more sequence-parallel ranks"


def _host_use(run: RunCosts, used: int, alpha: float) -> str:
    return f"host memory: {_of(used, run.host_budget)} GiB at alpha {alpha:.4g}"


def _of(used: int, budget: int) -> str:
    return f"{used / GIB:.4g} of {budget / GIB:.4g}"


def as_json(homes: Homes) -> dict[str, Any]:
    """For files and reports."""
    return {**vars(homes), "residents": sorted(homes.residents), "dropped": sorted(homes.dropped)}
