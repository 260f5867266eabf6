"""The last resort: the host is too small for the inputs and attention outputs of all layers that are not resident.

Every stored byte saves time, on the host as on the device, so both memories are filled with what saves most per byte. Beyond some
thousand tokens that is attention outputs: no layer is resident then while another has to compute attention again. Layers that are
not resident keep their input, and their attention output if there is room. As many of them as the device holds are *lean*: they
keep these there; the others are swapped. So the longest possible sequence is that of both memories together, and with no host
memory at all this is torch.utils.checkpoint.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ds_memo.placement import Places, spread
from ds_memo.solve.costs import LayerCosts, RunCosts
from ds_memo.solve.memory import device_bytes, most_that_fit, swapped_bytes


def last_resort(run: RunCosts, resident_layers: int | None) -> Places | None:
    """The places with which the least is computed again; None: nothing fits.

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
    """With all attention computed again: the places with the most lean layers that the device holds; None: not even 0."""
    return _with_most_lean(run, residents, 0)


def fewest_lean(run: RunCosts, residents: int) -> Places:
    """With all attention computed again: the places with no more lean layers than the host has no room for."""
    others = len(run.layers) - residents
    swapped = most_that_fit(
        others, lambda count: swapped_bytes(run, _split(run, residents, 0, others - count), 0.0) <= run.host_budget
    )
    return _split(run, residents, 0, others - max(0, swapped))


def _attention_saves_more(run: RunCosts) -> bool:
    """Whether storing attention outputs saves more time per byte than storing GEMM outputs."""
    attention, gemms = sum(layer.attention_bytes for layer in run.layers), sum(layer.split_bytes for layer in run.layers)
    saved_by_attention, saved_by_gemms = sum(layer.attention_s for layer in run.layers), sum(layer.gemm_s for layer in run.layers)
    return saved_by_attention * gemms > saved_by_gemms * attention


def _packed(run: RunCosts, residents: int, keeping: int) -> Places | None:
    """Places with so many resident layers, and so many others that keep their attention output; None: they do not fit.

    Lean layers drop their attention outputs first; if that does not fit, swapped ones, which makes reload buffers smaller.
    """
    both = 0 < keeping < len(run.layers) - residents  # else all or none drop it
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
    """Places with so many layers of each sort. Attention outputs that save the least time per byte are dropped first.

    Args:
        keeping: how many layers that are not resident keep their attention output.
        swapped_first: among like layers, swapped ones drop theirs first: reload buffers get smaller, but compute waits for them.
            Otherwise lean ones do.
    """
    n = len(run.layers)
    whole, others = spread(n, residents), _others(n, residents)
    stays = others[list(spread(len(others), lean))]
    cheapest, drop = others, max(0, len(others) - keeping)
    if 0 < drop < len(others):  # else their order does not matter
        is_lean = np.zeros(n, bool)
        is_lean[stays] = True
        layers, kinds = run.kinds
        worth = np.array([_seconds_per_byte(layer) for layer in layers])[kinds[others]]
        cheapest = others[np.lexsort((is_lean[others] == swapped_first, worth))]
    return Places(whole, frozenset(stays.tolist()), frozenset(cheapest[:drop].tolist()))


@lru_cache(maxsize=1 << 10)
def _others(layers: int, residents: int) -> np.ndarray:
    """Indices of the layers that are not resident."""
    whole = spread(layers, residents)
    return np.array([index for index in range(layers) if index not in whole], np.intp)


def _seconds_per_byte(layer: LayerCosts) -> float:
    """Time saved by storing the attention output. A layer without one gains nothing by dropping it, so it comes last."""
    return layer.attention_s / layer.attention_bytes if layer.attention_bytes else math.inf
