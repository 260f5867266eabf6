"""MEMO as the paper has it, as a rival: every skeletal tensor is swapped, one alpha, two rounding buffers (SIGMOD 2025).

    forward    of every tensor that autograd saves inside a layer, the first alpha of its rows goes to the host; layer input and
               attention output with its log-sum-exp go whole; the last two layers stay on the device
    replay     the rows that are missing run through the layer's token-wise parts again, attention supplied, and fill up the
               buffer that holds the reloaded rows

ds_memo's own engine moves the bytes (three streams, two buffers, exact host blocks), so that the comparison is of what is
kept, not of how well copies are written. One difference: a replayed row is copied into the buffer, which the paper's
kernels write to directly; at 7B width and 64K tokens that is 9 GB of 2.4 TB/s in a layer of 0.4 s, under 1 %.
The batch is one sequence.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks.paper_alpha import paper_alpha
from benchmarks.workloads import attention_through, heads_to_ranks, ranks_to_heads, sdpa
from ds_memo.config import PlanConfig
from ds_memo.hf.find_layers import find_layers
from ds_memo.placement import SWAPPED, spread
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.runtime.optimizer_hooks import watch_optimizers
from ds_memo.shapes import shapes_of
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Kept, Layout
from ds_memo.swap.host_budget import shared_pool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.streams import streams_for
from ds_memo.units import GIB

SMALL = 4096
"""Bytes up to which a saved tensor stays where it is."""


class Unlike(RuntimeError):
    """The replay saved other tensors than the forward."""


@dataclass(frozen=True)
class Rows:
    """Conversion between a tensor and its rows: tokens as the first dimension."""

    shape: torch.Size
    dim: int
    ranks: int
    """The dimension holds this many runs of the rows of this process, one per rank of sequence parallelism."""

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """(rows, …), a view where there can be one."""
        if self.ranks == 1:
            return tensor.movedim(self.dim, 0)
        return tensor.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim + 1, 0)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """From (rows, elements of one) as the tensor was; of any number of rows."""
        before, behind = self.shape[: self.dim], self.shape[self.dim + 1 :]
        if self.ranks == 1:
            return rows.view(-1, *before, *behind).movedim(0, self.dim)
        return rows.view(-1, *before, self.ranks, *behind).movedim(0, self.dim + 1).flatten(self.dim, self.dim + 1)


def rows_of(tensor: torch.Tensor, tokens: int, ranks: int) -> Rows | None:
    """None: the tensor has no dimension of tokens."""
    for times in dict.fromkeys((1, ranks)):
        for dim, n in enumerate(tensor.shape):
            if n == times * tokens:
                return Rows(tensor.shape, dim, times)
    return None


@dataclass
class Entry:
    """One skeletal tensor of a layer call."""

    rows: Rows
    kept: Kept | None = None
    whole: bool = False


@dataclass(frozen=True)
class Packed:
    """Stands for a saved tensor in autograd's graph."""

    call: Call
    entry: int
    rows: Rows | None
    """Its rows in the entry; None: it is the attention output as this rank's rows."""
    shape: torch.Size


@dataclass(eq=False)
class Call:
    """One layer call, from its forward to its backward. Lives as long as its graph."""

    layer: int
    frame: Frame
    fn: Callable[..., torch.Tensor]
    others: tuple[Any, ...]
    tokens: int
    stored: int = 0
    """Rows that go to the host of every skeletal tensor."""
    entries: list[Entry] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors of the entries, tokens first, until the layer ends."""
    packs: list[int | None] = field(default_factory=list)
    """Entry of each tensor that autograd saved; None: it has none. Those saved inside attention are left out."""
    attention: tuple[int, int, int, int] | None = None
    """Entries of q, k, v and of the output."""
    joined: torch.Tensor | None = None
    slots: dict[int, torch.Tensor] | None = None
    inside: bool = False


class PaperMemo:
    """Runs the layers of one Hugging Face model.

    Args:
        alpha: fraction of the rows of every skeletal tensor that goes to the host; None: the paper's program decides.
        host_bytes: budget.
        ranks: of sequence parallelism, see :mod:`benchmarks.workloads`.
        bandwidth: device to host, bytes a second.
        layer_forward_s: of one layer without copies; like `bandwidth` for the paper's program only.
        planned: memory addresses are planned, as in the paper (part 2); by ds_memo's planner and allocator.
    """

    def __init__(
        self,
        model: nn.Module,
        alpha: float | None,
        host_bytes: int,
        device: torch.device,
        ranks: int = 1,
        bandwidth: float = 0.0,
        layer_forward_s: float = 0.0,
        planned: bool = False,
    ) -> None:
        # The pool that ds_memo has under the same budget, so that memory stays locked between their turns.
        pool = shared_pool(host_bytes / GIB, next(model.parameters()).device)
        self.slab = HostSlab(host_bytes, pool)
        self.engine = SwapEngine(streams_for(device), self.slab, device)
        self.alpha, self.ranks = alpha, ranks
        self._hides = bandwidth, layer_forward_s
        layers = [module for _, module in find_layers(model)]
        resident = spread(len(layers), min(2, len(layers)))
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._layers = layers
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _plain if index in resident else functools.partial(self._run, index)
        self.addresses: Addresses | None = None
        self._undo: list[Callable[[], Any]] = []
        if planned:
            self._plan_addresses(model, device, max(set(range(len(layers))) - set(resident), default=-1))

    def _plan_addresses(self, model: nn.Module, device: torch.device, last_layer: int) -> None:
        self.addresses = addresses = Addresses(device, PlanConfig(time_limit_s=10.0), warnings.warn)
        addresses.install()
        watched = [
            model.register_forward_pre_hook(
                lambda model, args, kwargs: addresses.pass_begins(shapes_of(args, kwargs), last_layer, last=True),
                with_kwargs=True,
            ),
            model.register_forward_hook(lambda model, args, out: addresses.forward_ended()),
        ]
        self._undo = [hook.remove for hook in watched]
        self._undo += watch_optimizers(weakref.ref(model), addresses, Addresses.step_begins, Addresses.step_ends)

    def close(self) -> None:
        for undo in self._undo:
            undo()
        if self.addresses:
            self.addresses.close()
        for layer in self._layers:
            del layer.gradient_checkpointing, layer._gradient_checkpointing_func
        self.engine.close()

    # ---- forward

    def _run(self, index: int, fn: Callable[..., torch.Tensor], hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return fn(hidden, *others)
        if self.addresses:
            self.addresses.layer_begins(index)
        frame = self.engine.begin(f"layer {index}", SWAPPED)
        tokens = hidden.shape[1]
        call = Call(index, frame, fn, others, tokens)
        foreign = self._own | {_storage(x) for x in _tensors((fn, others))}
        known: dict[Any, int] = {}
        joined = None
        """Storage of the attention output as this rank's rows: the same bytes as the kernel's output in another order."""

        def entry(tensor: torch.Tensor, whole: bool = False) -> int | None:
            rows = rows_of(tensor, tokens, self.ranks)
            if rows is None:
                return None
            first = rows.first(tensor.detach())
            key = (first.data_ptr(), first.dtype, _runs(first))
            if key not in known:
                known[key] = len(call.entries)
                call.entries.append(Entry(rows))
                call.tensors.append(first)
            call.entries[known[key]].whole |= whole
            return known[key]

        def pack(tensor: torch.Tensor) -> Any:
            storage = _storage(tensor)
            if storage == joined:
                call.packs.append(None)
                return Packed(call, call.attention[3], None, tensor.shape)
            mine = tensor.numel() * tensor.itemsize > SMALL and storage not in foreign
            number = entry(tensor, whole=call.inside) if mine else None
            if not call.inside:
                call.packs.append(number)
            return tensor if number is None else Packed(call, number, rows_of(tensor, tokens, self.ranks), tensor.shape)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, ranks: int) -> torch.Tensor:
            nonlocal joined
            split = [heads_to_ranks(x, ranks) for x in (q, k, v)]
            call.inside = True
            out = sdpa(*split, scale)
            call.inside = False
            call.attention = (*(entry(x) for x in split), entry(out, whole=True))
            for number in call.attention[:3]:  # saved by the kernel, yet token-wise
                call.entries[number].whole = False
            result = ranks_to_heads(out, ranks)
            if _storage(result) != _storage(out):
                joined, call.joined = _storage(result), result  # held, so that nothing else gets its storage meanwhile
            return result

        entry(hidden, whole=True)  # entry 0
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack), attention_through(attention):
            out = fn(hidden, *others)
        layout = Layout()
        call.joined = None
        if self.alpha is None:
            self.alpha = self._solve(call)
        call.stored = round(self.alpha * tokens)
        for number, made in enumerate(call.entries):
            call.tensors[number] = call.tensors[number].reshape(tokens, -1).contiguous()  # one at a time: each original may go
            made.kept = layout.add(call.tensors[number], None if made.whole else call.stored)
        self.engine.adopt(frame, layout)
        for made, tensor in zip(call.entries, call.tensors, strict=True):
            self.engine.keep(frame, made.kept, tensor)
        self.engine.end(frame)
        call.tensors.clear()
        return out

    def _solve(self, call: Call) -> float:
        whole = [made.whole for made in call.entries]
        sizes = [tensor.numel() * tensor.itemsize for tensor in call.tensors]
        always = sum(size for size, all_of_it in zip(sizes, whole, strict=True) if all_of_it)
        alpha = paper_alpha(0, always, sum(sizes) - always, *self._hides, len(self._layers), self.slab.budget.nbytes)
        return alpha or 0.0  # None: not even 0 hides, or fits; the slab will say so

    # ---- backward

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        call = packed.call
        if call.slots is None:
            if self.addresses:
                self.addresses.layer_replays(call.layer)
            self.engine.bring_back(call.frame)
            call.slots = dict(call.frame.slots)
            if call.stored < call.tokens:
                self._replay(call)
            self.engine.replayed(call.frame)
        slot = call.slots[packed.entry]
        if packed.rows is None:
            return ranks_to_heads(call.entries[packed.entry].rows.back(slot), self.ranks).view(packed.shape)
        return packed.rows.back(slot)

    def _replay(self, call: Call) -> None:
        """Fill up the rows that are not stored."""
        begin, saved = call.stored, 0

        def missing(number: int) -> torch.Tensor:
            return call.entries[number].rows.back(call.slots[number][begin:])

        def fill(number: int, tensor: torch.Tensor) -> None:
            made = call.entries[number]
            if not made.whole:
                rows = call.slots[number][begin:]
                rows.copy_(made.rows.first(tensor.detach()).reshape(rows.shape))

        def pack(tensor: torch.Tensor) -> None:
            nonlocal saved
            if saved >= len(call.packs):
                raise Unlike(f"{call.frame.name}: the replay saved more than {len(call.packs)} tensors")
            if call.packs[saved] is not None:
                fill(call.packs[saved], tensor)
            saved += 1

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, ranks: int) -> torch.Tensor:
            for number, tensor in zip(call.attention, (q, k, v), strict=False):
                fill(number, heads_to_ranks(tensor, ranks))
            return ranks_to_heads(missing(call.attention[3]), ranks).detach().requires_grad_()

        def rows(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or (found := rows_of(value, call.tokens, 1)) is None:
                return value
            return found.first(value)[begin:].movedim(0, found.dim)

        fn, others = _map(rows, call.fn), tree_map(rows, call.others)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
        with torch.enable_grad(), hooks, attention_through(attention):
            fn(missing(0).detach().requires_grad_(), *others)
        if saved != len(call.packs):
            raise Unlike(f"{call.frame.name}: the forward saved {len(call.packs)} tensors, its replay {saved}")


@contextlib.contextmanager
def paper_memo(model: nn.Module, alpha: float | None, host_bytes: int, device: torch.device, **more: Any) -> Iterator[PaperMemo]:
    """Within the block the model trains as the paper's MEMO; see :class:`PaperMemo`."""
    memo = PaperMemo(model, alpha, host_bytes, device, **more)
    try:
        yield memo
    finally:
        memo.close()


def _plain(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def _never(packed: Any) -> torch.Tensor:
    raise Unlike("the graph of a replay was used")


def _runs(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides with adjacent dimensions merged: equal for views of the same elements."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return tuple(runs)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _map(function: Callable[[Any], Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(fn, functools.partial):
        return fn
    return functools.partial(fn.func, *tree_map(function, fn.args), **tree_map(function, fn.keywords))


def _tensors(tree: Any) -> list[torch.Tensor]:
    fn, others = tree
    found: list[torch.Tensor] = []
    keep = lambda value: found.append(value) if isinstance(value, torch.Tensor) else None  # noqa: E731
    tree_map(keep, others)
    if isinstance(fn, functools.partial):
        tree_map(keep, (fn.args, fn.keywords))
    return found
