"""The recipe of a compiled call. Its graph says which tensors it keeps; their sizes make the recipe when it first runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_memo.remat import op_policy
from ds_memo.remat.recipe import Gemm, Notes, Observed, ObservedGemm, ObservedSavedOp, Recipe, make_recipe, storable
from ds_memo.swap.frame import Kept


class Keeps(NamedTuple):
    """Tensors that a forward graph keeps: the layer's inputs, then the outputs of its ops, in order."""

    inputs: int
    """Number of inputs that are kept."""
    ops: Sequence[str]
    """Products and saved ops of the layer, by name."""
    counts: Sequence[int]
    """By op: how many of its outputs are kept. 0: nothing needs it. -1: the backward computes all of it again."""
    whole: Sequence[bool]
    """By op: True if all rows of the product are kept, because a choice depends on it."""
    flops: Sequence[int]
    """By op: FLOPs of a product; 0: a saved op."""
    softmax: str
    """Name of an op that materialised attention scores, or empty."""

    def rows_of(self, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(kept, self.are_products(), strict=True)
        return [op_policy.as_rows(tensor.detach()) if product else tensor.detach() for tensor, product in pairs]

    def are_products(self) -> list[bool]:
        """Return, for each kept tensor, True for a product."""
        products = [False] * self.inputs
        for count, work in zip(self.counts, self.flops, strict=True):
            products += [bool(work)] * max(0, count)
        return products

    def observed(self, kept: Sequence[torch.Tensor]) -> Observed:
        """Return what an analysis would have observed of a call that keeps these tensors."""
        inputs = [tensor if storable(tensor) else None for tensor in kept[: self.inputs]]
        observed = Observed(inputs=inputs, packs=1, notes=Notes(softmax=self.softmax or None))
        gemms = 0
        for name, count, whole, work, tensors in zip(
            self.ops, self.counts, self.whole, self.flops, self._by_op(kept), strict=True
        ):
            func, unread = _op_named(name), torch.empty(0)
            if not work:
                observed.ops.append(ObservedSavedOp(func, tuple(tensors), 0, unread, recomputed=count < 0))
                continue
            out = tensors[0] if tensors else unread
            splits = out.is_contiguous() and out.numel() > 0
            observed.ops.append(ObservedGemm(func, tuple(out.shape), out, work, 0, splits, unread, chosen_from=whole))
            observed.wanted |= bool(count) << 2 * gemms
            gemms += 1
        return observed

    def _by_op(self, kept: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        begin = self.inputs
        for count in self.counts:
            yield kept[begin : begin + max(0, count)]
            begin += max(0, count)


@dataclass(frozen=True)
class CompiledRecipe(Recipe):
    slots: tuple[Kept | None, ...] = ()
    """For each tensor that the graph keeps, its place; None: no row of it is stored, or it is too small for the way."""

    @classmethod
    def of(cls, keeps: Keeps, observed: Observed, alpha: float) -> CompiledRecipe:
        """Return the recipe of a call that `keeps` describes."""
        recipe, _ = make_recipe(observed, alpha)
        slots = [*recipe.inputs]
        for op, count in zip(recipe.ops, keeps.counts, strict=True):
            if count > 0:
                slots += [op.kept] if isinstance(op, Gemm) else op.kept or ()
        return cls(recipe.ops, recipe.inputs, recipe.layout, recipe.packs, recipe.notes, slots=tuple(slots))

    def fits(self, kept: Sequence[torch.Tensor]) -> bool:
        """Return True if tensors have the shapes, strides and dtypes of the recipe."""
        return len(kept) == len(self.slots) and all(
            slot is None or (slot.shape == tensor.shape and slot.stride == tensor.stride() and slot.dtype == tensor.dtype)
            for slot, tensor in zip(self.slots, kept, strict=True)
        )


def _op_named(name: str) -> Any:
    """Return the op of a name such as "aten::max.dim", or the higher-order op of that name."""
    namespace, _, rest = name.rpartition("::")
    if not namespace:
        return getattr(torch.ops.higher_order, name)
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
