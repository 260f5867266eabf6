"""Device and host bytes of a pass, as ds_memo.swap.engine moves the frames.

Every function takes the kinds of the layers' placements, and the one alpha of the swapped layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from ds_memo.placement import Placement, PlacementKind
from ds_memo.solve.alpha import ALPHA_STEPS
from ds_memo.solve.placement_kinds import FIRST_ON_DEVICE, Kinds, swapped
from ds_memo.solve.run_costs import LayerCosts, RunCosts, TileCosts

PARTS = ("frames", "reload_buffers", "layer", "head", "non_layer")
"""Parts of the device bytes: frames that stay on the device; frames on their way out or back; the running layer without its
frame; non-layer memory between forward and backward, and at other times."""


def device_bytes(run: RunCosts, kinds: Kinds, alpha: float) -> int:
    """Return the most bytes alive at once in a pass."""
    return max(map(sum, _moments(run, kinds, alpha)))


def device_bytes_by_part(run: RunCosts, kinds: Kinds, alpha: float) -> dict[str, int]:
    """Return the bytes at the moment of a pass when most are alive, by PARTS."""
    return dict(zip(PARTS, max(_moments(run, kinds, alpha), key=sum), strict=True))


def bytes_of_layers(run: RunCosts, kinds: Kinds, alpha: float) -> tuple[list[int], int, list[int]]:
    """Return the bytes of the layers alone: in each layer's forward, between forward and backward, in each layer's backward."""
    layers = [sum(moment[: PARTS.index("head")]) for moment in _moments(run, kinds, alpha)]
    return layers[: len(kinds)], layers[len(kinds)], layers[len(kinds) + 1 :]


def _moments(run: RunCosts, kinds: Kinds, alpha: float) -> list[tuple[int, ...]]:
    """Return the bytes by PARTS at each moment: each layer's forward, between forward and backward, each layer's backward.

    forward    a layer runs next to the frames below it on the device, and one swapped frame on its way out
    between    the last layer's frame joins them, with head and loss
    backward   a layer runs next to its own frame, the frames below it on the device, the reload of the next swapped one and
               unreduced gradients. A frame whose attention is recomputed is reloaded only when its own replay begins.

    Of a swapped frame in tiles two tiles are on the device at once, and they come back during the layer's own backward. In that
    of attention it is one tile's hidden states.
    """
    alpha = math.ceil(2 * alpha) / 2  # it matters whether any rows are stored, and whether stored tiles are neighbours
    forward: list[tuple[int, ...]] = []
    backward: list[tuple[int, ...]] = []
    frames = leaving = reload = last = 0
    always, unreduced = run.working_bytes, run.backward_bytes or (0,) * len(kinds)
    for layer, kind, gradients in zip(run.layers, kinds, unreduced, strict=True):
        on_device = kind >= FIRST_ON_DEVICE  # faster than the property
        frame, in_forward, own, in_backward = _placed(layer, kind, alpha)
        forward.append((frames, leaving, in_forward, 0, always + run.forward_bytes))
        last = leaving
        if on_device:
            backward.append((frames + own, reload, in_backward, 0, always + gradients))
            frames += frame
        else:
            backward.append((frames, reload + own, in_backward, 0, always + gradients))
            leaving, last = frame, last + frame
            reload = 0 if kind.recomputes_attention or layer.in_tiles is not None else frame
    return [*forward, (frames, last, 0, run.head_bytes, always), *backward]


def swapped_bytes(run: RunCosts, kinds: Kinds, alpha: float) -> int:
    """Return the bytes of all host blocks."""
    calls = Counter((run.layers[call], kinds[call]) for call in swapped(kinds))
    return sum(count * layer.host_bytes(Placement(kind, alpha)) for (layer, kind), count in calls.items())


def host_cap(run: RunCosts, kinds: Kinds) -> float:
    """Return the largest multiple of 1 / ALPHA_STEPS at which the swapped layers fit the host with all attention outputs; below
    0: none does."""
    again = PlacementKind.SWAPPED_ATTENTION_RECOMPUTED
    with_attention = [PlacementKind.SWAPPED if kind is again else kind for kind in kinds]
    budget = run.host_budget

    def fits(steps: int) -> bool:
        return swapped_bytes(run, with_attention, steps / ALPHA_STEPS) <= budget

    return 1.0 if fits(ALPHA_STEPS) else most_that_fit(ALPHA_STEPS, fits) / ALPHA_STEPS


def most_that_fit(high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to `high` that fits, or -1. By bisection: if a number fits, all smaller ones must."""
    low = -1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache(maxsize=1 << 12)
def _placed(layer: LayerCosts, kind: PlacementKind, alpha: float) -> tuple[int, int, int, int]:
    """Return the device bytes of a layer's frame, the further bytes of its forward, what is there of its frame at the peak of its
    backward, and the further bytes then."""
    placement, again = Placement(kind, alpha), kind.recomputes_attention
    if kind is PlacementKind.NO_RECOMPUTE:
        # Autograd's saved tensors are alive from the forward on; a resident layer makes them in its replay.
        kept, working = layer.no_recompute_bytes, layer.in_tiles.working_whole if layer.in_tiles else layer.working
        return kept, max(working.forward, kept), kept, max(0, layer.frame_bytes + working.backward - kept)
    if placement.decided_alpha > 0:
        without = layer.small_frame_bytes - layer.smallest_frame_bytes if again else 0
        frame, working = layer.frame_bytes - without, layer.working
    elif again:
        frame, working = layer.smallest_frame_bytes, layer.working_without_attention
    else:
        frame, working = layer.small_frame_bytes, layer.working_at_0
    if layer.in_tiles is None or kind.on_device:
        return frame, working.forward, frame, working.backward
    return _in_tiles(layer, layer.in_tiles, placement)


def _in_tiles(layer: LayerCosts, tiles: TileCosts, placement: Placement) -> tuple[int, int, int, int]:
    again, alpha = placement.kind.recomputes_attention, placement.decided_alpha
    small = layer.smallest_frame_bytes if again or tiles.result_differs else layer.small_frame_bytes
    large = small + layer.frame_bytes - layer.small_frame_bytes
    at_0 = layer.working_without_attention if again else layer.working_at_0
    stored = layer.working.plus(0, layer.attention_bytes) if again else layer.working
    # The tile that runs and the next one. Stored tiles are neighbours only if they are more than the others.
    neighbours = [(2 * small, at_0)] if alpha == 0 else [(small + large, at_0)] if alpha < 1 else []
    if alpha > 0.5:
        neighbours.append((2 * large, stored))
    moments = [(min(large, -(-two // tiles.count)), working.tiles_backward) for two, working in neighbours]
    buffers = max(moments)[0]
    # Next to attention's backward waits the last tile. It is stored only if all are; of another its hidden states are reloaded.
    last, working = (large, stored) if alpha == 1 else (layer.nbytes("input"), at_0)
    own, backward = max(*moments, (-(-last // tiles.count), working.backward), key=sum)
    if again:
        return buffers, at_0.forward, own, backward
    if tiles.result_differs:  # the kernel's output is a frame of its own, which the result is made of
        return buffers + layer.attention_bytes, at_0.forward, own + layer.attention_bytes, backward
    return buffers, at_0.forward, own, backward + layer.attention_bytes  # the result is put together from tiles
