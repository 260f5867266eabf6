"""Attention of a layer in tiles: one call for all tokens, forward and backward.

Its frame keeps what its backward needs. As a rule that is a log-sum-exp: the kernel's output is attention's result, of which the
tiles' frames keep parts. Where the two differ (Ulysses trades heads among ranks), the frame keeps the kernel's output, and the
backward makes the result of it. If attention is recomputed, no frame keeps anything: the backward begins with another forward.

Groups of heads run backward one after another. Where ranks trade heads they run forward so, too: each group has a kernel's output
of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ds_memo.head_groups import ALL_HEADS, HeadGroup, head_groups
from ds_memo.placement import GEMMS_RECOMPUTED, Placement
from ds_memo.remat.analyse import Analyse
from ds_memo.remat.autocast import without_autocast
from ds_memo.remat.call import Call
from ds_memo.remat.functions import FunctionCall
from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.layer_host import LayerHost
from ds_memo.remat.random_states import drawing_from, own_states
from ds_memo.remat.recipe import Observed, ObservedSavedOp, make_recipe, remember
from ds_memo.remat.record import Record
from ds_memo.remat.tensors import storage_of, tensor_leaves
from ds_memo.sequence.parts import running_on
from ds_memo.sequence.striped import Striped
from ds_memo.swap.frame import Frame, lie_alike
from ds_memo.tiles.aliases import dropping
from ds_memo.tiles.attention_call import Gathered
from ds_memo.tiles.graph import refuse_other_gradients
from ds_memo.tiles.modes import SupplyHeads, may_split_heads
from ds_memo.tiles.probe_result import MATRIX, AttentionShapes
from ds_memo.tiles.recipes import AttentionRecipe, SharedOutput, TiledLayer
from ds_memo.tiles.weight_gradients import GradientSums


class TiledAttention:
    """The attention of one call of a tiled layer.

    Args:
        size: batch and length of the call.
        placement: of the call, before it is known whether the host has room.
        keeps_result: True if the tiles' frames keep the result, of which the kernel's output is a view if it is that.
        striped: the order of its tokens; None: that of the parts.
    """

    def __init__(
        self,
        tiled: TiledLayer,
        host: LayerHost,
        size: tuple[int, int],
        placement: Placement,
        keeps_result: bool,
        striped: Striped | None,
    ) -> None:
        self._tiled = tiled
        self._shapes: AttentionShapes = tiled.shapes.attention
        self._recipes = tiled.attention_recipes
        self._size = size
        self._groups = placement.tiles.head_groups  # type: ignore[union-attr]
        self._recomputed = placement.kind.recomputes_attention
        """True if nothing is kept."""
        self._whole = not (self._recomputed or keeps_result)
        """True if the frame keeps the kernel's output even if it is the result."""
        self._striped = striped
        self._host = host
        self._engine = host.engine
        self._call: Call | None = None
        self.shared: SharedOutput | None = None
        """The kernel's output if it is the result, and the frame does not keep it."""
        self.result_differs = False
        """True if attention's result is not its kernel's output, as its latest run showed."""
        self._ran_for = [ALL_HEADS]
        """Groups that the forward ran for."""
        self._first_ops: list[int] = []
        """Index of the first op of each of them in the recipe."""
        self._generators: list[list[tuple[Any, bytes]]] | None = None
        """States before each of them, if attention draws random numbers."""

    @property
    def frame(self) -> Frame | None:
        """None: nothing is kept."""
        return None if self._call is None else self._call.frame

    def begin(self, placement: Placement) -> None:
        frame = self._engine.begin(f"{self._tiled.layer.name}, attention", placement)
        self._call = Call(self._host, frame)

    # ---- forward

    def run(self, gathered: Gathered) -> torch.Tensor:
        """Run attention and return its result. Keep what its backward needs; nothing, if that runs it again."""
        if not self._recomputed:
            return self._run_and_keep(gathered)
        self._ran_for = self._groups_of_ranks(gathered)
        known = self._known(gathered)[1]
        if known is None and torch.is_grad_enabled():  # it is analysed: may it run in tiles?
            self.begin(GEMMS_RECOMPUTED)
            result = self._run_and_keep(gathered)
            self.release()
            return result
        if torch.is_grad_enabled():
            self._engine.let_go_but(0)
        self._generators = [] if known is not None and known.draws else None
        with torch.no_grad():
            return self._result_by_group(gathered, functools.partial(self._begins, None))

    def _run_and_keep(self, gathered: Gathered) -> torch.Tensor:
        """Run attention, keep what its backward needs, close the frame, and return the result."""
        self._ran_for = self._groups_of_ranks(gathered)
        key, known = self._known(gathered)
        self._engine.let_go_but(0)
        call = self._call
        assert call is not None
        call.recipe = known.recipe if known else None
        observed = Observed()
        mode: Analyse | Record
        if known:
            self._engine.adopt(call.frame, known.recipe.layout)
            mode = Record(call, functools.partial(tensor_leaves, gathered.leaves), self._recipes.clear)
        else:
            mode = Analyse(call, observed, tensor_leaves(gathered.leaves))
        self._generators = [] if known is None or known.draws else None
        self._first_ops = []
        try:
            with mode:
                result = self._result_by_group(gathered, functools.partial(self._begins, mode))
            if known is None:
                assert self._generators is not None
                known = self._make_recipe(observed, result, draws=self._generators[0] != own_states(self._engine.device))
                remember(self._recipes, key, known)
        except CannotTile as reason:
            self._tiled.attention_ran(str(reason))
            raise
        self._tiled.attention_ran("")
        if not known.draws:
            self._generators = None
        self.shared, self.result_differs = known.shared, known.result_differs
        self.supply(None)
        self._engine.end(call.frame)
        return result

    def _begins(self, mode: Analyse | Record | None, heads: HeadGroup) -> AbstractContextManager[Any]:
        """Note where a group's forward begins."""
        if self._generators is not None:
            self._generators.append(own_states(self._engine.device))
        if mode is not None:
            self._first_ops.append(mode.next_op)
        return nullcontext()

    def _supplying(self, heads: HeadGroup) -> SupplyHeads:
        assert self._call is not None
        return SupplyHeads(self._call, heads, self._first_ops[heads.number if heads.ranks > 1 else 0])

    def _result_by_group(self, gathered: Gathered, around: Callable[[HeadGroup], AbstractContextManager[Any]]) -> torch.Tensor:
        """Run attention for one group after another, each inside of what `around` returns, and return the result of all."""
        if len(self._ran_for) == 1:
            with around(ALL_HEADS):
                return self._attend(gathered, self._leaves(gathered, ALL_HEADS)).detach()
        whole: torch.Tensor | None = None
        refused: CannotTile | None = None
        for heads in self._ran_for:
            with around(heads):
                try:
                    result = self._attend(gathered, self._leaves(gathered, heads)).detach()
                except CannotTile as reason:  # other ranks run the other groups, and exchange tensors in each
                    refused = reason
                    continue
            if whole is None:
                whole = self._shapes.result.new(*self._size, result.dtype, result.device)
            heads.write(whole, 3 - self._shapes.result.dim, result)
            del result  # before the next group runs
        if refused is not None:
            raise refused
        assert whole is not None
        return whole

    def _leaves(self, gathered: Gathered, heads: HeadGroup) -> list[Any]:
        """Return attention's arguments for a group, those with gradients as leaves of a new graph."""
        leaves = list(gathered.leaves)
        for index in self._shapes.differentiable:
            leaves[index] = self._of(heads, leaves[index], self._shapes.arguments[index]).detach().requires_grad_()
        return leaves

    def _of(self, heads: HeadGroup, tensor: torch.Tensor, token_dim: int | None) -> torch.Tensor:
        """Return a group's part of a tensor (b, s, heads, d) or (b, heads, s, d); or all of one without heads."""
        return tensor if token_dim is None else heads.of(tensor, 3 - token_dim)

    def _known(self, gathered: Gathered) -> tuple[Any, AttentionRecipe | None]:
        """Return the key of such a call, and its recipe if there is one."""
        sizes = tuple((leaf.shape, leaf.dtype) for leaf in gathered.leaves if isinstance(leaf, torch.Tensor))
        key = sizes, self._tiled.module.training, self._whole, len(self._ran_for)
        return key, self._recipes.get(key)

    def _attend(self, gathered: Gathered, leaves: list[Any]) -> torch.Tensor:
        """Run attention, and refuse it if it reads a tensor that needs a gradient and is not among its arguments."""
        call = gathered.call
        assert call is not None
        of_forward = gathered.leaves if len(self._ran_for) == 1 else leaves  # the kernel that the forward took runs backward
        elements = max((of_forward[index].numel() for index in self._shapes.differentiable), default=0)
        with running_on(self._tiled.module, self._striped):
            found = self._host.with_kernel(self._tiled.layer, lambda *given: call.run([*given]), *leaves, elements=elements)
        result = self._shapes.result.only_tensor(found)
        refuse_other_gradients([result], tensor_leaves(leaves))
        return result

    def _make_recipe(self, observed: Observed, result: torch.Tensor, draws: bool) -> AttentionRecipe:
        """Make the recipe of a call that was analysed, and keep this call's tensors by it."""
        call = self._call
        assert call is not None
        if observed.notes.softmax and all(isinstance(op, ObservedSavedOp) and op.recomputed for op in observed.ops):
            raise CannotTile(MATRIX)
        if any(isinstance(getattr(op, "func", None), FunctionCall) for op in observed.ops):
            raise CannotTile("its attention is a keep_whole function")
        observed.note_hidden_writes()
        observed.close_over_inputs(all_rows_kept=True)
        shared, differs = None, True
        for index, op in enumerate(observed.ops):
            if isinstance(op, ObservedSavedOp) and not op.recomputed:
                for position, value in enumerate(op.outputs):
                    if torch.is_tensor(value) and self._is_result(value, result):
                        differs = False
                        if not self._whole:
                            shared = SharedOutput(index, position, tuple(value.shape), value.stride())
                            op.outputs = (*op.outputs[:position], None, *op.outputs[position + 1 :])
        recipe, tensors = make_recipe(observed, 1.0)
        self._host.note_attention(recipe)
        call.recipe = recipe
        call.keep_observed(observed, tensors)
        observed.forget()
        return AttentionRecipe(recipe, shared, differs, draws)

    def _is_result(self, value: torch.Tensor, result: torch.Tensor) -> bool:
        """Return True if an op's output is attention's result, in the memory order that the backward rebuilds."""
        if storage_of(value) != storage_of(result) or value.numel() != result.numel():
            return False
        again = self._shapes.result.new(*self._size, result.dtype, "meta")
        return value.storage_offset() == result.storage_offset() and lie_alike(result.shape, again.stride(), result.stride())

    # ---- backward

    def result(self, gathered: Gathered, then: Frame) -> torch.Tensor:
        """Return attention's result, which the tiles' frames do not keep, in the backward.

        Args:
            then: the frame to reload next.
        """
        with torch.enable_grad(), dropping(), self._drawing_again(self._ran_for[0]):
            call = self._call
            if call is None:
                self.begin(GEMMS_RECOMPUTED)
                result = self._run_and_keep(gathered)
                assert self._call is not None and self._call.recipe is not None
                self._host.work.attention_ops_recomputed += self._call.recipe.attention_ops // len(self._ran_for)
                return result
            self._engine.bring_back(call.frame, then=then)
            return self._result_by_group(gathered, self._supplying)

    def backward(self, sums: GradientSums, gathered: Gathered, d_result: torch.Tensor, then: Frame) -> None:
        """Run the backward, a group of heads at a time. Gradients of attention's arguments overwrite them.

        Args:
            then: the frame to reload next.
        """
        shapes, call = self._shapes, self._call
        assert call is not None
        if call.frame.state != "ready":
            self._engine.bring_back(call.frame, then=then)
        sums_of_keys: dict[int, torch.Tensor] = {}
        for heads in self._groups_backward(gathered):
            leaves = self._leaves(gathered, heads)
            inputs = [leaves[index] for index in shapes.differentiable]
            with torch.enable_grad(), self._drawing_again(heads), self._supplying(heads):
                result = get_gradient_edge(self._attend(gathered, leaves))  # its memory is of no use
            with without_autocast():
                found = list(torch.autograd.grad(result, inputs, self._of(heads, d_result, shapes.result.dim)))
            del result, leaves, inputs
            for number, index in enumerate(shapes.differentiable):
                whole, dim, gradient = gathered.leaves[index], shapes.arguments[index], found[number]
                found[number] = None  # each goes before the next is added up
                if dim is None:
                    sums.add(next(i for i, alias in enumerate(sums.parameters) if alias is whole), gradient)
                elif not heads.shares(whole, 3 - dim):
                    heads.write(whole, 3 - dim, gradient)
                else:  # the keys themselves are needed until the last group that shares them
                    add_to(sums_of_keys, index, gradient)
                    if heads.is_last_of_keys:
                        heads.write(whole, 3 - dim, sums_of_keys.pop(index))
        self._engine.replayed(call.frame)
        self.supply(None)

    def release(self) -> None:
        """Close the frame after a backward, also after one that raised."""
        if (frame := self.frame) is None:
            return
        if frame.state == "recording":
            self._engine.abort(frame)
        else:
            self._engine.give_up(frame)
        if self._recomputed:
            self._call = self.shared = None

    def supply(self, result: torch.Tensor | None) -> None:
        """Supply `result` as the kernel's output if the two share memory; None releases it."""
        call, where = self._call, self.shared
        if call is not None and where is not None:
            outputs = list(call.loose[where.op])
            outputs[where.position] = None if result is None else where.within(result)
            call.loose[where.op] = tuple(outputs)

    def _drawing_again(self, heads: HeadGroup) -> AbstractContextManager[None]:
        """Draw inside the block what the forward of a group drew."""
        return drawing_from(self._generators[heads.number], self._engine.device) if self._generators else nullcontext()

    def _groups_of_ranks(self, gathered: Gathered) -> list[HeadGroup]:
        """Return the groups that forward and backward run for: several only where ranks trade heads."""
        assert gathered.call is not None
        ranks = 1 if self._groups == 1 else gathered.call.ranks(gathered.leaves)
        return [ALL_HEADS] if ranks == 1 else self._divided(gathered, ranks)

    def _groups_backward(self, gathered: Gathered) -> list[HeadGroup]:
        """Return the groups that the backward runs for."""
        assert gathered.call is not None
        if self._groups == 1 or gathered.call.ranks(gathered.leaves) > 1:
            return self._ran_for
        if self.shared is None:
            return self._undivided("its kernel's output is not its result")
        if not may_split_heads(self._call):
            return self._undivided("its kernel runs for all heads at once")
        if self._generators is not None:
            return self._undivided("its dropout depends on the number of a head")
        return self._divided(gathered, 1)

    def _divided(self, gathered: Gathered, ranks: int) -> list[HeadGroup]:
        shapes = self._shapes
        tensors = [(gathered.leaves[index], shapes.arguments[index]) for index in shapes.differentiable]
        heads = [tensor.shape[3 - dim] if dim in (1, 2) and tensor.dim() == 4 else 0 for tensor, dim in tensors]
        others = [
            leaf for i, leaf in enumerate(gathered.leaves) if isinstance(leaf, torch.Tensor) and i not in shapes.differentiable
        ]
        if not all(heads) or len(shapes.result.shape) != 4:
            return self._undivided("its kernel runs for all heads at once")
        if any(leaf.dim() == 4 and leaf.shape[1] > 1 for leaf in others):
            return self._undivided("its mask differs among heads")
        try:
            return list(head_groups(self._groups, min(heads), max(heads), ranks))
        except ValueError as error:
            return self._undivided(str(error))

    def _undivided(self, why: str) -> list[HeadGroup]:
        self._host.warn(
            f"memo.head_groups: {self._groups} groups are not used in {type(self._tiled.module).__name__}'s attention: {why}"
        )
        return [ALL_HEADS]


def add_to(sums: dict[int, torch.Tensor], index: int, gradient: torch.Tensor) -> None:
    """Add to a sum, which is in float32 if gradients have less."""
    if index in sums:
        sums[index] += gradient
    else:
        sums[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
