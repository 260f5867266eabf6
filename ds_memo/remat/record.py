"""Record: run a layer's forward by its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ds_memo.remat import op_policy
from ds_memo.remat.call import Call, needs_right_operands, noticing_draws
from ds_memo.remat.follower import PythonFollower, follow, leave_out_all, library
from ds_memo.remat.functions import has_inner_tensors
from ds_memo.remat.modes import NotingMode
from ds_memo.remat.op_policy import OpKind, kind_of
from ds_memo.remat.recipe import Gemm, SavedOp
from ds_memo.remat.tensors import as_tuple, storage_of


class Record(NotingMode):
    """Follow a recipe: hand each kept output to the engine as soon as it exists.

    Args:
        givens: returns the tensors that existed before the call. Called only if the layer writes in place to a tensor that
            depends on a left-out product.
        left_recipe: called when the call departs from the recipe.
        hooked: as :class:`NotingMode` takes it.
    """

    def __init__(
        self,
        call: Call,
        givens: Callable[[], Iterable[torch.Tensor]] = tuple,
        left_recipe: Callable[[], None] = lambda: None,
        hooked: bool = False,
    ) -> None:
        super().__init__(hooked)
        self.call = call
        self.at = follow(self, call, call.recipe, replays=False)
        self._givens: Callable[[], Iterable[torch.Tensor]] | None = givens
        self._older: set[int] | None = None
        self._left_recipe = left_recipe

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.ends(raised=exception[0] is not None)

    def ends(self, raised: bool) -> None:
        """End the run, which did less than the recipe if it raised."""
        self._givens = None  # the graph's hooks refer to this mode and would keep the arguments
        at, recipe = self.at, self.call.recipe
        complete = at.next == len(recipe.ops) and at.packs == recipe.packs and at.awaiting is None
        if not raised and at.following and not complete:
            self.leave()

    @property
    def packs(self) -> int:
        """Number of tensors that autograd has saved so far."""
        return self.at.packs

    @property
    def next_op(self) -> int:
        """Index of the recipe's next op. Once the call has left its recipe, the end of what is left of that."""
        return self.at.next

    def _note(self, tensor: torch.Tensor) -> None:
        self.at.packs += 1
        if self.at.leaves_any_out and self.at.following and self.at.leaves_out(storage_of(tensor)):
            self.leave()

    def _noting(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        return super()._noting(pack) if isinstance(self.at, PythonFollower) else library().noting(self, pack)

    def _note_in(self, saved: list[torch.Tensor] | None) -> None:
        super()._note_in(saved)
        self.at.noted = saved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and has_inner_tensors(types):
            return NotImplemented
        kind = kind_of(func)
        if self.at.leaves_any_out and self.at.following:
            return self._watch_left_out(kind, func, args, kwargs or {})
        if kind is OpKind.PLAIN and self.at.awaiting is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._dispatch(kind, func, args, kwargs or {})

    def _watch_left_out(self, kind: OpKind, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an op while there are left-out products, whose values the replay will not have.

        Track what depends on them, and leave the recipe if the replay needs any of it.
        """
        if not self._reads_left_out((*args, *kwargs.values())):
            return self._dispatch(kind, func, args, kwargs)
        if op_policy.overwrites_all(func, args) and not self._reads_left_out((*args[1:], *kwargs.values())):
            self.at.overwritten(storage_of(args[0]))  # a dropout mask: empty_like(left-out product).bernoulli_()
            return self._dispatch(kind, func, args, kwargs)
        listed = kind is not OpKind.PLAIN and kind is not OpKind.MUTATES  # in the recipe: its output no longer depends on these
        next_op = self._next_op()
        if kind is OpKind.BATCHED and isinstance(next_op, SavedOp):
            listed = False  # a product without weights: it is in the recipe to be told from others
        if needs_right_operands(kind, func, args, kwargs, self._storages_before) or (
            listed and next_op is not None and next_op.recomputed  # the replay will compute it, or a part of it
        ):
            self.leave()
        out = self._dispatch(kind, func, args, kwargs)
        if not listed:
            leave_out_all(self.at, out)
            if kind is OpKind.MUTATES:
                leave_out_all(self.at, op_policy.written_tensors(func, args, kwargs))
        return out

    def _reads_left_out(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if self.at.leaves_out(storage_of(value)):
                    return True
            elif isinstance(value, (list, tuple)) and self._reads_left_out(value):
                return True
        return False

    def _next_op(self) -> Gemm | SavedOp | None:
        ops = self.call.recipe.ops
        return ops[self.at.next] if self.at.next < len(ops) else None

    def _storages_before(self) -> set[int]:
        """Return the storages that existed before the call."""
        if self._older is None:
            self._older = {storage_of(tensor) for tensor in self._givens()}
        return self._older

    def _dispatch(self, kind: OpKind, func: Any, args: tuple, kwargs: dict) -> Any:
        if kind is OpKind.MUTATES:
            return self._change(func, args, kwargs)
        if kind is OpKind.PLAIN or not self.at.following:
            if self.at.awaiting is not None and func not in op_policy.VIEWS:
                self.leave()  # the product is read before its bias comes
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
                self.call.weights[self.at.next - 1] = self.call.weight_of(func, args)
            if not op.wanted:
                self.at.leave_out(out)
            if op.kept is not None:
                product = op_policy.as_rows(out)
                if op.biased:
                    self.at.awaiting = self.at.next - 1, product
                else:
                    self.call.engine.keep(self.call.frame, op.kept, product)
        return out

    def _count_unlisted(self, func: Any, args: tuple, out: torch.Tensor) -> None:
        """Count a GEMM behind the point where the call left its recipe. The replay runs it again, and counts it too."""
        self.call.work.gemm_flops += op_policy.gemm_flops(func, args, out)

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a function given to `keep_whole`. It is a saved op, like attention."""
        ran, state = noticing_draws(self.call.engine.device, self._watched, (fn, args, kwargs), {})
        self.at.packs += len(ran.call.saved)
        if not self.at.following:
            return ran.out
        if self.at.leaves_any_out and self._reads_left_out(ran.saved_arguments):
            self.leave()
            return ran.out
        op = self._expect(ran.call, ran.made)
        if op is not None and op.kept is not None:
            self._keep_outputs(op, ran.made, state)
        return ran.out

    def ran_saved(self, outputs: tuple[Any, ...], state: torch.Tensor | None) -> None:
        """Take the outputs of the recipe's next op, a SavedOp that C++ has run.

        Args:
            state: the generator's after it, if it drew random numbers.
        """
        op = self._expect(self.call.recipe.ops[self.at.next].func, outputs)
        if op is not None and op.kept is not None:
            self._keep_outputs(op, outputs, state)

    def _keep_outputs(self, op: SavedOp, outputs: tuple[Any, ...], state: torch.Tensor | None) -> None:
        """Keep the outputs of the op that was just expected, and the generator's state after it if it drew random numbers."""
        index = self.at.next - 1
        self.call.keep_outputs(index, op, outputs)
        if state is not None:
            self.call.rng_after[index] = state

    def _change(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an op that writes in place: the bias of the GEMM before, or a change that kept tensors must not see."""
        if self.at.awaiting is not None:
            index, product = self.at.awaiting
            if op_policy.adds_bias_to(func, args, product) and not kwargs:
                self.at.awaiting = None
                out = func(*args)
                self.call.engine.keep(self.call.frame, self.call.recipe.ops[index].kept, product)
                return out
            self.leave()
        for tensor in op_policy.written_tensors(func, args, kwargs):
            self.call.about_to_write(tensor)
        return func(*args, **kwargs)

    def _expect(self, func: Any, out: Any) -> Any:
        """Return the recipe's next op, a Gemm or SavedOp, if this call does the same; else leave the recipe, return None."""
        op = self._next_op()
        matches = op is not None and op.func == func and op.matches(out)
        if not matches or self.at.awaiting is not None:
            self.leave()
            return None
        self.at.next += 1
        return op

    def left_with(self, flops: int) -> None:
        """Leave the recipe at an op that C++ has run, a product of so many FLOPs that differs from the recipe's."""
        self.leave()
        self.call.work.gemm_flops += flops

    def leave(self) -> None:
        """Leave the recipe, from which this call departs. From here on keep nothing, and leave nothing out."""
        self.at.following = False
        followed = self.at.next - (self.at.awaiting is not None)  # a product without its bias was not kept
        self.at.awaiting = None
        self.call.recipe = self.call.recipe.without_shortcuts(followed)
        self._left_recipe()
