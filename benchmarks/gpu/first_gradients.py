"""`gpu.sh first`, points 5 and 7: stock's gradients repeat, and ds_memo's are the same bits."""

from __future__ import annotations

import functools

import ds_memo
from benchmarks import check
from benchmarks.assertions import VALUES, Assertion, Machine, Measured, Skip
from benchmarks.workloads import dtype_of
from tests import models

MODEL = "llama"
IN_TILES = {"model.norm.weight"}
"""Gradients of the norm beside the layers, whose tiles add up in another order."""


def repeats(machine: Machine) -> Measured:
    _, unlike = _stock(machine)
    return Measured(f"differ: {', '.join(unlike)}" if unlike else "equal to the bit", not unlike)


@functools.cache
def _stock(machine: Machine) -> tuple[models.Outcome, list[str]]:
    """Return a step of stock, and what another one has that differs."""
    model, batch = _model(machine)
    want, *others = (models.step(model, batch) for _ in range(4))
    return want, sorted({name for other in others for name in check.different(other, want)})


@functools.cache
def _model(machine: Machine) -> tuple[object, models.Batch]:
    dtype = dtype_of(machine.device)
    return models.build(MODEL, dtype).to(machine.device), check.short_sequences(machine.device, dtype)


def same_bits(machine: Machine, alpha: float, residents: int) -> Measured:
    want, unlike = _stock(machine)
    if unlike and not machine.emulated:
        raise Skip("stock does not repeat itself: point 5")
    model, batch = _model(machine)
    whole = {"kernels": {"cross_entropy": "whole"}}  # a loss in tiles adds up in another order
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents, **whole})
    try:
        names = sorted({name for _ in range(3) for name in check.different(models.step(model, batch), want)} - IN_TILES)
    finally:
        handle.detach()
    return Measured(f"differ: {', '.join(names)}" if names else "equal to the bit", not names)


def within_noise(machine: Machine) -> Measured:
    dtype = dtype_of(machine.device)
    row = check.gradients_of(MODEL, check.MODELS[MODEL](dtype).to(machine.device), dtype, [(0.5, 0)])
    return Measured("; ".join(row["failures"]) or f"off by {row['worst']:.1e}, noise {row['bar']:.1e}", not row["failures"], row)


_BITS_CURE = (
    "run `gpu.sh check --parts gradients,stream_order`. A difference without delays comes from a kernel of another shape, "
    "one with them from a missing wait"
)
POINT_5 = [
    Assertion(
        5,
        "stock's gradients at the shape of the stream order",
        "equal to the bit",
        "read `check`'s stream_order_without_cudnn only: PyTorch declares cuDNN's backward nondeterministic",
        repeats,
        frozenset({VALUES}),
    )
]
POINT_7 = [
    Assertion(
        7,
        "gradients, all layers resident",
        "stock's bits, where those repeat",
        _BITS_CURE,
        functools.partial(same_bits, alpha=0.0, residents=models.LAYERS),
        frozenset({VALUES}),
    ),
    Assertion(
        7,
        "gradients at alpha 1",
        "stock's bits, where those repeat",
        _BITS_CURE,
        functools.partial(same_bits, alpha=1.0, residents=0),
        frozenset({VALUES}),
    ),
    Assertion(
        7,
        "gradients at alpha 0.5",
        "within the noise of GEMMs in other orders",
        "read compute_rows in ds_memo/remat/op_policy.py: fewer rows take another kernel. `gpu.sh check --parts gradients` has "
        "all models",
        within_noise,
        frozenset({VALUES}),
    ),
]
