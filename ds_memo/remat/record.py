"""Record: run a layer's forward by its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_memo.remat import op_policy
from ds_memo.remat.call import Call, needs_right_operands, noticing_draws
from ds_memo.remat.functions import has_inner_tensors
from ds_memo.remat.modes import NotingMode
from ds_memo.remat.op_policy import OpKind, kind_of
from ds_memo.remat.recipe import Gemm, SavedOp
from ds_memo.remat.tensors import as_tuple, storage_of, tensor_leaves


class Record(NotingMode):
    """Follow a recipe: hand each kept output to the engine as soon as it exists.

    Args:
        givens: returns the tensors that existed before the call. Called only if the layer writes in place to a tensor that
            depends on a left-out product.
        left_recipe: called when the call departs from the recipe.
    """

    def __init__(
        self, call: Call, givens: Callable[[], Iterable[torch.Tensor]] = tuple, left_recipe: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.call = call
        self._givens: Callable[[], Iterable[torch.Tensor]] | None = givens
        self._older: set[int] | None = None
        self._left_recipe = left_recipe
        self._next = 0
        self.packs = 0
        """Number of tensors that autograd has saved so far."""
        self._following = True
        self._awaits_bias: tuple[Gemm, torch.Tensor] | None = None
        self._left_out: dict[int, StorageWeakRef] = {}
        """Storages that depend on products which the replay leaves out. They are few: such products come last in a layer."""

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._givens = None  # the graph's hooks refer to this mode and would keep the arguments
        recipe = self.call.recipe
        complete = self._next == len(recipe.ops) and self.packs == recipe.packs and self._awaits_bias is None
        if exception[0] is None and self._following and not complete:
            self._leave()

    @property
    def next_op(self) -> int:
        """Index of the recipe's next op. Once the call has left its recipe, the end of what is left of that."""
        return self._next

    def _note(self, tensor: torch.Tensor) -> None:
        self.packs += 1
        if self._left_out and self._following and storage_of(tensor) in self._left_out:
            self._leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and has_inner_tensors(types):
            return NotImplemented
        kind = kind_of(func)
        if self._left_out and self._following:
            return self._watch_left_out(kind, func, args, kwargs or {})
        if kind is OpKind.PLAIN and self._awaits_bias is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._dispatch(kind, func, args, kwargs or {})

    def _watch_left_out(self, kind: OpKind, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an op while there are left-out products, whose values the replay will not have.

        Track what depends on them, and leave the recipe if the replay needs any of it.
        """
        if not self._reads_left_out((*args, *kwargs.values())):
            return self._dispatch(kind, func, args, kwargs)
        if op_policy.overwrites_all(func, args) and not self._reads_left_out((*args[1:], *kwargs.values())):
            del self._left_out[storage_of(args[0])]  # a dropout mask: empty_like(left-out product).bernoulli_()
            return self._dispatch(kind, func, args, kwargs)
        listed = kind is not OpKind.PLAIN and kind is not OpKind.MUTATES  # in the recipe: its output no longer depends on these
        next_op = self._next_op()
        if kind is OpKind.BATCHED and isinstance(next_op, SavedOp):
            listed = False  # a product without weights: it is in the recipe to be told from others
        if needs_right_operands(kind, func, args, kwargs, self._storages_before) or (
            listed and next_op is not None and next_op.recomputed  # the replay will compute it, or a part of it
        ):
            self._leave()
        out = self._dispatch(kind, func, args, kwargs)
        if not listed:
            self._leave_out(out)
            if kind is OpKind.MUTATES:
                self._leave_out(op_policy.written_tensors(func, args, kwargs))
        return out

    def _reads_left_out(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if storage_of(value) in self._left_out:
                    return True
            elif isinstance(value, (list, tuple)) and self._reads_left_out(value):
                return True
        return False

    def _next_op(self) -> Gemm | SavedOp | None:
        ops = self.call.recipe.ops
        return ops[self._next] if self._next < len(ops) else None

    def _storages_before(self) -> set[int]:
        """Return the storages that existed before the call."""
        if self._older is None:
            self._older = {storage_of(tensor) for tensor in self._givens()}
        return self._older

    def _leave_out(self, made: Any) -> None:
        for tensor in tensor_leaves(made):
            if (storage := storage_of(tensor)) and storage not in self._left_out:
                self._left_out[storage] = StorageWeakRef(tensor.untyped_storage())

    def _dispatch(self, kind: OpKind, func: Any, args: tuple, kwargs: dict) -> Any:
        if kind is OpKind.MUTATES:
            return self._change(func, args, kwargs)
        if kind is OpKind.PLAIN or not self._following:
            if self._awaits_bias is not None and func not in op_policy.VIEWS:
                self._leave()  # the product is read before its bias comes
            out = func(*args, **kwargs)
            if kind is OpKind.GEMM:
                self._count_unlisted(func, args, out)
            return out
        if kind is OpKind.GEMM or kind is OpKind.BATCHED:
            return self._multiply(kind, func, args, kwargs)
        out, state = noticing_draws(self.call.engine.device, func, args, kwargs)
        outputs = as_tuple(out)
        op = self._expect(func, outputs)
        if op is not None and op.kept is not None:
            self._keep_outputs(op, outputs, state)
        return out

    def _multiply(self, kind: OpKind, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        out = func(*args, **kwargs)
        op = self._expect(func, out)
        if op is None:
            if kind is OpKind.GEMM:
                self._count_unlisted(func, args, out)
        elif isinstance(op, Gemm):
            if self.call.before is not None:
                self.call.weights[self._next - 1] = self.call.weight_of(func, args)
            if not op.wanted:
                self._leave_out(out)
            if op.kept is not None:
                product = op_policy.as_rows(out)
                if op.biased:
                    self._awaits_bias = (op, product)
                else:
                    self.call.engine.keep(self.call.frame, op.kept, product)
        return out

    def _count_unlisted(self, func: Any, args: tuple, out: torch.Tensor) -> None:
        """Count a GEMM behind the point where the call left its recipe. The replay runs it again, and counts it too."""
        self.call.work.gemm_flops += op_policy.gemm_flops(func, args, out)

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function given to `keep_whole`. It is a saved op, like attention."""
        ran, state = noticing_draws(self.call.engine.device, self._watched, (fn, args, kwargs), {})
        self.packs += len(ran.call.saved)
        if not self._following:
            return ran.out
        if self._left_out and self._reads_left_out(ran.saved_arguments):
            self._leave()
            return ran.out
        op = self._expect(ran.call, ran.made)
        if op is not None and op.kept is not None:
            self._keep_outputs(op, ran.made, state)
        return ran.out

    def _keep_outputs(self, op: SavedOp, outputs: tuple[Any, ...], state: torch.Tensor | None) -> None:
        """Keep the outputs of the op that was just expected, and the generator's state after it if it drew random numbers."""
        index = self._next - 1
        self.call.keep_outputs(index, op, outputs)
        if state is not None:
            self.call.rng_after[index] = state

    def _change(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an op that writes in place: the bias of the GEMM before, or a change that kept tensors must not see."""
        if self._awaits_bias is not None:
            op, product = self._awaits_bias
            if op_policy.adds_bias_to(func, args, product) and not kwargs:
                self._awaits_bias = None
                out = func(*args)
                self.call.engine.keep(self.call.frame, op.kept, product)
                return out
            self._leave()
        for tensor in op_policy.written_tensors(func, args, kwargs):
            self.call.about_to_write(tensor)
        return func(*args, **kwargs)

    def _expect(self, func: Any, out: Any) -> Any:
        """Return the recipe's next op, a Gemm or SavedOp, if this call does the same; else leave the recipe, return None."""
        op = self._next_op()
        matches = op is not None and op.func == func and op.matches(out)
        if not matches or self._awaits_bias is not None:
            self._leave()
            return None
        self._next += 1
        return op

    def _leave(self) -> None:
        """Leave the recipe, from which this call departs. From here on keep nothing, and leave nothing out."""
        self._following = False
        followed = self._next - (self._awaits_bias is not None)  # a product without its bias was not kept
        self._awaits_bias = None
        self.call.recipe = self.call.recipe.without_shortcuts(followed)
        self._left_recipe()
