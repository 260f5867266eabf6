"""Warnings after the first optimizer step: memo has no effect, or layers are not as profiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.placement import PlacementKind
from ds_memo.remat.layer import Layer
from ds_memo.runtime.parts import Parts

_OFF = 0.25
"""Share by which a layer's kept bytes may differ from the profile's before that is said."""


def after_first_step(parts: Parts, passes: int) -> Iterator[str]:
    """Yield the warnings.

    Args:
        passes: training forwards of the model itself.
    """
    policy, traffic, layers = parts.policy, parts.engine.traffic, len(parts.layers)
    if policy.pass_solution is not None:
        if policy.in_flight.most.calls == 1:  # else the next pass is solved for more than this one
            yield from _not_as_profiled(parts.layers, policy.pass_solution)
        return
    if parts.tuner and traffic.frames and not passes:
        model = type(parts.model()).__name__
        yield (
            f"layers ran in training, and a training forward of {model} itself never did (parts of it were called, or it is in "
            "eval mode): nothing was profiled or solved for. The last two layers are resident and alpha is what the host holds. "
            "Call the model, attach the part that is called, or set memo.alpha and memo.resident_layers"
        )
    if not traffic.frames:
        yield (
            f"memo has no effect: the first step is over and none of its {layers} layers came through ds_memo. "
            "Call the model, or attach the part of it that is called"
        )
    elif not traffic.bytes_to_host and parts.config.ablation != "full_recompute":
        residents = len(policy.calls(PlacementKind.ON_DEVICE))
        yield (
            f"memo has no effect: the first step moved no bytes, for {residents} of {layers} layers are resident and keep "
            "everything on the device. Set a smaller memo.resident_layers or train without memo"
        )


def _not_as_profiled(layers: Sequence[Layer], solution: PassSolution) -> Iterator[str]:
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
