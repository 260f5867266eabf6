"""Bytes that a layer moves through device memory, without GEMMs and attention: per token, by its ops.

An op reads and writes each tensor once. Its backward reads a gradient and saved tensors, and writes gradients. Several gradients
of one tensor are added up. An op of several kernels states its own bytes (Op.moved, Op.moved_back).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ds_memo.estimate.model import Model
from ds_memo.estimate.requests import head_tape, layer_tape, mlp_tape
from ds_memo.estimate.tape import INPUT, Op, Tape


class Traffic(NamedTuple):
    """Bytes per token."""

    forward: float
    backward: float
    replay: float
    """Part of the forward up to the last op that saves something."""


@lru_cache(maxsize=256)
def traffic(model: Model) -> Traffic:
    """Return the traffic of one layer."""
    return _traffic(layer_tape(model), model)


@lru_cache(maxsize=256)
def head_traffic(model: Model) -> Traffic:
    """Return the traffic of the ops before attention alone."""
    return _traffic(head_tape(model), model)


@lru_cache(maxsize=256)
def mlp_traffic(model: Model) -> Traffic:
    """Return the traffic of a layer's MLP or experts alone."""
    return _traffic(mlp_tape(model), model)


def _traffic(tape: Tape, model: Model) -> Traffic:
    ops = tape.ops
    sizes = {op.name: op.nbytes for op in ops} | {INPUT: ops[-1].nbytes}
    last = max(i for i, op in enumerate(ops) if op.inner or op.saves)
    there = [_forward(op, sizes) for op in ops]
    biases = 0.0 if model.rms else sum(op.nbytes for op in ops if op.kind == "gemm")  # their gradients are sums
    back = sum(_backward(op, sizes) for op in ops) + _sums(ops, sizes) + biases
    return Traffic(sum(there), back, sum(there[: last + 1]))


def norm_bytes(model: Model) -> float:
    """Return the bytes per token of one norm's forward and backward."""
    ops = [op for op in layer_tape(model).ops if op.name in ("norm1", "o_norm")]
    sizes = {name: ops[0].nbytes for name in ops[0].reads}
    return _forward(ops[0], sizes) + _backward(ops[0], sizes)


def _read(op: Op, sizes: dict[str, float]) -> dict[str, float]:
    return {name: dict(op.views).get(name, sizes[name]) for name in op.reads}


def _forward(op: Op, sizes: dict[str, float]) -> float:
    if op.moved is not None:
        return op.moved
    return 0.0 if op.kind in ("gemm", "attention") else op.nbytes + sum(_read(op, sizes).values())


def _backward(op: Op, sizes: dict[str, float]) -> float:
    if op.moved_back is not None:
        return op.moved_back
    if op.kind in ("gemm", "attention") or op.adds or op.no_gradient:
        return 0.0
    return op.nbytes + sum(sizes[name] for name in op.saves) + sum(_read(op, sizes).values())


def _sums(ops: tuple[Op, ...], sizes: dict[str, float]) -> float:
    """Return the bytes to add up gradients of one tensor in pairs, and to concatenate those of its parts."""
    readers = Counter(name for op in ops if not op.no_gradient for name in op.reads if name not in dict(op.views))
    parts = sum(nbytes for op in ops if not op.no_gradient for _, nbytes in op.views)
    return 2 * parts + sum(3 * (count - 1) * sizes[name] for name, count in readers.items())
