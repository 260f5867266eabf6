"""`gpu.sh first`, points 1 and 8: which attention kernel PyTorch picks, that it runs once, and its dropout."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ds_memo
from benchmarks import attention, check
from benchmarks.assertions import DRIVER, VALUES, Assertion, Machine, Measured, Skip
from benchmarks.timing import clear
from benchmarks.workloads import born_as, dtype_of, loss_of, small_models

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
        models = small_models(128, LAYERS, **(wide if machine.cuda else tiny))
    while models:
        name, model = models.popitem()
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
        with attention.Seen() as seen:
            _step(model, ids)
        handle = ds_memo.attach(model, {"alpha": 0.0, "resident_layers": 0, "plan": {"enabled": False}})
        _step(model, ids)
        _step(model, ids)
        again = handle.report()["attention_recomputed"]
        handle.detach()
        found[name] = {"ops": dict(collections.Counter(map(attention.short, seen.names))), "again": again}
    return found


def kernels(machine: Machine) -> Measured:
    ops = {name: row["ops"] for name, row in _seen(machine).items()}
    words = [f"{name} {' '.join(f'{op} x{n}' for op, n in found.items()) or 'none'}" for name, found in ops.items()]
    held = all(found.keys() <= {"cudnn", "flash"} and sum(found.values()) == LAYERS for found in ops.values())
    return Measured(", ".join(words), held, {"ops": ops})


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


_DROPOUT_CURE = (
    "train with sdpa_kernel() on another backend, and read ds_memo/remat/random_states.py: the state that a forward begins with "
    "is restored for its replay"
)
POINT_1 = [
    Assertion(
        1,
        "attention at 16K, GPT-NeoX and Llama with grouped queries",
        f"cudnn or flash, {LAYERS} calls",
        "pass attn_implementation='sdpa' and no mask; TORCH_LOGS=+attention or sdpa_kernel() says why a kernel is refused",
        kernels,
    ),
    Assertion(
        1,
        "attention run again at alpha 0",
        "0",
        "add the op of the line above to ATTENTION in ds_memo/remat/op_policy.py, or wrap the kernel in ds_memo.keep_whole",
        runs_once,
    ),
]
POINT_8 = [
    Assertion(
        8,
        "cuDNN's attention with dropout 0.1",
        "loss and generator equal, gradients within the noise",
        _DROPOUT_CURE,
        functools.partial(dropout, backend=SDPBackend.CUDNN_ATTENTION),
        frozenset({VALUES, DRIVER}),
        only_cuda=True,
    ),
    Assertion(
        8,
        "flash attention with dropout 0.1",
        "loss and generator equal, gradients within the noise",
        _DROPOUT_CURE,
        functools.partial(dropout, backend=SDPBackend.FLASH_ATTENTION),
        frozenset({VALUES}),
        only_cuda=True,
    ),
]
