"""The last resort: the host is too small for the inputs and attention outputs of all layers that are not resident.

Whatever is stored saves time, wherever it lies, so what saves most per byte is stored first. Beyond some thousand tokens that is
attention, and then no layer is resident while attention must be computed again. Layers that are not resident keep their input,
and their attention output if there is room: as many of them *lean*, on the device, as it holds, the others on the host. So the
longest length is that of both memories together; where the host has nothing to give, this is torch.utils.checkpoint.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ds_memo.solve.costs import LayerCosts, RunCosts
from ds_memo.solve.memory import device_bytes, most_that_fit, swapped_bytes
from ds_memo.solve.places import Places, spread


def last_resort(run: RunCosts, resident_layers: int | None) -> Places | None:
    """The places with which least is computed again; None: nothing fits.

    Args:
        resident_layers: obeyed if given.
    """
    n = len(run.layers)
    residents = resident_layers
    if residents is None:
        keeping = n if _attention_saves_more(run) else 0
        residents = max(0, most_that_fit(n, lambda count: _packed(run, count, keeping) is not None))
    keeping = most_that_fit(n - residents, lambda count: _packed(run, residents, count) is not None)
    return _packed(run, residents, keeping) if keeping >= 0 else None


def inputs_alone(run: RunCosts, residents: int) -> Places | None:
    """Of the places that have all attention computed again, those with most lean layers that fit the device."""
    return _with_most_lean(run, residents, 0)


def fewest_lean(run: RunCosts, residents: int) -> Places:
    """Of the places that have all attention computed again, those with as many lean layers as the host is too small for."""
    others = len(run.layers) - residents
    swapped = most_that_fit(
        others, lambda count: swapped_bytes(run, _split(run, residents, 0, others - count), 0.0) <= run.host_budget
    )
    return _split(run, residents, 0, others - max(0, swapped))


def _attention_saves_more(run: RunCosts) -> bool:
    """Per stored byte, than GEMM outputs."""
    attention, gemms = sum(layer.attention_bytes for layer in run.layers), sum(layer.split_bytes for layer in run.layers)
    saved_by_attention, saved_by_gemms = sum(layer.attention_s for layer in run.layers), sum(layer.gemm_s for layer in run.layers)
    return saved_by_attention * gemms > saved_by_gemms * attention


def _packed(run: RunCosts, residents: int, keeping: int) -> Places | None:
    """With so many resident layers, and so many others that keep their attention output; None: it does not fit."""
    both = 0 < keeping < len(run.layers) - residents  # else it is all one who drops first
    for swapped_first in (False, True) if both else (False,):
        places = _with_most_lean(run, residents, keeping, swapped_first)
        if places is not None and swapped_bytes(run, places, 0.0) <= run.host_budget:
            return places
    return None


def _with_most_lean(run: RunCosts, residents: int, keeping: int, swapped_first: bool = False) -> Places | None:
    def fits(lean: int) -> bool:
        return device_bytes(run, _split(run, residents, keeping, lean, swapped_first), 0.0) <= run.device_budget

    lean = most_that_fit(len(run.layers) - residents, fits)
    return _split(run, residents, keeping, lean, swapped_first) if lean >= 0 else None


def _split(run: RunCosts, residents: int, keeping: int, lean: int, swapped_first: bool = False) -> Places:
    """Attention that is cheapest by the byte is dropped first.

    Args:
        swapped_first: of like layers, those that are swapped drop theirs first: reload buffers get smaller, but compute waits for
            them. Otherwise the lean ones do.
    """
    n = len(run.layers)
    whole, others = spread(n, residents), _others(n, residents)
    stays = others[list(spread(len(others), lean))]
    cheapest, drop = others, max(0, len(others) - keeping)
    if 0 < drop < len(others):  # else it is all one which is cheaper
        is_lean = np.zeros(n, bool)
        is_lean[stays] = True
        layers, kinds = run.kinds
        worth = np.array([_seconds_per_byte(layer) for layer in layers])[kinds[others]]
        cheapest = others[np.lexsort((is_lean[others] == swapped_first, worth))]
    return Places(whole, frozenset(stays.tolist()), frozenset(cheapest[:drop].tolist()))


@lru_cache(maxsize=1 << 10)
def _others(layers: int, residents: int) -> np.ndarray:
    """Of so many layers, those that are not resident."""
    whole = spread(layers, residents)
    return np.array([index for index in range(layers) if index not in whole], np.intp)


def _seconds_per_byte(layer: LayerCosts) -> float:
    """Of an attention output; without one there is nothing to gain."""
    return layer.attention_s / layer.attention_bytes if layer.attention_bytes else math.inf
