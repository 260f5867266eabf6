"""Replay: run a layer a second time, just before its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.remat import op_policy
from ds_memo.remat.call import Call
from ds_memo.remat.follower import follow
from ds_memo.remat.functions import FunctionCall, has_inner_tensors, name_of, shapes_of, tensors_in
from ds_memo.remat.modes import Mode
from ds_memo.remat.op_policy import OpKind, kind_of
from ds_memo.remat.random_states import generator_of
from ds_memo.remat.recipe import Gemm, Recipe, SavedOp
from ds_memo.remat.tensors import cloned, detached


class Replay(Mode):
    """Supply what was kept, compute missing rows straight into their slots, leave out products that are never read.

    Args:
        recipe: for a part of the call (a section of a tile); None: the call's own, as it is then.
    """

    def __init__(self, call: Call, recipe: Recipe | None = None) -> None:
        super().__init__()
        self.call = call
        self._recipe = recipe

    def __enter__(self) -> Any:
        self.begins()
        return super().__enter__()

    def begins(self) -> None:
        """Have ready what is kept."""
        for argument in self.call.device_inputs:
            argument.check()
        if self.call.frame.state != "ready":  # no input of the layer was swapped
            self.call.begin_replay()
        recipe = self._recipe or self.call.recipe
        self.at = follow(self, self.call, recipe, replays=True)
        self._ops, notes, work = recipe.ops, recipe.notes, self.call.work
        work.attention_ops_recomputed += notes.softmax is not None and not recipe.attention_ops
        work.attention_ops_recomputed += notes.attention_ops
        work.gemm_flops_recomputed += notes.gemm_flops

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.ends()

    def ends(self) -> None:
        """Give back what was kept: from here on it lives as long as tensors that refer to it."""
        self.call.work.gemm_flops_recomputed += self.at.flops
        self.call.engine.replayed(self.call.frame)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and has_inner_tensors(types):
            return NotImplemented
        kind = kind_of(func)
        if kind is OpKind.MUTATES and self.at.awaiting is not None:
            return self._add_bias(func, args)
        if kind is OpKind.PLAIN or kind is OpKind.MUTATES:
            return func(*args, **kwargs) if kwargs else func(*args)
        index, op = self._take_next()
        if op is not None and op.func is not func:
            raise self._not_repeated(f"op {index} was {op.func}, now it is {func}")
        if isinstance(op, Gemm):
            self._compare(index, op, args)
            return self._gemm(index, op, args, kwargs or {})
        if op is None or op.kept is None:
            self.call.work.attention_ops_recomputed += kind is OpKind.ATTENTION
            out = func(*args, **(kwargs or {}))
            if kind is OpKind.GEMM:  # behind the point where the forward left its recipe
                self.call.work.gemm_flops_recomputed += op_policy.gemm_flops(func, args, out)
            return out
        outputs = self._supplied(index, op)
        return outputs if len(func._schema.returns) > 1 else outputs[0]

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Supply a `keep_whole` function's outputs without calling it. Autograd saves what it saved in the forward."""
        index, op = self._take_next()
        if op is not None and not (isinstance(op.func, FunctionCall) and op.func.name == name_of(fn)):
            raise self._not_repeated(f"op {index} was {op.func}, now it is {name_of(fn)}")
        if op is None or op.kept is None:
            self.call.work.attention_ops_recomputed += 1
            return fn(*args, **kwargs)
        arguments = tensors_in(args, kwargs)
        if op.func.arguments != shapes_of(arguments):
            raise self._not_repeated(f"op {index}, {op.func}, was called with tensors of other shapes or strides")
        made = self._supplied(index, op)
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)
        for tensor in op.func.rebuild_saved(arguments, made):
            pack(tensor)
        return op.func.rebuild_output(made)

    def _take_next(self) -> tuple[int, Any]:
        """Return the recipe's next op, a Gemm or SavedOp, and its index; None if the forward had left its recipe."""
        index, ops = self.at.next, self._ops
        self.at.next += 1
        return index, ops[index] if index < len(ops) else None

    def _compare(self, index: int, op: Gemm, args: tuple) -> None:
        """Compare a GEMM's operands with the forward's.

        Raises:
            MemoError: the product has another shape, or another parameter is its right operand.
        """
        if not op_policy.is_grouped(op.func) and (shape := op_policy.product_shape(op.func, args)) != op.shape:
            raise self._not_repeated(f"op {index}, {op.func}, made a tensor of shape {op.shape}, now {shape}")
        if index not in self.call.weights:
            return
        if (now := self.call.weight_of(op.func, args)) != (was := self.call.weights[index]):
            names = {None: "no parameter", **dict(enumerate(self.call.before.state.weight_names))}
            raise self._not_repeated(f"op {index}, {op.func}, multiplied by {names[was]}, now by {names[now]}")

    def _gemm(self, index: int, op: Gemm, args: tuple, kwargs: dict) -> torch.Tensor:
        if not op.wanted:
            return op_policy.empty_output(op.func, args, op.shape, op.dtype)
        m, rows = op.m, op.rows
        if m:
            self.call.work.gemm_flops_recomputed += op.flops * (m - rows) // m
        if op.kept is None:
            return op.func(*args, **kwargs)
        out = self.call.frame.tensor(op.kept)
        if rows < m:
            op_policy.compute_rows(op.func, args, kwargs, rows, out)
        if op.biased:
            self.at.awaiting = index, out.detach()
        return out.view(op.shape)

    def _add_bias(self, func: Any, args: tuple) -> torch.Tensor:
        """Add the in-place bias of the GEMM before to its computed rows. Stored rows have it already."""
        (index, product), self.at.awaiting = self.at.awaiting, None
        if not op_policy.adds_bias_to(func, args, product):
            raise self._not_repeated(f"{func} came where a bias was added in place")
        product[self._ops[index].rows :].add_(args[1])
        return args[0]

    def supplied(self, index: int) -> tuple[Any, ...]:
        """Return the outputs of the saved op at `index`, for C++."""
        return self._supplied(index, self._ops[index])  # type: ignore[arg-type]

    def _supplied(self, index: int, op: SavedOp) -> tuple[Any, ...]:
        """Return the outputs of the saved op at `index`, and set the generator's state after it."""
        state = self.call.rng_after.get(index)
        if state is not None:
            generator_of(self.call.engine.device).set_state(state)
        loose, own = self.call.loose[index], cloned if index in self.call.altered else detached
        return tuple(
            own(value) if kept is None else self.call.frame.tensor(kept) for kept, value in zip(op.kept, loose, strict=True)
        )

    def _not_repeated(self, what: str) -> MemoError:
        return MemoError(
            f"layer {self.call.frame.name} did not repeat its forward: {what}. "
            "Make it do the same work twice, as under torch.utils.checkpoint."
        )
