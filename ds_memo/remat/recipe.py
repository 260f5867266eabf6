"""A recipe: what a layer call keeps, op by op. The first call of a signature makes it, and later calls follow it.

A layer that runs in tiles is cut at its attention function: the ops before it are a tile's *pre*, those behind it its *post*. A
whole layer is a layer in one tile without a cut, all of it post. The views of a recipe say what a run of one section does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch._ops import OpOverload

from ds_memo.placement import stored_rows
from ds_memo.remat import follower, op_policy
from ds_memo.remat.functions import FunctionCall
from ds_memo.swap.frame import Kept, Layout, dense_order

SMALL = 256
"""Bytes. Smaller tensors (a generator's state, a mask of one row) stay on the device, because a copy would cost more."""
_RECIPES = 64
"""Recipes that a layer remembers."""


@dataclass(frozen=True)
class Gemm:
    """One product of the layer."""

    func: OpOverload
    shape: tuple[int, ...]
    dtype: torch.dtype
    flops: int
    kept: Kept | None = None
    """Its stored rows; None: no row is stored."""
    wanted: bool = True
    """True if a saved tensor depends on it. If not, the replay does not compute it."""
    biased: bool = False
    """True if a bias is added in place right after it. Stored rows include the bias."""
    for_pre: bool = True
    """In the pre: True if the pre's backward needs it."""
    for_post: bool = True
    """In the pre: True if the post needs it."""

    def matches(self, out: torch.Tensor) -> bool:
        """Return True if an output has the shape, stride and dtype of the recipe."""
        return self.shape == out.shape and self.dtype == out.dtype and (self.kept is None or out.is_contiguous())

    @property
    def m(self) -> int:
        """Number of rows, those of all matrices of a batch."""
        return math.prod(self.shape[:-1])

    @property
    def rows(self) -> int:
        return self.kept.rows if self.kept else 0

    @property
    def recomputed(self) -> bool:
        """True if the replay computes it, or some of its rows."""
        return self.wanted and self.rows < self.m


@dataclass(frozen=True)
class SavedOp:
    """An op whose outputs the replay supplies: attention, a router's choice, a `keep_whole` function.

    Batched products without weights are listed too, and recomputed: only the analysis can tell them from those with weights.
    """

    func: OpOverload | FunctionCall
    kept: tuple[Kept | None, ...] | None
    """One entry per output; None in the tuple: the output stays on the device. None for the tuple: the op is recomputed."""

    @property
    def is_attention(self) -> bool:
        return _is_attention(self.func)

    @property
    def recomputed(self) -> bool:
        return self.kept is None

    def matches(self, outputs: tuple[Any, ...]) -> bool:
        """Return True if the outputs have the shapes, strides and dtypes of the recipe."""
        return all(
            kept is None or (kept.shape == value.shape and kept.stride == value.stride() and kept.dtype == value.dtype)
            for kept, value in zip(self.kept or (), outputs, strict=False)
        )


@dataclass
class Notes:
    """Why a backward repeats more than alpha says, or has wrong results."""

    attention_ops: int = 0
    """Attention calls under a torch.utils.checkpoint inside the layer, which recomputes them whatever is kept."""
    gemm_flops: int = 0
    """FLOPs of GEMMs under such a checkpoint."""
    softmax: str | None = None
    """Name of an op that materialised attention scores."""
    hidden_kernels: bool = False
    """True if something was read that only a kernel which PyTorch does not show can have computed."""
    rewritten: list[str] = field(default_factory=list)
    """Names of ops whose outputs a kernel that PyTorch does not show changed."""


@dataclass(frozen=True)
class Recipe:
    """The ops of calls of one signature: what is kept of each, and what its replay does."""

    ops: list[Gemm | SavedOp]
    inputs: list[Kept | None]
    layout: Layout
    packs: int
    """Tensors that autograd saved. A call that saves another number leaves the recipe."""
    notes: Notes = field(default_factory=Notes)
    pre_ops: int = 0
    """Number of ops before attention, if calls are cut there."""
    pre_writes: bool = False
    """True if ops of the pre write in place, other than a product's bias to the product."""
    post_writes: bool = False

    @cached_property
    def program(self) -> Any:
        """The ops as C++ reads them."""
        return follower.program(self.ops)

    @cached_property
    def gemm_flops(self) -> int:
        return sum(op.flops for op in self.ops if isinstance(op, Gemm))

    @cached_property
    def attention_ops(self) -> int:
        return sum(isinstance(op, SavedOp) and op.is_attention for op in self.ops)

    @cached_property
    def mem_efficient_tokens(self) -> int:
        """Tokens of the longest sequence given to PyTorch's memory-efficient attention; 0: it was not used."""
        shapes = self._results_of(torch.ops.aten._scaled_dot_product_efficient_attention.default)
        return max((max(shape[1:-1]) for shape in shapes), default=0)

    @cached_property
    def cudnn_elements(self) -> int:
        """Elements of the largest result of cuDNN's attention, as its queries have; 0: it was not used."""
        return max(map(math.prod, self._results_of(torch.ops.aten._scaled_dot_product_cudnn_attention.default)), default=0)

    def _results_of(self, func: OpOverload) -> list[tuple[int, ...]]:
        """Return the shapes of the first outputs of an attention op, where they are kept."""
        ops = [op for op in self.ops if isinstance(op, SavedOp) and op.func is func]
        return [op.kept[0].shape for op in ops if op.kept and op.kept[0]]

    def without_shortcuts(self, followed: int) -> Recipe:
        """Return the recipe of a call that left this one after `followed` ops: supply what was stored, compute the rest."""
        needed = partial(replace, wanted=True, for_pre=True, for_post=True)
        return replace(self, ops=[needed(op) if isinstance(op, Gemm) else op for op in self.ops[:followed]])

    # ---- views: the sections of a tile

    @cached_property
    def pre(self) -> list[Gemm | SavedOp]:
        return self.ops[: self.pre_ops]

    @cached_property
    def post(self) -> list[Gemm | SavedOp]:
        return self.ops[self.pre_ops :]

    @cached_property
    def records_pre(self) -> bool:
        """True if the forward keeps an output of the pre, or what the pre overwrites."""
        return bool(self.packs) and (self.pre_writes or any(op.kept is not None for op in self.pre))

    @cached_property
    def records_post(self) -> bool:
        """True if the forward keeps an output of the post, or what the post overwrites."""
        return bool(self.packs) and (self.post_writes or any(op.kept is not None for op in self.post))

    @cached_property
    def pre_flops(self) -> int | None:
        """FLOPs of the pre's products, if a whole replay computes all ops of the pre; else None."""
        computed = [op.flops for op in self.pre if isinstance(op, Gemm) and op.wanted and op.kept is None]
        return sum(computed) if len(computed) == len(self.pre) else None

    @cached_property
    def pre_backward(self) -> Recipe:
        """Recipe of a run that ends at attention, for the backward of the pre."""
        return self._of_pre(lambda op: op.for_pre, [])

    @cached_property
    def pre_again(self) -> Recipe:
        """Recipe of a run that ends at attention, and computes what attention reads."""
        return replace(self, ops=self.pre)

    @cached_property
    def dead_pre(self) -> Recipe:
        """Recipe of the pre's run before a post: it computes the products that the post needs, and is supplied the rest."""
        ops = [replace(op, wanted=op.for_post, kept=None) if isinstance(op, Gemm) else op for op in self.pre]
        return replace(self, ops=ops)

    @cached_property
    def post_backward(self) -> Recipe:
        """Recipe of a whole run whose attention is supplied: of the pre's products, it computes those that the post needs."""
        return self._of_pre(lambda op: op.wanted and op.for_post, self.post)

    @cached_property
    def post_again(self) -> Recipe:
        """Recipe of a whole run whose attention is supplied, for what the layer returns."""
        wanted = [replace(op, wanted=True) if isinstance(op, Gemm) else op for op in self.post]
        return self._of_pre(lambda op: op.for_post, wanted)

    def _of_pre(self, wanted: Callable[[Gemm], bool], post: list[Gemm | SavedOp]) -> Recipe:
        pre = [replace(op, wanted=wanted(op)) if isinstance(op, Gemm) else op for op in self.pre]
        return replace(self, ops=[*pre, *post])


# ---- what is observed in the first call


@dataclass
class ObservedGemm:
    func: OpOverload
    shape: tuple[int, ...]
    out: torch.Tensor
    """The product, as rows if a part of them can be stored."""
    flops: int
    sources: int
    """The GEMMs that its operands depend on, two bits each: see ds_memo.remat.analyse."""
    splits: bool
    """True if a part of its rows can be stored."""
    fingerprint: torch.Tensor
    without_tokens: bool = False
    """True if its operands come from parameters and constants alone (an adapter's weights times each other)."""
    biased: bool = False
    chosen_from: bool = False
    """True if a router's choice depends on it: all its rows are kept."""


@dataclass
class ObservedSavedOp:
    func: OpOverload | FunctionCall
    outputs: tuple[Any, ...]
    sources: int
    """The GEMMs that its operands depend on, two bits each: see ds_memo.remat.analyse."""
    fingerprint: torch.Tensor
    recomputed: bool = False
    """True if its outputs are not kept."""


@dataclass
class Observed:
    """The ops and inputs of one call, in order."""

    ops: list[ObservedGemm | ObservedSavedOp] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    wanted: int = 0
    """The GEMMs that a saved tensor depends on, by the lower of their two bits."""
    packs: int = 0
    clones: list[torch.Tensor] = field(default_factory=list)
    """Copies of tensors that the layer later changed in place."""
    notes: Notes = field(default_factory=Notes)
    pre_ops: int = 0
    """Number of ops before attention, if the call is cut there; else all are behind it."""
    pre_needs: int = 0
    """The GEMMs of the pre that its own backward needs, as `wanted` has them."""
    post_needs: int = 0
    """The GEMMs of the pre that the post reads."""
    pre_writes: bool = False
    post_writes: bool = False

    def note_hidden_writes(self) -> None:
        """Find outputs that a kernel changed in place without PyTorch's knowledge, as Triton rotary embeddings do.

        The value that the op returned is lost, and the moment of the change is unknown. So the op is not kept: each replay
        recomputes it and runs the kernel.
        """
        if not self.ops:
            return
        now = [fingerprint(op.out if isinstance(op, ObservedGemm) else op.outputs) for op in self.ops]
        device = now[0].device  # one synchronization for all
        before = torch.stack([op.fingerprint.to(device) for op in self.ops])
        same = before.eq(torch.stack([number.to(device) for number in now])).tolist()
        for op, unchanged in zip(self.ops, same, strict=True):
            if unchanged:
                continue
            self.notes.rewritten.append(str(op.func))
            if isinstance(op, ObservedGemm):
                op.splits = False
            else:
                op.recomputed = True
                self.wanted |= op.sources

    def recompute_attention(self) -> None:
        """Keep no attention outputs (the last resort). Their sources are then wanted."""
        for op in self.ops:
            if isinstance(op, ObservedSavedOp) and _is_attention(op.func):
                op.recomputed = True
                self.wanted |= op.sources

    def close_over_inputs(self, all_rows_kept: bool) -> None:
        """Mark the sources of each wanted GEMM as wanted, unless all rows of the GEMM are supplied."""
        self.wanted = self.closed(self.wanted, lambda gemm: gemm.splits and (all_rows_kept or gemm.chosen_from))

    def closed(self, wanted: int, supplied: Callable[[ObservedGemm], bool]) -> int:
        """Return a set of GEMMs with the sources of each, latest first, unless the GEMM is supplied."""
        for bit, gemm in reversed(list(enumerate(self.gemms()))):
            if wanted >> 2 * bit & 1 and not supplied(gemm):
                wanted |= gemm.sources
        return wanted

    def forget(self) -> None:
        """Drop all tensors. The engine has those that are kept."""
        self.ops.clear()
        self.inputs.clear()
        self.clones.clear()

    def gemms(self) -> list[ObservedGemm]:
        return [op for op in self.ops if isinstance(op, ObservedGemm)]

    def sizes(self) -> tuple[int, int]:
        """Return the bytes that are stored whatever alpha is, and the bytes of which the share alpha is stored."""
        at_0, at_1 = (make_recipe(self, alpha)[0].layout.stored_bytes for alpha in (0.0, 1.0))
        return at_0, at_1 - at_0


def make_recipe(observed: Observed, alpha: float, keeps_input: bool = True) -> tuple[Recipe, list[tuple[Kept, torch.Tensor]]]:
    """Decide what is kept, and lay it out.

    Args:
        keeps_input: False: no row of the first input is stored. It has a place in the buffer.

    Returns:
        The recipe, and what this call keeps: each `Kept` with its tensor.
    """
    layout, tensors, replayed = Layout(), [], bool(observed.packs)  # else it is frozen: no replay will come

    def store(tensor: Any, rows: int | None = None) -> Kept | None:
        if tensor is None or not replayed:
            return None
        kept = layout.add(tensor, rows)
        tensors.append((kept, tensor))
        return kept

    inputs = [store(tensor, None if number or keeps_input else 0) for number, tensor in enumerate(observed.inputs)]
    ops: list[Gemm | SavedOp] = []
    bit = 0
    for op in observed.ops:
        if isinstance(op, ObservedSavedOp):
            recomputed = op.recomputed or not replayed
            ops.append(
                SavedOp(op.func, None if recomputed else tuple(store(out) if storable(out) else None for out in op.outputs))
            )
            continue
        wanted, for_pre, for_post = (
            bool(gemms >> bit & 1) for gemms in (observed.wanted, observed.pre_needs, observed.post_needs)
        )
        bit += 2
        m = op.out.shape[0]
        rows = m if op.chosen_from else stored_rows(alpha, m)
        kept = store(op.out, rows) if wanted and op.splits and rows else None
        ops.append(Gemm(op.func, op.shape, op.out.dtype, op.flops, kept, wanted and replayed, op.biased, for_pre, for_post))
    notes = observed.notes if replayed else Notes(softmax=observed.notes.softmax)
    sections = observed.pre_ops, observed.pre_writes, observed.post_writes
    return Recipe(ops, inputs, layout, observed.packs, notes, *sections), tensors


def remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value for later calls. Of many the oldest is dropped: lengths may never repeat."""
    if key not in table and len(table) >= _RECIPES:
        del table[next(iter(table))]
    table[key] = value


def _is_attention(func: OpOverload | FunctionCall) -> bool:
    return isinstance(func, FunctionCall) or op_policy.is_attention(func)


def fingerprint(outputs: Any) -> torch.Tensor:
    """Return an int64 scalar that changes when the tensors' values do, on the device of the first tensor.

    Tensors on other devices do not count: some attention kernels return their seed on the host, where no device kernel writes.
    """
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = [value for value in values if type(value) is torch.Tensor and value.numel() and torch._C._has_storage(value)]
    tensors = [tensor for tensor in tensors if not tensor.is_meta]  # no values
    sums = [integers(tensor).sum(dtype=torch.int64) for tensor in tensors if tensor.device == tensors[0].device]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's bits, as the widest integers that the last dimension can be cut into."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    width = tensor.dtype.itemsize
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]) if tensor.dim() else (1,)
    if tensor.dim() and tensor.stride(-1) == 1 and not any(step * width % 8 for step in steps):
        return tensor.view(torch.int64)  # for narrower integers the CPU's sum would make a wider copy
    return tensor.view(_INTEGERS[width])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storable(value: Any) -> bool:
    """Return True if a value can go to the host and is worth the copy."""
    return type(value) is torch.Tensor and _nbytes(value) >= SMALL and dense_order(value) is not None


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
