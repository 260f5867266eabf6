"""`gpu.sh first`, points 1, 5, 7 and 8: which attention kernel PyTorch picks, that it runs once, and whose gradients come out."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ds_memo
from benchmarks import check
from benchmarks.assertions import DRIVER, VALUES, Machine, Measured, Skip, asserts
from benchmarks.timing import clear
from benchmarks.workloads import AttentionOps, born_as, dtype_of, loss_of, small_models
from tests import models

MODEL = "llama"
IN_TILES = {"model.norm.weight"}
"""Gradients of the norm beside the layers, whose tiles add up in another order."""
LAYERS = 2
DROPOUT_SIZE = (8, 64)
"""Sequences and tokens of the model with dropout."""
DROPOUT_SETTINGS = [(0.0, 0), (0.5, 2)]
"""Alpha and resident layers."""


def _models(machine: Machine) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield a GPT-NeoX and a Llama with grouped queries, with Transformers' own attention, and token ids."""
    wide = {"hidden": 4096, "heads": 32, "kv_heads": 8, "llama_ffn": 14336}
    tiny = {"hidden": 64, "heads": 4, "kv_heads": 2, "llama_ffn": 128}
    tokens = 16384 if machine.cuda else 128
    ids = torch.randint(0, 128, (1, tokens), device=machine.device)
    with machine.device, born_as(dtype_of(machine.device)):
        made = small_models(128, LAYERS, **(wide if machine.cuda else tiny))
    while made:
        name, model = made.popitem()
        yield name, model.train(), ids
    clear(machine.device)


def _step(model: nn.Module, ids: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    loss_of(model, ids).backward()


@functools.cache
def _seen(machine: Machine) -> dict[str, dict[str, Any]]:
    """Return, per model, the attention ops of a step of stock, and how often ds_memo ran attention again at alpha 0."""
    found = {}
    for name, model, ids in _models(machine):
        with AttentionOps() as seen:
            _step(model, ids)
        handle = ds_memo.attach(model, {"alpha": 0.0, "resident_layers": 0, "plan": {"enabled": False}})
        _step(model, ids)
        _step(model, ids)
        again = handle.report()["attention_recomputed"]
        handle.detach()
        found[name] = {"ops": dict(collections.Counter(map(_short, seen.names))), "again": again}
    return found


def _short(name: str) -> str:
    """Return the word for an attention op of PyTorch; another op's name as it is."""
    return next((word for word in ("cudnn", "flash", "efficient") if word in name), name)


@asserts(
    1,
    "attention at 16K, GPT-NeoX and Llama with grouped queries",
    f"cudnn or flash, {LAYERS} calls",
    "pass attn_implementation='sdpa' and no mask; TORCH_LOGS=+attention or sdpa_kernel() says why a kernel is refused",
)
def kernels(machine: Machine) -> Measured:
    ops = {name: row["ops"] for name, row in _seen(machine).items()}
    words = [f"{name} {' '.join(f'{op} x{n}' for op, n in found.items()) or 'none'}" for name, found in ops.items()]
    held = all(found.keys() <= {"cudnn", "flash"} and sum(found.values()) == LAYERS for found in ops.values())
    return Measured(", ".join(words), held, {"ops": ops})


@asserts(
    1,
    "attention run again at alpha 0",
    "0",
    "add the op of the line above to ATTENTION in ds_memo/remat/op_policy.py, or wrap the kernel in ds_memo.keep_whole",
)
def runs_once(machine: Machine) -> Measured:
    again = {name: row["again"] for name, row in _seen(machine).items()}
    return Measured(", ".join(f"{name} {n}" for name, n in again.items()), not any(again.values()), {"again": again})


def dropout(machine: Machine, backend: SDPBackend) -> Measured:
    """Compare loss and generator to the bit, and gradients within their own noise, of a GPT-2 with dropout 0.1 everywhere."""
    dtype = dtype_of(machine.device)
    model = check.MODELS["dropout"](dtype).to(machine.device)
    with sdpa_kernel([backend]):
        try:
            row = check.gradients_of("dropout", model, dtype, DROPOUT_SETTINGS, DROPOUT_SIZE)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise Skip(f"PyTorch has no {backend.name} kernel for dropout at this shape: {error}") from error
    words = "; ".join(row["failures"]) or f"generator equal, gradients off by {row['worst']:.1e}, noise {row['bar']:.1e}"
    return Measured(f"{', '.join(row['kernels'])}: {words}", not row["failures"], row)


for _name, _backend, _needs in (
    ("cuDNN's attention", SDPBackend.CUDNN_ATTENTION, (VALUES, DRIVER)),
    ("flash attention", SDPBackend.FLASH_ATTENTION, (VALUES,)),
):
    asserts(
        8,
        f"{_name} with dropout 0.1",
        "loss and generator equal, gradients within the noise",
        "train with sdpa_kernel() on another backend, and read ds_memo/remat/random_states.py: the state that a forward begins "
        "with is restored for its replay",
        *_needs,
        only_cuda=True,
    )(functools.partial(dropout, backend=_backend))


@asserts(
    5,
    "stock's gradients at the shape of the stream order",
    "equal to the bit",
    "read `check`'s stream_order_without_cudnn only: PyTorch declares cuDNN's backward nondeterministic",
    VALUES,
)
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


for _name, _alpha, _residents in (("gradients, all layers resident", 0.0, models.LAYERS), ("gradients at alpha 1", 1.0, 0)):
    asserts(
        7,
        _name,
        "stock's bits, where those repeat",
        "run `gpu.sh check --parts gradients,stream_order`. A difference without delays comes from a kernel of another shape, "
        "one with them from a missing wait",
        VALUES,
    )(functools.partial(same_bits, alpha=_alpha, residents=_residents))


@asserts(
    7,
    "gradients at alpha 0.5",
    "within the noise of GEMMs in other orders",
    "read compute_rows in ds_memo/remat/op_policy.py: fewer rows take another kernel. `gpu.sh check --parts gradients` has all "
    "models",
    VALUES,
)
def within_noise(machine: Machine) -> Measured:
    dtype = dtype_of(machine.device)
    row = check.gradients_of(MODEL, check.MODELS[MODEL](dtype).to(machine.device), dtype, [(0.5, 0)])
    return Measured("; ".join(row["failures"]) or f"off by {row['worst']:.1e}, noise {row['bar']:.1e}", not row["failures"], row)
