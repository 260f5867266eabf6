"""The dispatch modes of a tile. They extend those of a whole layer by what lies before and behind attention.

A tile's recipe lists the ops of a whole run: those before attention (its pre), then those behind it (its post). The forward runs
the pre once up to attention, and once more, dead, on the way to the post.

A mode doubles the host time of each op. So it is on the stack only during parts, the pre or the post, of which it supplies,
keeps or leaves out something. The dead pre is always compared with the recipe, and so is the pre in its own backward.
"""

from __future__ import annotations

from typing import Any

from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ds_memo.head_groups import HeadGroup
from ds_memo.remat import op_policy
from ds_memo.remat.call import Call
from ds_memo.remat.follower import follow
from ds_memo.remat.functions import has_inner_tensors
from ds_memo.remat.modes import Mode
from ds_memo.remat.op_policy import OpKind, kind_of
from ds_memo.remat.recipe import Gemm, SavedOp
from ds_memo.remat.record import Record
from ds_memo.remat.replay import Replay


class RecordPre(Record):
    """Run a tile up to attention, by its recipe."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.followed = False
        """True, once the run is over, if it did what the recipe says."""

    def ends(self, raised: bool) -> None:
        pre = len(self.call.recipe.pre)
        if not raised and self.at.following and (self.at.next != pre or self.at.awaiting is not None):
            self.at.next = min(self.at.next, pre)  # an op that looks like the post's first is in the recipe's post
            self.leave()
        self.followed = self.at.following
        self.at.following = False  # the recipe goes on behind attention
        super().ends(raised)


class Switched(Mode):
    """A mode that is taken off the stack, or put there, where attention is reached."""

    def __enter__(self) -> Any:
        self._depth = _len_torch_dispatch_stack()
        self._is_on = True
        return super().__enter__()

    def _switch(self, on: bool) -> None:
        """Put the mode on the stack or take it off. Modes that the layer has entered stay above its place."""
        if on is self._is_on:
            return
        above = _get_current_dispatch_mode_stack()[self._depth + self._is_on :]
        for _ in range(len(above) + self._is_on):
            _pop_torch_dispatch_stack(None)
        for mode in (*(self,) * on, *above):
            _push_on_torch_dispatch_stack(mode)
        self._is_on = on


class LeftRecipe(BaseException):
    """Ends a tile's run that departs from the recipe where products are left out. No `except Exception` of a layer takes it."""


class RecordPost(Switched, Record):
    """Run a tile behind attention, by its recipe. Of the pre's ops it supplies what was chosen and computes what is needed.

    If nothing of the post is kept, it only counts there what autograd saves.

    Raises:
        LeftRecipe: the run must be repeated without this mode.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._records = call.recipe.records_post
        self._pre = call.recipe.dead_pre.ops
        self._in_pre = bool(self._pre)
        if self._in_pre:
            self.at = follow(self, call, call.recipe.dead_pre, replays=True)

    def __enter__(self) -> Any:
        super().__enter__()
        if not self._in_pre:
            self._switch(self._records)
        return self

    def attention_reached(self) -> None:
        if self.at.next != len(self._pre):
            self.leave()
        packs = self.at.packs
        self.at = follow(self, self.call, self.call.recipe, replays=False)
        self.at.next, self.at.packs = len(self._pre), packs
        self._in_pre = False
        self._switch(self._records)

    def ends(self, raised: bool) -> None:
        self.at.following &= self._records
        super().ends(raised)
        if not raised and not self._records and self.packs != self.call.recipe.packs:
            super().leave()
            if self._pre:  # the post may have read a product that was left out
                raise LeftRecipe

    def leave(self) -> None:
        super().leave()
        if self._in_pre:
            raise LeftRecipe

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self._in_pre:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if types and has_inner_tensors(types):
            return NotImplemented
        kind = kind_of(func)
        if kind is OpKind.PLAIN or kind is OpKind.MUTATES:
            return func(*args, **(kwargs or {}))
        index = self.at.next
        op: Any = self._pre[index] if index < len(self._pre) else None
        if op is None or op.func is not func or (isinstance(op, Gemm) and op.shape != op_policy.product_shape(func, args)):
            self.leave()
        self.at.next += 1
        if isinstance(op, Gemm) and not op.wanted:
            return op_policy.empty_output(func, args, op.shape, op.dtype)
        if isinstance(op, Gemm) or op.kept is None:
            return func(*args, **(kwargs or {}))
        outputs = self.supplied(index)
        return outputs if len(func._schema.returns) > 1 else outputs[0]

    def supplied(self, index: int) -> tuple[Any, ...]:
        """Return the outputs of the pre's saved op at `index`, which are still on the device."""
        op: Any = self._pre[index]
        return tuple(
            value if kept is None else self.call.frame.device[kept.index].detach()
            for kept, value in zip(op.kept, self.call.loose[index], strict=True)
        )


class ReplayPost(Switched, Replay):
    """Replay a tile, but compute its pre as without a mode. The recipe computes all of that."""

    def __enter__(self) -> Any:
        super().__enter__()
        self._switch(False)
        return self

    def attention_reached(self) -> None:
        self.at.next = len(self.call.recipe.pre)
        self.call.work.gemm_flops_recomputed += self.call.recipe.pre_flops
        self._switch(True)


class SupplyHeads(Replay):
    """Replay attention for a group of heads: supply that group's part of what was kept.

    Where ranks trade heads, the forward ran for one group after another too, and each has ops of its own.

    Args:
        first_op: of the group, in the recipe.
    """

    def __init__(self, call: Call, heads: HeadGroup, first_op: int) -> None:
        super().__init__(call)
        self._heads = heads
        self._first_op = first_op

    def __enter__(self) -> SupplyHeads:
        super().__enter__()
        self.at.next = self._first_op
        return self

    def _supplied(self, index: int, op: Any) -> tuple[Any, ...]:
        outputs = super()._supplied(index, op)
        if self._heads.groups == 1 or self._heads.ranks > 1:
            return outputs
        (out, log_sum_exp, *others), dims = outputs, HEAD_DIMS[op.func.name()]
        # Kernels read the log-sum-exp without its strides.
        of_out, of_log_sum_exp = (dim % x.dim() for dim, x in zip(dims, (out, log_sum_exp), strict=True))
        return (self._heads.of(out, of_out), self._heads.of(log_sum_exp, of_log_sum_exp).contiguous(), *others)

    def ends(self) -> None:
        """Leave the frame as it is: it is released after the last group."""


HEAD_DIMS = {
    "ds_memo::attention": (1, 1),
    "ds_memo::cudnn_attention": (1, 1),
    "ds_memo::sequence_attention": (2, 1),
    "aten::_scaled_dot_product_flash_attention": (1, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (1, 1),
    "aten::_scaled_dot_product_cudnn_attention": (1, 1),
    "flash_attn::_flash_attn_forward": (2, 1),
    "flash_attn::_flash_attn_varlen_forward": (1, 0),
    **dict.fromkeys(("aten::_flash_attention_forward", "flash_attn_3::_flash_attn_forward", "flash_attn_3::fwd"), (-2, -2)),
}
"""Dimension of the heads in an attention op's outputs: the output, the log-sum-exp. Ops that are missing run for all heads. The
last ones take rows of a batch, or rows end to end, which have a dimension less in both."""


def may_split_heads(call: Call) -> bool:
    ops = [op for op in call.recipe.ops if not (isinstance(op, SavedOp) and op.func in op_policy.BATCHED)]
    return bool(ops) and all(
        isinstance(op, SavedOp) and op.kept is not None and isinstance(op.func, OpOverload) and op.func.name() in HEAD_DIMS
        for op in ops
    )
