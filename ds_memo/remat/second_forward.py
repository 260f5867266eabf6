"""Count GEMMs of the forward that an autograd.Function runs again in its own backward, as DeepSpeed's TiledMLP does.

No replay sees them. They are counted in the backward of a call that was analysed; later calls of its kind count the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from ds_memo.remat import op_policy
from ds_memo.remat.call import Call, storage_of, tensor_leaves
from ds_memo.remat.functions import SkipsCompiled, has_inner_tensors
from ds_memo.remat.modes import under_torch_checkpoint

_ZEROS = "deepspeed.runtime.zero."
"""Modules of ZeRO-3's own Functions: F.linear, and hooks that gather. They run nothing again. A node with hooks frees its
gradients later, so that the first pass would not do for a plan of addresses."""


def count_in_functions(call: Call, out: Any, since: int, parameters: Sequence[torch.Tensor]) -> None:
    """Have the backward of each autograd.Function in an analysed call count the GEMMs that it runs again.

    Args:
        out: of the call.
        since: the autograd sequence number at its begin.
    """
    for node in _functions(out, since):
        _count_in(node, call, parameters)


def _functions(out: Any, since: int) -> Iterator[Any]:
    """Yield the nodes of autograd.Functions that the graph of `out` got since a sequence number."""
    pending = [tensor.grad_fn for tensor in tensor_leaves(out) if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, BackwardCFunction) and not node._forward_cls.__module__.startswith(_ZEROS):
            yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen and before._sequence_nr() >= since:
                seen.add(before)
                pending.append(before)


def _count_in(node: Any, call: Call, parameters: Sequence[torch.Tensor]) -> None:
    running: list[_CountsAgain] = []

    def begin(gradients: Any) -> None:
        running.append(_CountsAgain(gradients, parameters))
        running[-1].__enter__()

    def end(made: Any, gradients: Any) -> None:
        mode = running.pop()
        mode.__exit__(None, None, None)
        for hook in hooks:
            hook.remove()  # a second backward counts by the recipe
        call.count_again(mode.flops)

    hooks = (node.register_prehook(begin), node.register_hook(end))


class _CountsAgain(SkipsCompiled):
    """Count the FLOPs of GEMMs none of whose operands was computed from a gradient.

    Args:
        gradients: what the Function's backward is given.
        parameters: of the layer. A batched product counts if it reads one; others may be attention.
    """

    def __init__(self, gradients: Any, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.flops = 0
        self._parameters = parameters
        self._of_gradients: dict[int, StorageWeakRef] = {}
        self._add(gradients)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_inner_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if under_torch_checkpoint():  # a replay, which counts itself; or a checkpoint in the layer, counted in the forward
            return out
        operands = tensor_leaves((args, kwargs))
        if func in op_policy.EMPTY or any(storage_of(tensor) in self._of_gradients for tensor in operands):
            self._add((out, op_policy.written_tensors(func, args, kwargs) if op_policy.is_mutating(func) else ()))
        elif self._is_gemm(func, operands):
            self.flops += op_policy.gemm_flops(func, args, out)
        return out

    def _is_gemm(self, func: Any, operands: Sequence[torch.Tensor]) -> bool:
        if func not in op_policy.BATCHED:
            return func in op_policy.GEMM
        storages = {storage_of(parameter) for parameter in self._parameters}
        return any(storage_of(operand) in storages for operand in operands)

    def _add(self, tree: Any) -> None:
        """Note tensors computed from gradients, or memory that a kernel PyTorch does not show may fill with gradients."""
        for tensor in tensor_leaves(tree):
            if storage := storage_of(tensor):
                self._of_gradients.setdefault(storage, StorageWeakRef(tensor.untyped_storage()))
