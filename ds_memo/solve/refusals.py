"""Errors for runs that fit with no placement, with the missing bytes and the cure."""

from __future__ import annotations

import math

from ds_memo.errors import MemoError
from ds_memo.solve.last_resort import fewest_without_gemms, inputs_alone, last_resort
from ds_memo.solve.memory import device_bytes, host_cap, swapped_bytes
from ds_memo.solve.placement_kinds import Kinds, place, swapped
from ds_memo.solve.run_costs import RunCosts
from ds_memo.units import GIB

_SHORTER = "a smaller batch or shorter sequences"
_LESS_NON_LAYER = f"{_SHORTER}, ZeRO stage 3 where it is lower"
_MORE_HOST = "more host memory (memo.host_memory_gib, the container's limit, `ulimit -l`)"
_NVME, _MORE_NVME = "drives behind it (memo.nvme)", "more room on drives (memo.nvme.gib)"


class NothingFits(MemoError):
    """No placement of the layers keeps the budgets.

    Attributes:
        where: "host" or "device".
        needed, budget: bytes; `needed` is the least that any solution takes.
        device_needed: bytes; a sufficient device budget. None: more device memory does not help.
    """

    def __init__(self, message: str, where: str, needed: int, budget: int, device_needed: int | None) -> None:
        super().__init__(message)
        self.numbers = where, needed, budget, device_needed
        self.where, self.needed, self.budget, self.device_needed = self.numbers


def too_little_device_memory(run: RunCosts, alpha: float) -> NothingFits:
    """Return the error for a configured alpha that does not fit the device."""
    need, least = (device_bytes(run, place(len(run.layers), 0), at) for at in (alpha, 0.0))
    others = _LESS_NON_LAYER
    if alpha > 0 and least <= run.device_budget:
        others = f"memo.alpha 0, which needs {least / GIB:.3g} GiB, or none, {others}"
    return _device_refused(run, f"even with no resident layer a step at alpha {alpha} needs", others, need)


def too_little_host_memory(run: RunCosts, alpha: float, kinds: Kinds, need: int, files: str | None = None) -> NothingFits:
    """Return the error for a configured alpha that does not fit the host.

    Args:
        need: bytes of all host blocks.
        files: why drives behind it are not enough, if there are any.
    """
    calls = swapped(kinds)
    cap = host_cap(run, kinds)
    resort = cap < 0 and last_resort(run, None) is not None
    message = host_too_small(f"{len(calls)} swapped layers", need, alpha, run.host_budget, cap, resort)
    error = NothingFits(message, "host", need, run.host_budget, None)
    return error if files is None else files_too_small(error, files)


def files_too_small(refusal: NothingFits, why: str) -> NothingFits:
    """Return the error for a run that does not fit the host, nor the drives behind it.

    Args:
        refusal: the error without drives.
    """
    return NothingFits(f"{refusal} Those of memo.nvme are not enough: {why}.", *refusal.numbers)


def host_too_small(who: str, need: float, alpha: float, budget: int, most: float, resort: bool = False) -> str:
    """The message for a configured alpha that the host is too small for.

    Args:
        who: the layers.
        need, budget: bytes.
        most: the alpha that would fit; below 0: none.
        resort: True if alpha 0 fits as the last resort.
    """
    fits = f"memo.alpha of at most {math.floor(most * 1000) / 1000} fits" if most >= 0 else "even memo.alpha 0 does not fit"
    if resort:
        fits = "memo.alpha 0 without memo.resident_layers fits: layers recompute attention, or keep their inputs on the device"
    return (
        f"host memory: {who} need {need / GIB:.3g} GiB at alpha {alpha}, {budget / GIB:.3g} GiB are available to this rank; "
        f"{fits}. More memo.resident_layers, a larger memo.host_memory_gib, a smaller batch or more sequence-parallel ranks help "
        "too."
    )


def nothing_fits(run: RunCosts, residents: int) -> NothingFits:
    """Return the error for a run whose inputs alone do not fit, with the configured resident layers. With NVMe, its budget is in
    the host's."""
    least = fewest_without_gemms(run, residents)
    device_needed = device_bytes(run, least, 0.0)
    on_device = inputs_alone(run, residents)
    if on_device is None:
        what = (
            f"even with {f'the {residents} resident layers asked for' if residents else 'no resident layer'} and alpha 0 a step"
        )
        if without := sum(kind.without_gemms for kind in least):
            what += f", with the inputs of {without} layers that the host has no room for,"
        return _device_refused(run, f"{what} needs", _LESS_NON_LAYER, device_needed)
    need = swapped_bytes(run, on_device, 0.0)
    more = [layer for layer, kind in zip(run.layers, on_device, strict=True) if kind.without_gemms]
    room = f", and the device has room for those of {len(more)} more" if more else ""
    what = (
        f"{host_words(run)}: the inputs of {len(swapped(on_device))} swapped layers alone need {need / GIB:.3g} GiB, "
        f"{run.host_budget / GIB:.3g} GiB are available to this rank{room}"
    )
    others, elsewhere = (
        f"{_SHORTER}, {_MORE_HOST}, {_MORE_NVME if run.nvme else _NVME}",
        sum(x.smallest_frame_bytes for x in more),
    )
    return _refused("host", what, others, need, run.host_budget, device_needed, elsewhere)


def _device_refused(run: RunCosts, what: str, others: str, need: int) -> NothingFits:
    free = run.device_budget / GIB
    what = f"device memory: {what} {need / GIB:.3g} GiB beside the model's states, {free:.3g} GiB are free"
    return _refused("device", what, others, need, run.device_budget, need)


def _refused(where: str, what: str, others: str, need: int, budget: int, device_needed: int, elsewhere: int = 0) -> NothingFits:
    """Return the error.

    Args:
        elsewhere: bytes of the same kind that the other memory holds.
    """
    ranks = "more sequence-parallel ranks"  # on the device they also share its states, by an amount that is not known here
    if where == "host" and budget + elsewhere > 0:
        times = math.ceil((need + elsewhere) / (budget + elsewhere))
        ranks = f"{times} times as many sequence-parallel ranks (on as many more nodes)"
    missing = f"{(need - budget) / GIB:.3g} GiB are missing"
    return NothingFits(f"{what}: {missing}. What helps: {ranks}, {others}.", where, need, budget, device_needed)


def host_words(run: RunCosts) -> str:
    """Return the words for where host blocks are."""
    return "host memory" if run.nvme is None else "host memory and NVMe"


def host_use(run: RunCosts, used: int, alpha: float) -> str:
    return f"{host_words(run)}: {of_budget(used, run.host_budget)} GiB at alpha {alpha:.4g}"


def of_budget(used: int, budget: int) -> str:
    return f"{used / GIB:.4g} of {budget / GIB:.4g}"
