"""The optimizer steps of one model: warnings after the first, the time of each, and what is learned from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ds_memo.autotune.pass_solution import PassSolution
from ds_memo.placement import PlacementKind
from ds_memo.remat.layer import Layer
from ds_memo.runtime.session import Session

_OFF = 0.25
"""Share by which a layer's kept bytes may differ from the profile's without a warning."""


def step_begins(session: Session) -> None:
    for head in session.heads:
        head.keep_values()
    session.addresses.step_begins()


def step_ended(session: Session, applied: bool = True) -> None:
    """Follow the end of an optimizer step.

    Args:
        applied: False if gradients overflowed; optimizer states may not exist yet.
    """
    tuner, drives, in_flight = session.tuner, session.drives, session.policy.in_flight
    session.addresses.step_ends()
    if not session.speed.steps:
        for message in _after_first_step(session):
            session.warn(message)
    now = time.perf_counter()
    unsettled = session.remat.work.analysed + session.addresses.unsettled + (tuner.unsettled if tuner else 0)
    session.speed.stepped(now, session.tokens, unsettled)
    if session.tell_what_moved is not None and session.tell_what_moved(session):
        session.tell_what_moved = None
    if drives and (message := drives.stepped(now)) is not None:
        session.warn(message)
    in_flight.stepped()
    if tuner and applied:
        tuner.stepped(session.model(), session.passes, in_flight.most.calls, now)


def _after_first_step(session: Session) -> Iterator[str]:
    """Yield the warnings after the first step: memo has no effect, or layers are not as profiled."""
    policy, traffic, layers = session.policy, session.engine.traffic, len(session.layers)
    if policy.pass_solution is not None:
        if policy.in_flight.most.calls == 1:  # else the next pass is solved for more than this one
            yield from _not_as_profiled(session.layers, policy.pass_solution)
        return
    if session.tuner and traffic.frames and not session.passes:
        model = type(session.model()).__name__
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
    elif not traffic.bytes_to_host and session.config.ablation != "full_recompute":
        residents = len(policy.calls(PlacementKind.ON_DEVICE))
        yield (
            f"memo has no effect: the first step moved no bytes, for {residents} of {layers} layers are resident and keep "
            "everything on the device. Set a smaller memo.resident_layers or train without memo"
        )


def _not_as_profiled(layers: Sequence[Layer], solution: PassSolution) -> Iterator[str]:
    """Yield a warning if layers keep much more or less than they did in the profile."""
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
