"""Bytes of a setting: what a pass takes of the device and of the host, as ds_memo.swap.engine lets frames come and go.

resident   the frame stays on the device, whole
lean       it stays on the device too, without GEMM outputs
swapped    all others: whole tensors and a share alpha of the GEMM outputs' rows go to the host
dropped    lean or swapped, and without the attention output
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ds_memo.solve.costs import LayerCosts, RunCosts, Working, host_bytes

ALPHA_STEPS = 10_000
"""Alpha is rounded down to a multiple of 1 / ALPHA_STEPS: it is read by people, and rounding down keeps every budget."""


def device_bytes(
    run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int] = (), lean: Collection[int] = ()
) -> int:
    """The most alive at once in a pass.

    forward    a layer runs beside the frames below it that stay, and one swapped frame on its way out
    between    all frames that stay and two swapped ones are there, beside head and loss
    backward   a layer runs beside its own frame, the frames below it that stay and the reload of the next swapped one (but one
               whose attention is computed again comes back when it is wanted), and beside gradients on their way
    """
    frames, stays = _frames(run, residents, alpha, dropped, lean), {*residents, *lean}
    held = leaving = before = peak = 0
    for index, (frame, working) in enumerate(frames):
        peak = max(peak, held + leaving + working.forward)
        if index in stays:
            held += frame
        else:
            before, leaving = leaving, frame
    peak = max(peak, held + before + leaving + run.head_bytes)
    below = len(frames) - 1
    for index in range(len(frames) - 1, -1, -1):
        frame, working = frames[index]
        if index in stays:
            held -= frame
        below = min(below, index - 1)
        while below >= 0 and below in stays:
            below -= 1
        reload = frames[below][0] if below >= 0 and below not in dropped else 0
        peak = max(peak, held + frame + reload + working.backward + run.backward_bytes)
    return run.working_bytes + peak


def bytes_at_head(
    run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int] = (), lean: Collection[int] = ()
) -> int:
    """What layers keep on the device between the forward and the backward: the frames that stay and two swapped ones."""
    frames = [frame for frame, _ in _frames(run, residents, alpha, dropped, lean)]
    swapped = [frame for index, frame in enumerate(frames) if index not in residents and index not in lean]
    return sum(frames) - sum(swapped[:-2])


def swapped_bytes(
    run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int] = (), lean: Collection[int] = ()
) -> int:
    """Bytes of all host blocks."""
    swapped = [i for i in range(len(run.layers)) if i not in residents and i not in lean]
    without = sum(run.layers[i].host_bytes(alpha, keeps_attention=False) for i in swapped if i in dropped)
    return without + host_bytes((run.layers[i] for i in swapped if i not in dropped), alpha)


def host_cap(layers: Sequence[LayerCosts], budget: int) -> float:
    """The largest alpha, in steps of 1 / 10 000, at which the blocks of these swapped layers fit; below 0: none does."""
    low, high = -1, ALPHA_STEPS  # low fits, or is below 0
    while low < high:
        middle = (low + high + 1) // 2
        if host_bytes(layers, middle / ALPHA_STEPS) <= budget:
            low = middle
        else:
            high = middle - 1
    return low / ALPHA_STEPS


def _frames(
    run: RunCosts, residents: Collection[int], alpha: float, dropped: Collection[int], lean: Collection[int]
) -> list[tuple[int, Working]]:
    """Of each layer, as _on_device tells."""
    return [
        _on_device(layer, 1.0, False)
        if index in residents
        else _on_device(layer, 0.0 if index in lean else alpha, index in dropped)
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
