"""Who lives where: the places of the layers, and the share alpha of the swapped ones' rows that goes to the host.

What is considered, in this order:

plain        no layer is checkpointed, if the device holds everything
resident     as many layers as the device holds, beside reload buffers for the others
alpha        of the others: the one with the shortest step among those that the host holds
some plain   where the copies hide, one more resident layer saves nothing: some layers go without checkpointing instead, which
             saves their replay
small        alpha 0, where reload buffers are smaller
lean         the host is too small even then: layers stay on the device without their GEMM outputs
last resort  and some compute attention again (see ds_memo.solve.last_resort)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ds_memo.placement import Places, place
from ds_memo.solve.alpha import best_alpha
from ds_memo.solve.costs import RunCosts, host_bytes
from ds_memo.solve.last_resort import last_resort
from ds_memo.solve.memory import ALPHA_STEPS, device_bytes, host_cap, most_that_fit, swapped_bytes
from ds_memo.solve.refusals import host_use, nothing_fits, of_budget, too_little_device_memory, too_little_host_memory
from ds_memo.solve.schedule import Schedule

_SHORTER = 1e-6
"""Relative: a step counts as shorter only by this much."""
UNPLANNED = 1.1
"""What torch's allocator takes for each byte of a pass whose addresses are not planned. With less room than that it asks CUDA for
memory, and gives some back, in every step."""
_STALLS = 1e-3
"""Share of a step: if compute waits longer than this for copies, fewer copies are tried."""


@dataclass(frozen=True)
class Homes:
    """The solver's answer for one rank."""

    alpha: float
    places: Places
    step_s: float
    """Predicted seconds of a forward and backward, with head and loss."""
    d2h_stall_s: float
    h2d_stall_s: float
    host_bytes: int
    """Predicted bytes of all host blocks."""
    device_bytes: int
    """Predicted bytes beside parameters, gradients and optimizer states."""
    binding: str
    """The constraint that set alpha or the residents, one sentence."""
    plain: bool
    """Everything fits: no layer is checkpointed at all."""


def solve(
    run: RunCosts,
    alpha: float | None = None,
    resident_layers: int | None = None,
    may_be_plain: bool = True,
    planned: bool = False,
) -> Homes:
    """Find the setting with the shortest step.

    Args:
        run: what is known.
        alpha, resident_layers: obeyed if given.
        may_be_plain: whether leaving layers uncheckpointed is an answer, where neither is given.
        planned: addresses of passes with frames are planned. Then plain training, whose addresses are not, must leave room for
            what torch's allocator loses between blocks; one resident layer among plain ones costs next to nothing.

    Raises:
        NothingFits: not even inputs alone do.
    """
    if alpha is not None:
        return _at(run, alpha, resident_layers)
    may_be_plain = may_be_plain and resident_layers is None
    everyone = place(len(run.layers), residents=0, plain=len(run.layers))
    if may_be_plain and _fits(run, everyone, 1.0, UNPLANNED if planned else 1.0):
        used = of_budget(device_bytes(run, everyone, 1.0), run.device_budget)
        return judged(run, 1.0, everyone, f"everything fits without checkpointing: {used} GiB of device memory")
    homes = _checkpointed(run, resident_layers)
    if homes.alpha > 0 and may_be_plain:
        homes = _with_plain_layers(run, homes)
    if homes.d2h_stall_s + homes.h2d_stall_s > _STALLS * homes.step_s:
        homes = _with_fewer_copies(run, resident_layers, homes)
    return homes


def alpha_for_host(budget: int, swapped_layers: int, whole_bytes: int, split_bytes: int) -> float:
    """The largest alpha with swapped_layers · (whole_bytes + alpha · split_bytes) ≤ budget, at most 1; below 0: none fits.

    Args:
        budget: bytes this rank may use on the host.
        swapped_layers: layers that are not resident.
        whole_bytes: bytes of a layer that go to the host whatever alpha is (input, attention output).
        split_bytes: bytes of the outputs that alpha splits.
    """
    if swapped_layers == 0 or split_bytes == 0:
        return 1.0 if swapped_layers * whole_bytes <= budget else -1.0
    return min(1.0, (budget / swapped_layers - whole_bytes) / split_bytes)


def _fits(run: RunCosts, places: Places, alpha: float, takes: float = 1.0) -> bool:
    return device_bytes(run, places, alpha) * takes <= run.device_budget


def _most_residents(run: RunCosts, alpha: float, asked: int | None, plain: int = 0) -> Places | None:
    """Places with as many residents as asked for or, if None, as the device holds, beside so many plain layers and while the
    others are swapped. None: the device does not hold them."""
    n = len(run.layers)
    if asked is not None:
        places = place(n, asked)
        return places if _fits(run, places, alpha) else None
    count = most_that_fit(n - plain, lambda count: _fits(run, place(n, count, plain), alpha))
    return place(n, count, plain) if count >= 0 else None


def _at(run: RunCosts, alpha: float, resident_layers: int | None) -> Homes:
    """Alpha is configured, and perhaps the residents too."""
    places = _most_residents(run, alpha, None) if resident_layers is None else place(len(run.layers), resident_layers)
    if places is None:
        raise too_little_device_memory(run, alpha)
    need = swapped_bytes(run, places, alpha)
    if need > run.host_budget:
        raise too_little_host_memory(run, alpha, places, need)
    return judged(run, alpha, places, f"as configured: {host_use(run, need, alpha)}")


def _swapping(run: RunCosts, resident_layers: int | None, plain: int = 0) -> Homes | None:
    """The best alpha with room for any: reload buffers are counted in full. None: device or host is too small for that."""
    places = _most_residents(run, 1.0, resident_layers, plain)
    if places is None or swapped_bytes(run, places, 0.0) > run.host_budget:
        return None
    swapped = [run.layers[index] for index in places.swapped(len(run.layers))]
    if not swapped:
        used = of_budget(device_bytes(run, places, 1.0), run.device_budget)
        return judged(run, 1.0, places, f"device memory: {_in_words(run, places)} in {used} GiB")
    cap = host_cap(swapped, run.host_budget)
    schedule = Schedule(run, places)
    alpha = _rounded(best_alpha(schedule, cap))
    use = host_use(run, swapped_bytes(run, places, alpha), alpha)
    if alpha >= 1:
        sentence = f"all rows fit the host and their copies hide: {use}"
    elif alpha >= cap:
        sentence = use
    else:
        sentence = _link(schedule, alpha)
    return judged(run, alpha, places, sentence)


def _rounded(alpha: float) -> float:
    """Down to a multiple of 1 / ALPHA_STEPS, but up where the next one is only a rounding error away."""
    return math.floor(alpha * ALPHA_STEPS + 1e-3) / ALPHA_STEPS


def _checkpointed(run: RunCosts, resident_layers: int | None) -> Homes:
    homes = _swapping(run, resident_layers)
    if homes is not None and homes.alpha > 0:
        return homes
    small = _most_residents(run, 0.0, resident_layers)
    if small is not None and swapped_bytes(run, small, 0.0) <= run.host_budget:
        return judged(run, 0.0, small, _why_zero(run, small, resident_layers))
    places = last_resort(run, resident_layers)
    if places is None:
        raise nothing_fits(run, resident_layers or 0)
    return _with_rows(run, places, "last resort" if places.dropped else "host memory")


def _with_fewer_copies(run: RunCosts, resident_layers: int | None, homes: Homes) -> Homes:
    """Where compute waits for copies, try to use less of the host: only as much as can hide at best, or nothing."""
    forward_s = sum(layer.forward_s for layer in run.layers)
    backward_s = sum(layer.backward_s + layer.replay_s for layer in run.layers)
    hides = int(min(run.d2h_bytes_per_s * forward_s, run.h2d_bytes_per_s * backward_s))
    best = homes
    for host_budget in (min(hides, run.host_budget), 0):
        places = last_resort(replace(run, host_budget=host_budget), resident_layers)
        if places is None:
            break
        fewer = _with_rows(run, places, "link: compute would wait for more copies")
        best = min(best, fewer, key=lambda homes: homes.step_s)
    return best if best.step_s < homes.step_s * (1 - _SHORTER) else homes


def _with_plain_layers(run: RunCosts, homes: Homes) -> Homes:
    """The same with as many plain layers as make the step shortest, found by bisection: the time is nearly convex in their
    number."""
    n, tried = len(run.layers), {0: homes}

    def step_s(plain: int) -> float:
        if plain not in tried:
            tried[plain] = _swapping(run, None, plain)
        return tried[plain].step_s if tried[plain] is not None and tried[plain].alpha > 0 else math.inf

    high = most_that_fit(n - 1, lambda count: _fits(run, place(n, 0, count), 1.0))
    most_that_fit(high - 1, lambda count: step_s(count + 1) < step_s(count))
    step_s(high)
    best = min(tried, key=lambda plain: (step_s(plain), plain))
    return tried[best] if step_s(best) < homes.step_s * (1 - _SHORTER) else homes


def _in_words(run: RunCosts, places: Places) -> str:
    """Where all layers stay."""
    n, plain = len(run.layers), len(places.plain)
    return f"{plain} of {n} layers are plain, the others resident" if plain else f"all {n} layers are resident"


def _why_zero(run: RunCosts, places: Places, resident_layers: int | None) -> str:
    """What keeps alpha at 0 where the host has room for inputs and attention outputs."""
    swapped = [run.layers[index] for index in places.swapped(len(run.layers))]
    use = host_use(run, host_bytes(swapped, 0.0), 0.0)
    if host_cap(swapped, run.host_budget) <= 0:
        return use
    full = device_bytes(run, places, 1.0)
    if full > run.device_budget and _most_residents(run, 1.0, resident_layers) is None:
        return f"device memory: reload buffers for more than alpha 0 would take {of_budget(full, run.device_budget)} GiB"
    return _link(Schedule(run, places), 0.0)


def _link(schedule: Schedule, alpha: float) -> str:
    """The sentence that says which copies keep alpha from being larger: those whose stalls grow most beyond it."""
    here, there = schedule.at(alpha), schedule.at(min(1.0, alpha + 0.01))
    to_host = there.d2h_stall_s - here.d2h_stall_s >= there.h2d_stall_s - here.h2d_stall_s
    stall = here.d2h_stall_s + here.h2d_stall_s
    waits = f", stalls {stall:.3g} s a step" if stall > 1e-3 * here.seconds else ""
    if there.d2h_stall_s <= here.d2h_stall_s and there.h2d_stall_s <= here.h2d_stall_s:
        return f"nothing to gain: storing more rows than alpha {alpha:.4g} saves no time"
    way = "to the host hide behind the forward" if to_host else "from the host hide behind the backward"
    return f"link: copies {way} up to alpha {alpha:.4g}{waits}"


def _with_rows(run: RunCosts, places: Places, because: str) -> Homes:
    """Homes with places that were packed at alpha 0, and the best alpha that still fits."""
    n, alpha = len(run.layers), 0.0
    if (swapped := [run.layers[index] for index in places.swapped(n)]) and _fits(run, places, 1.0):
        alpha = _rounded(best_alpha(Schedule(run, places), max(0.0, host_cap(swapped, run.host_budget))))
    again = f"{len(places.dropped)} of {n} layers compute attention again; " if places.dropped else ""
    lean = f"{len(places.lean)} of {n} layers are lean, they stay on the device without GEMM outputs; " if places.lean else ""
    on_host = f"{of_budget(swapped_bytes(run, places, alpha), run.host_budget)} GiB of host memory at alpha {alpha:.4g}"
    on_device = f"{of_budget(device_bytes(run, places, alpha), run.device_budget)} GiB of device memory"
    return judged(run, alpha, places, f"{because}: {again}{lean}{on_host}, {on_device}")


def judged(run: RunCosts, alpha: float, places: Places, binding: str) -> Homes:
    """These homes with their predicted times and bytes, whether they fit or not."""
    step = Schedule(run, places).at(alpha)
    return Homes(
        alpha=alpha,
        places=places,
        step_s=step.seconds,
        d2h_stall_s=step.d2h_stall_s,
        h2d_stall_s=step.h2d_stall_s,
        host_bytes=swapped_bytes(run, places, alpha),
        device_bytes=device_bytes(run, places, alpha),
        binding=binding,
        plain=len(places.plain) == len(run.layers),
    )
