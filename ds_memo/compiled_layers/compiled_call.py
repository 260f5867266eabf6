"""One call of a compiled layer: its frame, its recipe, and what its graphs ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ds_memo.compiled_layers.recipe import CompiledRecipe, Keeps
from ds_memo.placement import Placement
from ds_memo.remat import op_policy
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_host import LayerHost, Way
from ds_memo.remat.recipe import SavedOp
from ds_memo.swap.frame import Frame


class CompiledCall:
    """One call of a compiled layer. Its graphs' ops come here.

    Args:
        key: of the call's recipe among the layer's.
    """

    def __init__(self, host: LayerHost, layer: Layer, frame: Frame, key: Any) -> None:
        self.frame = frame
        self.recipe: CompiledRecipe | None = None
        """None until the forward has kept what it keeps, and for good if nothing needs a gradient."""
        self.native = False
        """True if autograd saves what is kept, and the frame stays empty."""
        self._given: tuple[list[torch.Tensor], Keeps] | None = None
        self._host = host
        self._layer = layer
        self._key = key
        self._loose: list[tuple[torch.Tensor, int] | None] = []
        """The tensors without a place in the frame, and their version counters when they were kept, by index."""
        self._served: set[int] = set()
        """Indices that the present backward has asked for."""

    # ---- forward

    def give(self, kept: list[torch.Tensor], native: bool, keeps: Keeps) -> None:
        """Note what the backward needs, at the end of the forward graph.

        Args:
            native: True if autograd saves these tensors itself, and the frame stays empty.
        """
        self._given, self.native = (kept, keeps), native

    @property
    def needs_backward(self) -> bool:
        """True if the graph ran, and a backward may come."""
        return self._given is not None

    def keep(self) -> None:
        """Keep what the graph gave. Inside it a view would have a version counter of its own, and changes would go unnoticed."""
        (given, keeps), self._given = self._given, None
        host, kept = self._host, keeps.rows_of(given)
        recipe = self._layer.recipes.get(self._key)
        if not (isinstance(recipe, CompiledRecipe) and recipe.fits(kept)):
            recipe = self._first_recipe(kept, keeps)
        self.recipe = self._layer.latest = recipe
        host.work.gemm_flops += recipe.gemm_flops
        if self.native:
            return
        host.engine.adopt(self.frame, recipe.layout)
        for slot, tensor, product in zip(recipe.slots, kept, keeps.are_products(), strict=True):
            self._loose.append((tensor, tensor._version) if slot is None and not product else None)
            if slot is not None:
                host.engine.keep(self.frame, slot, tensor)

    def _first_recipe(self, kept: Sequence[torch.Tensor], keeps: Keeps) -> CompiledRecipe:
        """Make the recipe of a first call of its signature."""
        asked, observed = self.frame.placement, keeps.observed(kept)

        def recipe_of(placement: Placement) -> CompiledRecipe:
            return CompiledRecipe.of(keeps, observed, placement.decided_alpha)

        self.frame.placement = self._host.admit(
            self._layer, asked, Way.COMPILED, lambda placement: recipe_of(placement).layout.host_bytes, observed.sizes()
        )
        recipe = recipe_of(self.frame.placement)
        if self.frame.placement.kind is asked.kind:  # else in this call alone: later ones are told before they run
            self._layer.remember(self._key, recipe)
            self._host.diagnose(self._layer, recipe)
        return recipe

    # ---- backward

    def supply(self, index: int) -> torch.Tensor:
        """Return a tensor that was kept whole."""
        self._serve(index)
        loose = self._loose[index]
        if loose is not None and loose[0]._version != loose[1]:
            raise self.frame.changed_in_place(tuple(loose[0].shape))
        tensor = self._in_frame(index) if loose is None else loose[0].clone()
        self._served_one()
        return tensor

    def join(self, index: int, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return a product: its stored rows, and the others computed.

        Args:
            index: of the product among the kept tensors; -1: it is not among them.
        """
        if index < 0:
            return self._multiplied(func, args, kwargs)
        self._serve(index)
        slot = self.recipe.slots[index]
        out = self._multiplied(func, args, kwargs) if slot is None else self._in_frame(index)
        if slot is not None and slot.rows < (rows := out.shape[0]):
            op_policy.compute_rows(func, args, kwargs, slot.rows, out)
            self._host.work.gemm_flops_recomputed += op_policy.gemm_flops(func, args, out) * (rows - slot.rows) // rows
        self._served_one()
        return out.view(op_policy.product_shape(func, args))

    def backward_begins(self) -> None:
        """Tell the observers that a backward begins, and make the frame ready."""
        host = self._host
        if self.frame.state == "ready":  # the backward before this one was interrupted
            host.engine.replayed(self.frame)
        self._served.clear()
        attention = (op for op in self.recipe.ops if isinstance(op, SavedOp) and op.is_attention)
        host.work.attention_ops_recomputed += sum(op.recomputed for op in attention)
        host.replay_begins(self._layer, self.frame)

    def _multiplied(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        out = func(*args, **kwargs)
        self._host.work.gemm_flops_recomputed += op_policy.gemm_flops(func, args, out)
        return out

    def _serve(self, index: int) -> None:
        if self.frame.state != "ready" or index in self._served:
            self.backward_begins()
        self._served.add(index)

    def _served_one(self) -> None:
        """Close the frame once the backward has asked for all of it."""
        if len(self._served) == len(self.recipe.slots):
            self._host.engine.replayed(self.frame)

    def _in_frame(self, index: int) -> torch.Tensor:
        tensor = self.frame.tensor(self.recipe.slots[index])
        return tensor.clone() if self.frame.resident else tensor  # compiled code may write over what it is given
