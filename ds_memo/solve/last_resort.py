"""The last resort: the host is too small for the inputs and attention outputs of all layers that are not resident.

Whatever is stored saves time, wherever it lies, so what saves most per byte is stored first. Beyond some thousand tokens that is
attention, and then no layer is resident while attention must be computed again. Layers that are not resident keep their input,
and their attention output if there is room: as many of them *lean*, on the device, as it holds, the others on the host. So the
longest length is that of both memories together; where the host has nothing to give, this is torch.utils.checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ds_memo.solve.costs import RunCosts
from ds_memo.solve.memory import device_bytes, swapped_bytes


class Split(NamedTuple):
    """Layers by where they keep what; those in neither `residents` nor `lean` are swapped, at alpha 0."""

    residents: frozenset[int]
    dropped: frozenset[int]
    lean: frozenset[int]

    def device_bytes(self, run: RunCosts) -> int:
        return device_bytes(run, self.residents, 0.0, self.dropped, self.lean)

    def host_bytes(self, run: RunCosts) -> int:
        return swapped_bytes(run, self.residents, 0.0, self.dropped, self.lean)


def place_residents(layers: int, residents: int) -> frozenset[int]:
    """Indices of the resident layers: the last two first (their backward starts at once), the others spread evenly."""
    last = range(layers - min(residents, 2, layers), layers)
    rest, room = max(0, min(residents, layers) - len(last)), layers - len(last)
    return frozenset(last) | {(2 * i + 1) * room // (2 * rest) for i in range(rest)}


def last_resort(run: RunCosts, resident_layers: int | None) -> Split | None:
    """The split that computes least again; None: nothing fits.

    Args:
        resident_layers: obeyed if given.
    """
    n = len(run.layers)
    residents = resident_layers
    if residents is None:
        keeping = n if _attention_saves_more(run) else 0
        residents = max(0, _most(n, lambda count: _packed(run, count, keeping) is not None))
    keeping = _most(n - residents, lambda count: _packed(run, residents, count) is not None)
    return _packed(run, residents, keeping) if keeping >= 0 else None


def inputs_alone(run: RunCosts, residents: int, fits: Callable[[Split], bool]) -> Split | None:
    """Of the splits that compute all attention again, the one with most lean layers that fits."""
    return _with_most_lean(run, residents, 0, fits)


def fewest_lean(run: RunCosts, residents: int) -> Split:
    """Of the splits that compute all attention again, the one with as many lean layers as the host is too small for."""
    others = len(run.layers) - residents
    swapped = _most(others, lambda count: _split(run, residents, 0, others - count).host_bytes(run) <= run.host_budget)
    return _split(run, residents, 0, others - max(0, swapped))


def _attention_saves_more(run: RunCosts) -> bool:
    """Per stored byte, than GEMM outputs."""
    attention, gemms = sum(layer.attention_bytes for layer in run.layers), sum(layer.split_bytes for layer in run.layers)
    saved_by_attention, saved_by_gemms = sum(layer.attention_s for layer in run.layers), sum(layer.gemm_s for layer in run.layers)
    return saved_by_attention * gemms > saved_by_gemms * attention


def _packed(run: RunCosts, residents: int, keeping: int) -> Split | None:
    """With so many resident layers, and so many others that keep their attention output; None: it does not fit."""
    for swapped_first in (False, True):
        split = _with_most_lean(
            run, residents, keeping, lambda split: split.device_bytes(run) <= run.device_budget, swapped_first
        )
        if split is not None and split.host_bytes(run) <= run.host_budget:
            return split
    return None


def _with_most_lean(
    run: RunCosts, residents: int, keeping: int, fits: Callable[[Split], bool], swapped_first: bool = False
) -> Split | None:
    lean = _most(len(run.layers) - residents, lambda count: fits(_split(run, residents, keeping, count, swapped_first)))
    return _split(run, residents, keeping, lean, swapped_first) if lean >= 0 else None


def _split(run: RunCosts, residents: int, keeping: int, lean: int, swapped_first: bool = False) -> Split:
    """Attention that is cheapest by the byte is dropped first.

    Args:
        swapped_first: of like layers, those that are swapped drop theirs first: reload buffers get smaller, but compute waits for
            them. Otherwise the lean ones do.
    """
    whole = place_residents(len(run.layers), residents)
    others = [index for index in range(len(run.layers)) if index not in whole]
    stays = frozenset(others[place] for place in place_residents(len(others), lean))
    cheapest = sorted(others, key=lambda index: (_seconds_per_byte(run, index), (index in stays) == swapped_first))
    return Split(whole, frozenset(cheapest[: max(0, len(others) - keeping)]), stays)


def _seconds_per_byte(run: RunCosts, index: int) -> float:
    """Of an attention output; without one there is nothing to gain."""
    layer = run.layers[index]
    return layer.attention_s / layer.attention_bytes if layer.attention_bytes else math.inf


def _most(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `high` that fits, where all below one that fits do; -1: none."""
    low = -1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
