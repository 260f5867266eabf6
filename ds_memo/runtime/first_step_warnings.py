"""Warnings after the first optimizer step: memo has no effect, or layers are not as profiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.remat.checkpoint import Layer
from ds_memo.swap.engine import Traffic

_OFF = 0.25
"""Share by which a layer's kept bytes may differ from the profile's before that is said."""


def not_solved(model: str, traffic: Traffic, passes: int) -> Iterator[str]:
    """Yield warnings for a run that left something open.

    Args:
        model: its class.
        passes: training forwards of the model itself.
    """
    if traffic.frames and not passes:
        yield (
            f"layers ran in training, and a training forward of {model} itself never did (parts of it were called, or it is in "
            "eval mode): nothing was profiled or solved for. The last two layers are resident and alpha is what the host holds. "
            "Call the model, attach the part that is called, or set memo.alpha and memo.resident_layers"
        )


def no_effect(traffic: Traffic, layers: int, residents: int | None) -> Iterator[str]:
    """Yield warnings for a run whose placements are as configured.

    Args:
        residents: None: nothing is meant to move.
    """
    if not traffic.frames:
        yield (
            f"memo has no effect: the first step is over and none of its {layers} layers came through ds_memo. "
            "Was the model called, or only parts of it?"
        )
    elif not traffic.bytes_to_host and residents is not None:
        yield (
            f"memo has no effect: the first step moved no bytes, for {residents} of {layers} layers are resident and keep "
            "everything on the device. Set a smaller memo.resident_layers or train without memo"
        )


def not_as_profiled(layers: Sequence[Layer], solution: PassSolution) -> Iterator[str]:
    """Yield warnings for layers that keep much more or less than they did in the profile."""
    known = [
        (layer.name, layer.latest.layout.stored_bytes, nbytes)
        for layer, nbytes in zip(layers, solution.stored_bytes[: solution.layers], strict=False)
        if layer.latest and nbytes
    ]
    off = [(name, here, there) for name, here, there in known if abs(here - there) > _OFF * there]
    if off:
        name, here, there = off[0]
        yield (
            f"{len(off)} of {len(layers)} layers do not keep what the profile says ({name} {here:,} bytes, not {there:,}): they "
            "are called otherwise than the first of their kind, so what was solved for may not fit. Set memo.alpha and "
            "memo.resident_layers for such a model"
        )
