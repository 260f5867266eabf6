"""The custom ops that graphs of compiled layers call: keep in the forward graph, supply and compute the rest in the backward.

    memo::keep     after all else of the forward: hand what the backward needs to the layer call that runs; return its handle
    memo::supply   a tensor that was kept whole
    memo::join_*   one for each GEMM: its stored rows, and the others computed into the same memory
    memo::hold     a copy of a small saved tensor; it makes the backward need the handle

A handle is a CPU tensor of one integer. Autograd saves it like any tensor, and the call's frame dies with its memory. Alpha is
read when the ops run, so no graph depends on it. What graphs carry from op to op is data alone: no pass needs a hint to leave an
op or an order alone.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from ds_memo.compiled_layers.recipe import Keeps
from ds_memo.errors import MemoError
from ds_memo.remat import op_policy

if TYPE_CHECKING:
    from ds_memo.compiled_layers.compiled_call import CompiledCall

# Not torch.library.custom_op: it refuses outputs that share a storage, as the slots of a frame do.
_LIBRARY = torch.library.Library("memo", "DEF")


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[CompiledCall] = []


_running = _Running()
_calls: dict[int, CompiledCall] = {}
"""Calls that a backward may come for, by the number in their handle."""


_numbers = itertools.count(1)


class _Owner(ctypes.c_int64):
    """Memory of a handle."""


def begins(call: CompiledCall) -> None:
    """Note the call whose compiled forward runs in this thread from now on."""
    _running.calls.append(call)


def ends(call: CompiledCall) -> None:
    """Note that a call's compiled forward is over, with those inside it."""
    if call in _running.calls:
        del _running.calls[_running.calls.index(call) :]


def calls_alive() -> int:
    return len(_calls)


def _handle_of(call: CompiledCall) -> torch.Tensor:
    number = next(_numbers)
    _calls[number] = call
    owner = _Owner(number)
    weakref.finalize(owner, _calls.pop, number, None).atexit = False
    return torch.frombuffer(owner, dtype=torch.int64)


def _call_of(handle: torch.Tensor) -> CompiledCall:
    call = _calls.get(int(handle))
    if call is None:
        raise MemoError(
            "the handle of a compiled layer's frame was copied: saved-tensor hooks moved what autograd saved. Leave them out"
        )
    return call


def _define(schema: str, fake: Callable[..., Any], real: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memo::{name}", fake, lib=_LIBRARY)


def _keep(
    out: torch.Tensor,
    kept: list[torch.Tensor],
    native: bool,
    inputs: int,
    ops: list[str],
    counts: list[int],
    whole: list[bool],
    flops: list[int],
    softmax: str,
) -> torch.Tensor:
    call = _running.calls[-1]
    call.give(kept, native, Keeps(inputs, ops, counts, whole, flops, softmax))
    return _handle_of(call)


def _supply(
    handle: torch.Tensor, index: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    tensor = _call_of(handle).supply(index)
    if tensor.stride() == tuple(stride):
        return tensor
    found = torch.empty_strided(size, stride, dtype=dtype, device=device)
    once = tuple(slice(1 if step == 0 else None) for step in stride)  # an expanded dimension repeats its first element
    found[once].copy_(tensor[once])
    return found


def _join(func: OpOverload) -> Callable[..., torch.Tensor]:
    def join(handle: torch.Tensor, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _call_of(handle).join(index, func, args, kwargs)

    return join


_define(
    "keep(Tensor out, Tensor[] kept, bool native, int inputs, str[] ops, int[] counts, bool[] whole, SymInt[] flops, str softmax)"
    " -> Tensor",
    lambda *_: torch.empty(1, dtype=torch.int64, device="cpu"),
    _keep,
)
_define(
    "supply(Tensor handle, int index, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) -> Tensor",
    lambda handle, index, size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype, device=device),
    _supply,
)
_define(
    "hold(Tensor handle, Tensor saved) -> Tensor",
    lambda handle, saved: torch.empty_like(saved),
    lambda handle, saved: saved.clone(),
)
KEEP, SUPPLY, HOLD = torch.ops.memo.keep.default, torch.ops.memo.supply.default, torch.ops.memo.hold.default


@functools.cache
def join_of(func: OpOverload) -> OpOverload:
    """Return the op that joins stored and computed rows of a product: its schema is the product's, with two arguments more."""
    name = f"join_{func._opname}"
    _, _, signature = str(func._schema).partition("(")
    _define(
        f"{name}(Tensor memo_handle, int memo_index, {signature}",
        lambda handle, index, *args, **kwargs: func(*args, **kwargs),
        _join(func),
    )
    return getattr(torch.ops.memo, name).default


def define_joins() -> None:
    """Define the ops of all products: graphs that come from inductor's cache call them by name."""
    for func in sorted(op_policy.GEMM | op_policy.BATCHED, key=str):
        join_of(func)
    for name in op_policy.GROUPED_NAMES:
        namespace, _, op = name.partition("::")
        if hasattr(getattr(torch.ops, namespace), op):
            join_of(getattr(getattr(torch.ops, namespace), op).default)
