"""A recipe: what one layer call keeps, op by op. Made once from what the first call of a kind did, followed by the later ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch._ops import OpOverload

from ds_memo.remat import op_policy
from ds_memo.remat.functions import FunctionCall
from ds_memo.swap.frame import Kept, Layout, dense_order

SMALL = 256
"""Bytes. Smaller tensors (a generator's state, a mask of one row) stay on the device: a copy would cost more than they do."""


@dataclass(frozen=True)
class Gemm:
    """One product of the layer."""

    func: OpOverload
    shape: tuple[int, ...]
    flops: int
    kept: Kept | None = None
    """Where its rows are; None: none is stored."""
    wanted: bool = True
    """Whether any saved tensor depends on it. If not, it is not computed in the replay."""
    biased: bool = False
    """A bias is added in place right after it: kept rows include it."""

    def makes(self, out: torch.Tensor) -> bool:
        """Whether an output is as foreseen."""
        kept = self.kept
        return self.shape == out.shape and (kept is None or (kept.dtype == out.dtype and kept.stride == out.stride()))

    @property
    def rows(self) -> int:
        return self.kept.rows if self.kept else 0

    @property
    def computed_again(self) -> bool:
        """The replay computes it, or some rows of it."""
        return self.wanted and self.rows < self.shape[0]


@dataclass(frozen=True)
class SavedOp:
    """An op whose outputs are supplied whole: attention, or a router's choice."""

    func: OpOverload | FunctionCall
    kept: tuple[Kept | None, ...] | None
    """One entry per output; None: kept as it is, on the device. No tuple at all: nothing is kept, it runs again."""

    @property
    def is_attention(self) -> bool:
        return _is_attention(self.func)

    @property
    def computed_again(self) -> bool:
        return self.kept is None

    def makes(self, outputs: tuple[Any, ...]) -> bool:
        """Whether the outputs are as foreseen."""
        return all(
            kept is None or (kept.shape == value.shape and kept.stride == value.stride() and kept.dtype == value.dtype)
            for kept, value in zip(self.kept or (), outputs, strict=False)
        )


@dataclass
class Unkept:
    """Work of one call that a recipe cannot spare the backward, whatever alpha is."""

    attention_ops: int = 0
    """Attention calls under a torch.utils.checkpoint inside the layer, which runs them again whatever is kept."""
    gemm_flops: int = 0
    """FLOPs of GEMMs under such a checkpoint."""
    batched_flops: int = 0
    """FLOPs of batched products with weights, which are not kept."""
    batched_flops_again: int = 0
    """Of these, the ones before the last saved tensor, where the replay ends: they are computed again."""


@dataclass(frozen=True)
class Recipe:
    """Everything later calls of the same kind need to know."""

    ops: list[Gemm | SavedOp]
    inputs: list[Kept | None]
    layout: Layout
    packs: int
    """How many tensors autograd saved: a call that saves another number is of another kind."""
    softmax: str | None
    """Name of an op that materialised attention scores."""
    rewritten: str = ""
    """Names of ops whose outputs were changed out of our sight, separated by commas."""
    unkept: Unkept = field(default_factory=Unkept)

    @cached_property
    def gemm_flops(self) -> int:
        return self.unkept.batched_flops + sum(op.flops for op in self.ops if isinstance(op, Gemm))

    @cached_property
    def attention_ops(self) -> int:
        return sum(isinstance(op, SavedOp) and op.is_attention for op in self.ops)

    @cached_property
    def mem_efficient_tokens(self) -> int:
        """The longest sequence that PyTorch's memory-efficient attention saw; 0: it was not used."""
        ops = [op for op in self.ops if op.func is torch.ops.aten._scaled_dot_product_efficient_attention.default]
        return max((max(op.kept[0].shape[1:-1]) for op in ops if isinstance(op, SavedOp) and op.kept and op.kept[0]), default=0)

    def without_shortcuts(self, followed: int) -> Recipe:
        """For a call that left the recipe after `followed` ops: what was stored by then is used, everything else is computed."""
        ops = [replace(op, wanted=True) if isinstance(op, Gemm) else op for op in self.ops[:followed]]
        return replace(self, ops=ops)


# ---- what is observed in the first call


@dataclass
class ObservedGemm:
    func: OpOverload
    out: torch.Tensor
    flops: int
    sources: int
    """The GEMMs that its operands depend on: two bits for each, see ds_memo.remat.analyse."""
    splits: bool
    fingerprint: torch.Tensor
    biased: bool = False
    chosen_from: bool = False
    """A router's choice looks at it: rows are not split off."""


@dataclass
class ObservedSavedOp:
    func: OpOverload | FunctionCall
    outputs: tuple[Any, ...]
    sources: int
    """The GEMMs that its operands depend on: two bits for each, see ds_memo.remat.analyse."""
    fingerprint: torch.Tensor
    again: bool = False
    """Its outputs cannot be kept."""


@dataclass
class Observed:
    """What happened in one call, in order."""

    ops: list[ObservedGemm | ObservedSavedOp] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    wanted: int = 0
    """The GEMMs that a saved tensor depends on, by the lower of their two bits."""
    packs: int = 0
    softmax: str | None = None
    set_aside: list[torch.Tensor] = field(default_factory=list)
    """Copies of tensors that the layer went on to change in place."""
    rewritten: list[str] = field(default_factory=list)
    """Ops whose outputs were changed by a kernel that PyTorch cannot see."""
    unkept: Unkept = field(default_factory=Unkept)

    def note_unseen_writes(self) -> None:
        """Find outputs that a kernel changed in place without PyTorch's knowing, as Triton kernels for rotary embeddings do.

        The value that such an op returned is gone, and at which point of the layer it changed is not known. So these ops are not
        kept: they run again in each replay, and so does the kernel.
        """
        if not self.ops:
            return
        now = [fingerprint(op.out if isinstance(op, ObservedGemm) else op.outputs) for op in self.ops]
        device = now[0].device  # one look at the device for all
        before = torch.stack([op.fingerprint.to(device) for op in self.ops])
        same = before.eq(torch.stack([number.to(device) for number in now])).tolist()
        for op, unchanged in zip(self.ops, same, strict=True):
            if unchanged:
                continue
            self.rewritten.append(str(op.func))
            if isinstance(op, ObservedGemm):
                op.splits = False
            else:
                op.again = True
                self.wanted |= op.sources

    def is_wanted(self, gemm: int) -> bool:
        """Whether a saved tensor depends on the GEMM of this number."""
        return bool(self.wanted >> 2 * gemm & 1)

    def run_attention_again(self) -> None:
        """The last resort: keep no attention outputs. What they are computed from is wanted then."""
        for op in self.ops:
            if isinstance(op, ObservedSavedOp) and _is_attention(op.func):
                op.again = True
                self.wanted |= op.sources

    def close_over_inputs(self, all_rows_kept: bool) -> None:
        """Mark as wanted what the operands of wanted GEMMs depend on, latest first, unless the GEMM is supplied whole."""
        for bit, op in reversed(list(enumerate(self.gemms()))):
            supplied_whole = op.splits and (all_rows_kept or op.chosen_from)
            if self.is_wanted(bit) and not supplied_whole:
                self.wanted |= op.sources

    def forget(self) -> None:
        """Drop all tensors: the engine has by now what is to be kept."""
        self.ops.clear()
        self.inputs.clear()
        self.set_aside.clear()

    def gemms(self) -> list[ObservedGemm]:
        return [op for op in self.ops if isinstance(op, ObservedGemm)]

    def sizes(self) -> tuple[int, int]:
        """Bytes that are stored whatever alpha is, and bytes of which the share alpha is stored."""
        whole = [tensor for tensor in self.inputs if tensor is not None]
        split: list[torch.Tensor] = []
        for bit, gemm in enumerate(self.gemms()):
            if self.is_wanted(bit) and gemm.splits:
                (whole if gemm.chosen_from else split).append(gemm.out)
        for op in self.ops:
            if isinstance(op, ObservedSavedOp) and not op.again:
                whole.extend(out for out in op.outputs if storable(out))
        return sum(map(_nbytes, whole)), sum(map(_nbytes, split))


def make_recipe(observed: Observed, alpha: float) -> tuple[Recipe, list[tuple[Kept, torch.Tensor]]]:
    """Decide every home.

    Returns:
        The recipe, and the tensors of this very call with the place each is kept at.
    """
    if not observed.packs:  # frozen: there will be no replay
        ops = [_unkept(op) for op in observed.ops]
        return Recipe(ops, [None] * len(observed.inputs), Layout(), 0, observed.softmax), []

    layout, tensors = Layout(), []

    def store(tensor: torch.Tensor, rows: int | None = None) -> Kept:
        kept = layout.add(tensor, rows)
        tensors.append((kept, tensor))
        return kept

    inputs = [store(tensor) if tensor is not None else None for tensor in observed.inputs]
    ops = []
    bit = 0
    for op in observed.ops:
        if isinstance(op, ObservedSavedOp):
            ops.append(SavedOp(op.func, None if op.again else tuple(store(out) if storable(out) else None for out in op.outputs)))
            continue
        wanted = observed.is_wanted(bit)
        bit += 1
        m = op.out.shape[0]
        rows = m if op.chosen_from else int(alpha * m)
        kept = store(op.out, rows) if wanted and op.splits and rows else None
        ops.append(Gemm(op.func, tuple(op.out.shape), op.flops, kept, wanted, op.biased))
    recipe = Recipe(
        ops=ops,
        inputs=inputs,
        layout=layout,
        packs=observed.packs,
        softmax=observed.softmax,
        rewritten=", ".join(observed.rewritten),
        unkept=observed.unkept,
    )
    return recipe, tensors


def _is_attention(func: OpOverload | FunctionCall) -> bool:
    return isinstance(func, FunctionCall) or op_policy.kind_of(func) is op_policy.OpKind.ATTENTION


def _unkept(op: ObservedGemm | ObservedSavedOp) -> Gemm | SavedOp:
    if isinstance(op, ObservedSavedOp):
        return SavedOp(op.func, None)
    return Gemm(op.func, tuple(op.out.shape), op.flops, wanted=False)


def fingerprint(outputs: Any) -> torch.Tensor:
    """A number, on the device of the first tensor, that changes when the values of these tensors do.

    Tensors elsewhere do not count: some attention kernels return their seed on the host, where no device kernel writes.
    """
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = [value for value in values if type(value) is torch.Tensor and value.numel() and torch._C._has_storage(value)]
    sums = [_integers(tensor).sum(dtype=torch.int64) for tensor in tensors if tensor.device == tensors[0].device]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    width = tensor.dtype.itemsize
    places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]) if tensor.dim() else (1,)
    if tensor.dim() and tensor.stride(-1) == 1 and not any(place * width % 8 for place in places):
        return tensor.view(torch.int64)  # the sum needs no wider copy then, which the CPU would make
    return tensor.view(_INTEGERS[width])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storable(value: Any) -> bool:
    """Whether a value can go to the host and is worth the copy."""
    return type(value) is torch.Tensor and _nbytes(value) >= SMALL and dense_order(value) is not None


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
