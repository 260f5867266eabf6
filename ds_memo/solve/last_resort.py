"""The last resort: the host is too small for the inputs and attention outputs of all layers that are not resident.

Every stored byte saves time, on the host as on the device, so both memories take the tensors that save most per byte. Beyond some
thousand tokens these are attention outputs: no layer is resident while another has to recompute attention. Layers that are not
resident keep their input, and their attention output if there is room. As many of them as the device holds keep these on the
device, without GEMM outputs; the others are swapped. So both memories add up to the longest possible sequence, and without host
memory this is torch.utils.checkpoint.
"""

from __future__ import annotations

import math
from itertools import product

from ds_memo.placement import PlacementKind
from ds_memo.solve.memory import device_bytes, most_that_fit, swapped_bytes
from ds_memo.solve.placement_kinds import FIRST_ON_DEVICE, Kinds, place, put, swapped
from ds_memo.solve.run_costs import LayerCosts, RunCosts

_AGAIN = {kind: PlacementKind(kind + 1) for kind in (PlacementKind.SWAPPED, PlacementKind.GEMMS_RECOMPUTED)}
"""The same kinds with attention recomputed."""


def last_resort(run: RunCosts, resident_layers: int | None) -> Kinds | None:
    """Return the kinds of placements that recompute least, or None if nothing fits.

    Args:
        resident_layers: fixed number of residents; None: solved.
    """
    n = len(run.layers)
    residents = resident_layers
    if residents is None:
        keeping = n if _attention_saves_more(run) else 0
        residents = max(0, most_that_fit(n, lambda count: _packed(run, count, keeping) is not None))
    keeping = most_that_fit(n - residents, lambda count: _packed(run, residents, count) is not None)
    return _packed(run, residents, keeping) if keeping >= 0 else None


def inputs_alone(run: RunCosts, residents: int) -> Kinds | None:
    """Return the kinds with all attention recomputed and as many inputs on the device as it holds; None: not even 0."""
    return _most_without_gemms(run, residents, 0)


def fewest_without_gemms(run: RunCosts, residents: int) -> Kinds:
    """Return the kinds with all attention recomputed and only those inputs on the device that the host has no room for."""
    others = len(run.layers) - residents
    swapped = most_that_fit(
        others, lambda count: swapped_bytes(run, _split(run, residents, 0, others - count), 0.0) <= run.host_budget
    )
    return _split(run, residents, 0, others - max(0, swapped))


def _attention_saves_more(run: RunCosts) -> bool:
    """Return True if attention outputs save more time per byte than GEMM outputs."""
    attention, gemms = sum(layer.attention_bytes for layer in run.layers), sum(layer.split_bytes for layer in run.layers)
    saved_by_attention, saved_by_gemms = sum(layer.attention_s for layer in run.layers), sum(layer.gemm_s for layer in run.layers)
    return saved_by_attention * gemms > saved_by_gemms * attention


def _packed(run: RunCosts, residents: int, keeping: int) -> Kinds | None:
    """Return kinds with this many resident layers and this many others that keep their attention output; None: they do not fit.

    Layers on the device recompute attention first. If that does not fit, swapped ones do: their reload buffers get smaller.
    """
    both = 0 < keeping < len(run.layers) - residents  # else all or none recompute it
    ways = product((False, True) if both else (False,), (False, True) if run.groups_inputs else (False,))
    for swapped_first, lowest in ways:
        kinds = _most_without_gemms(run, residents, keeping, swapped_first, lowest)
        if kinds is not None and swapped_bytes(run, kinds, 0.0) <= run.host_budget:
            return kinds
    return None


def _most_without_gemms(
    run: RunCosts, residents: int, keeping: int, swapped_first: bool = False, lowest: bool = False
) -> Kinds | None:
    how = swapped_first, lowest

    def fits(without_gemms: int) -> bool:
        return device_bytes(run, _split(run, residents, keeping, without_gemms, *how), 0.0) <= run.device_budget

    without_gemms = most_that_fit(len(run.layers) - residents, fits)
    return _split(run, residents, keeping, without_gemms, *how) if without_gemms >= 0 else None


def _split(
    run: RunCosts, residents: int, keeping: int, without_gemms: int, swapped_first: bool = False, lowest: bool = False
) -> Kinds:
    """Return kinds with these numbers of layers. The attention outputs that save the least time per byte are recomputed first.

    Args:
        keeping: number of non-resident layers that keep their attention output.
        without_gemms: number of layers on the device without GEMM outputs.
        swapped_first: among like layers, swapped ones recompute attention first: their reload buffers get smaller, but compute
            waits for them. Otherwise those on the device do.
        lowest: the first layers are on the device: with groups of layers the last ones then free host memory early. Otherwise the
            last one is: it takes no device memory while others' backwards run.
    """
    kinds = list(place(len(run.layers), residents))
    others = swapped(kinds)
    if lowest:
        for index in others[:without_gemms]:
            kinds[index] = PlacementKind.GEMMS_RECOMPUTED
    else:
        put(kinds, others, without_gemms, PlacementKind.GEMMS_RECOMPUTED)
    again = max(0, len(others) - keeping)
    if 0 < again < len(others):  # else their order does not matter
        worth = {layer: _seconds_per_byte(layer) for layer in set(run.layers)}
        others.sort(key=lambda index: (worth[run.layers[index]], (kinds[index] >= FIRST_ON_DEVICE) == swapped_first))
    for index in others[:again]:
        kinds[index] = _AGAIN[kinds[index]]
    return run.without_inputs(kinds)


def _seconds_per_byte(layer: LayerCosts) -> float:
    """Return the time that a stored byte of the attention output saves. A layer without one comes last."""
    return layer.attention_s / layer.attention_bytes if layer.attention_bytes else math.inf
