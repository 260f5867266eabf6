"""Weight gradients of tiles: summed over tiles in float32, the products inside the GEMM that makes them.

A GEMM in bf16 rounds its result once; the sum of 64 such results would be 1 % off.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from ds_memo.remat import follower
from ds_memo.remat.autocast import without_autocast
from ds_memo.remat.modes import inside_tiles
from ds_memo.tiles.graph import graph_of

_LEFT = {"MmBackward0": ("_saved_self", 0), "AddmmBackward0": ("_saved_mat1", 1)}
"""By autograd's name of a product: where its left operand is saved, and the position of that operand's gradient."""
_RIGHT = {"MmBackward0": 1, "AddmmBackward0": 2}
"""The position of the right operand's gradient."""
_THROUGH = {"TBackward0": True, "TransposeBackward0": True, "ToCopyBackward0": False}
"""By autograd's name of what may stand between a weight and a product: True if it transposes."""
_ROWS = 4096
"""Rows of a sum that are scaled at a time."""
_run_backward = torch.autograd.Variable._execution_engine.run_backward
"""torch.autograd.grad() without its checks in Python of what outputs and gradients are. They take as long as ten ops, twice a
tile. It has the engine compare their shapes."""


class GradientSums:
    """Gradients of a layer's parameters, summed over tiles.

    Args:
        parameters: aliases of the layer's parameters, leaves of the tiles' graphs.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._sums: list[torch.Tensor | None] = []
        self.follow(parameters)

    def backward(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """Run a tile's backward: add to the sums, and return the gradients of `inputs`, None where one has none."""
        products = weight_products(outputs, self.parameters)
        reached: list[int] = []
        hooks = [
            node.register_prehook(functools.partial(self._add_product, reached, index, node, transposed))
            for index, of_one in products.items()
            for node, transposed in of_one
        ]
        others = [index for index in range(len(self.parameters)) if index not in products]
        wanted = [*inputs, *(self.parameters[index] for index in others)]
        try:
            with without_autocast():
                found = _run_backward(tuple(outputs), tuple(gradients), False, False, tuple(wanted), True, accumulate_grad=False)
        finally:
            for hook in hooks:
                hook.remove()
        assert len(reached) == len(hooks), "a weight's product was not reached by the backward"
        for index, gradient in zip(others, found[len(inputs) :], strict=True):
            if gradient is not None:
                self.add(index, gradient)
        return found[: len(inputs)]

    def _add_product(
        self, reached: list[int], index: int, node: Any, transposed: bool, gradients: Sequence[torch.Tensor]
    ) -> None:
        """Add a weight's gradient by one product, when the backward comes there."""
        reached.append(index)
        left, gradient = getattr(node, _LEFT[node.name()][0]), gradients[0]
        a, b = (gradient.t(), left) if transposed else (left.t(), gradient)
        self._sums[index] = _plus_product(self._wide(index), a, b, self._dtypes[index])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Go on with other aliases of the same parameters."""
        self.parameters = list(parameters)
        self._dtypes = [_sum_dtype(parameter.dtype) for parameter in self.parameters]
        """In which they are summed."""
        self._sums = self._sums or [None] * len(self.parameters)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all sums by a scalar. Zero stays zero."""
        for index in range(len(self._sums)):
            total = self._sums[index] = self._wide(index)
            for part in () if total is None else total.split(_ROWS):
                part.copy_(times(part, factor))

    def round_sums(self) -> None:
        """Round all sums to the parameters' dtype, which frees half of their memory. They may be added to later."""
        for index, (total, parameter) in enumerate(zip(self._sums, self.parameters, strict=True)):
            self._sums[index] = None if total is None else total.to(parameter.dtype)

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums in the parameters' dtypes, and forget them; None: a parameter had no gradient."""
        self.round_sums()
        taken, self._sums = self._sums, [None] * len(self.parameters)
        return taken

    def add(self, index: int, gradient: torch.Tensor) -> None:
        total = self._wide(index)
        if total is None:
            self._sums[index] = gradient.to(self._dtypes[index], copy=True, memory_format=torch.contiguous_format)
        else:
            self._sums[index] = total.add_(gradient)

    def _wide(self, index: int) -> torch.Tensor | None:
        total = self._sums[index]
        return None if total is None else total.to(self._dtypes[index])


@functools.cache
def see_products_of_zero3() -> None:
    """Have ZeRO-3's linear be PyTorch's own in threads that run a layer in tiles. Elsewhere nothing changes.

    ZeRO-3 puts an autograd function in F.linear's place. It would round each tile's part of the weight's gradient to the weight's
    dtype, before the parts are summed.
    """
    zero3 = sys.modules.get("deepspeed.runtime.zero.linear")
    if zero3 is None:
        return
    function = zero3.LinearFunctionForZeroStage3
    apply = function.apply

    def linear(*args: Any) -> torch.Tensor:
        return torch._C._nn.linear(*args) if inside_tiles() else apply(*args)

    function.apply = linear


def weight_products(outputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> dict[int, list[tuple[Node, bool]]]:
    """Find the parameters that autograd reaches through products alone, as their right operand.

    Returns:
        By index of the parameter, the products, each with True if the weight is transposed there (F.linear).
    """
    library = follower.library()
    uses = (_weight_uses if library is None else library.weight_uses)([*outputs], [*parameters], _RIGHT, _THROUGH)
    return {index: of_one for index, of_one in uses.items() if all(use is not None and _is_plain(use[0]) for use in of_one)}


def _weight_uses(
    outputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], products: dict[str, int], through: dict[str, bool]
) -> dict[int, list[tuple[Node, bool] | None]]:
    """Find what autograd reaches matrices among the parameters through. ops/csrc/tiles.h does the same.

    Returns:
        By index of the parameter its uses: products, as in :func:`weight_products`, and None for any other.
    """
    indices = {id(parameter): index for index, parameter in enumerate(parameters) if parameter.dim() == 2}
    uses: dict[int, list[tuple[Node, bool] | None]] = {}
    for node, next_functions in graph_of(outputs):
        name = node.name()
        if name in through:  # those that use its result count
            continue
        for position, (below, _) in enumerate(next_functions):
            transposed = False
            while below is not None and (passed := below.name()) in through:
                transposed ^= through[passed]
                below = below.next_functions[0][0]
            is_leaf = below is not None and not below.next_functions
            index = indices.get(id(getattr(below, "variable", None))) if is_leaf else None
            if index is not None:
                uses.setdefault(index, []).append((node, transposed) if products.get(name) == position else None)
    return uses


def _is_plain(product: Any) -> bool:
    """Return True if a product has no factor, its left operand's gradient is wanted, so that the backward comes to it, and the
    operand is at hand: a checkpoint inside the layer would give it once."""
    saved, left = _LEFT[product.name()]
    held = getattr(product, saved.replace("_saved", "_raw_saved"))
    plain = product.next_functions[left][0] is not None and getattr(product, "_saved_alpha", 1) == 1
    return plain and getattr(held, "unpack_hook", None) is None


def _plus_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return ``total + a @ b``, summed in float32 or wider, in place where there is a total."""
    if a.is_cuda and a.dtype != wide and wide is torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    a, b = a.to(wide), b.to(wide)  # a CPU's GEMM has no wider output
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


def times(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the product with a scalar; 0 where the tensor is 0, as for rows that do not count, though the scalar be infinite."""
    return torch.where(tensor == 0, tensor, tensor * factor)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
