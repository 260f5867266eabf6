"""What a pass takes of the device and of the host with given places and alpha, as ds_memo.swap.engine moves the frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from ds_memo.placement import DROPPED, HOMES, STAYS, Home, Places
from ds_memo.solve.costs import LayerCosts, RunCosts, host_bytes

ALPHA_STEPS = 10_000
"""Alpha is rounded down to a multiple of 1 / ALPHA_STEPS: it is read by people, and rounding down keeps every budget."""


def device_bytes(run: RunCosts, places: Places, alpha: float) -> int:
    """The most alive at once in a pass.

    forward    a layer runs beside the frames below it that stay, and one swapped frame on its way out
    between    the last layer's frame joins them, beside head and loss
    backward   a layer runs beside its own frame, the frames below it that stay and the reload of the next swapped one (but one
               whose attention is computed again comes back when it is wanted), and beside gradients on their way
    """
    forward, between, backward = bytes_of_layers(run, places, alpha)
    return run.working_bytes + max(
        int(forward.max()) + run.forward_bytes, between + run.head_bytes, int((backward + run.on_their_way).max())
    )


def bytes_of_layers(run: RunCosts, places: Places, alpha: float) -> tuple[np.ndarray, int, np.ndarray]:
    """Bytes alive in each layer's forward, between forward and backward, and in each layer's backward; of layers alone."""
    codes = places.codes(len(run.layers))
    frame, forward, backward = _on_device(run, codes, alpha)
    below, next_swapped = _below(frame, codes)
    leaving = np.where(next_swapped >= 0, frame[next_swapped], 0)
    reload = np.where(DROPPED[codes[next_swapped]], 0, leaving)
    return below + leaving + forward, int(below[-1] + leaving[-1] + frame[-1]), below + frame + reload + backward


def _below(frame: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each layer: the bytes of the frames below it that stay, and the index of the next swapped layer below it or -1."""
    stays = STAYS[codes]
    held = np.cumsum(np.where(stays, frame, 0))
    swapped = np.maximum.accumulate(np.where(stays, -1, np.arange(len(codes))))
    return np.concatenate(([0], held[:-1])), np.concatenate(([-1], swapped[:-1]))


def swapped_bytes(run: RunCosts, places: Places, alpha: float) -> int:
    """Bytes of all host blocks."""
    swapped = places.swapped(len(run.layers))
    without = sum(run.layers[i].host_bytes(alpha, keeps_attention=False) for i in swapped if i in places.dropped)
    return without + host_bytes((run.layers[i] for i in swapped if i not in places.dropped), alpha)


def host_cap(layers: Sequence[LayerCosts], budget: int) -> float:
    """The largest multiple of 1 / ALPHA_STEPS at which the blocks of these swapped layers fit the host; below 0: none does."""
    kinds = Counter(layers).items()

    def fits(steps: int) -> bool:
        return sum(count * layer.host_bytes(steps / ALPHA_STEPS) for layer, count in kinds) <= budget

    return most_that_fit(ALPHA_STEPS, fits) / ALPHA_STEPS


def most_that_fit(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `high` that fits, or -1. By bisection: if a number fits, all smaller ones must."""
    low = -1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _on_device(run: RunCosts, codes: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each layer: the bytes of its frame on the device, and what its forward and its backward need besides."""
    layers, kinds = run.kinds
    return tuple(_by_home(tuple(layers), alpha > 0)[:, kinds, codes])


@lru_cache(maxsize=1 << 6)
def _by_home(layers: tuple[LayerCosts, ...], splits: bool) -> np.ndarray:
    """The same three numbers for each of these layers and each home. Alpha matters only in whether it is above 0 (`splits`)."""
    return np.array([[_with_home(layer, home, float(splits)) for home in HOMES] for layer in layers], np.int64).transpose(2, 0, 1)


def _with_home(layer: LayerCosts, home: Home, alpha: float) -> tuple[int, int, int]:
    if home.plain:  # what autograd saves is there from the forward on; a resident layer's replay would make it
        kept, working = layer.plain_bytes, layer.working
        return kept, max(working.forward, kept), max(0, layer.frame_bytes + working.backward - kept)
    if home.alpha(alpha) > 0:
        without = layer.small_frame_bytes - layer.smallest_frame_bytes if home.dropped else 0
        return layer.frame_bytes - without, layer.working.forward, layer.working.backward
    working = layer.working_without_attention if home.dropped else layer.working_at_0
    return layer.smallest_frame_bytes if home.dropped else layer.small_frame_bytes, working.forward, working.backward
