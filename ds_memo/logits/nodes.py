"""The graph of lazy logits: autograd's own nodes, whose backward computes nothing until it comes to the head.

    hidden, parameters ── OutputHead ── Derive … ── Reduce or Sum ── loss

Every lazy tensor is the output of a real node, so ``detach``, ``no_grad``, hooks, ZeRO-3's functions around modules, DDP's walk
through the graph and reentrant checkpoints need no special case. The gradient of logits is a `LazyGradient`, a list of terms.
Autograd adds those up, and OutputHead's backward runs one loop over tiles for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function

from ds_memo.errors import MemoError
from ds_memo.logits.lazy_value import (
    CHANGED,
    HeadCall,
    KeptOperand,
    LazyValue,
    PerRow,
    RowTile,
    as_they_are,
    as_tuple,
    refuse_if,
    results,
    sums_of,
)
from ds_memo.tiles.weight_gradients import GradientSums, times

NO_WHOLE_GRADIENT = (
    "{} of the gradient of lazy logits, which is never whole: give the hook a scalar factor at most, or set "
    'memo.kernels.cross_entropy to "whole"'
)


_SAME = 1e-3
"""Most relative difference of sums in a backward: a checkpoint around the head may round hidden states otherwise."""


@dataclass(frozen=True)
class Term:
    """A gradient of results by row: what the logits' gradient is computed from."""

    content: LazyValue
    fn: PerRow
    arguments: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]

    def scaled(self, factor: Any) -> Term:
        return replace(self, gradients=tuple(None if gradient is None else gradient * factor for gradient in self.gradients))


@dataclass(frozen=True)
class Precomputed:
    """A term of one factor for all rows, whose gradients were computed with its results, but for the factor."""

    term: Term
    gradients: list[HeadGradients]
    """One, until a backward has used it up. Another backward through the same graph computes the term."""
    factor: torch.Tensor

    def scaled(self, factor: Any) -> Precomputed:
        return replace(self, factor=self.factor * factor)

    def as_term(self) -> Term:
        return replace(self.term, gradients=(self.factor.expand(self.term.content.rows),))


class LazyGradient(torch.Tensor):
    """Gradient of lazy logits: terms that are not computed yet. Autograd adds such gradients, hooks may scale them."""

    content: LazyValue
    terms: list[Term | Precomputed]

    @staticmethod
    def __new__(cls, content: LazyValue, terms: list[Term | Precomputed]) -> LazyGradient:
        self = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype, device=content.device)
        self.content, self.terms = content, terms
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyGradient({tuple(self.shape)}, terms={len(self.terms)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, gradient = func.overloadpacket.__name__, next(value for value in args if isinstance(value, cls))
        if name in ("detach", "alias", "clone", "view_as", "_to_copy"):
            return cls(gradient.content, gradient.terms)
        if name == "add" and not kwargs:
            return cls(gradient.content, terms_of(args[0], gradient.content) + terms_of(args[1], gradient.content))
        if name in ("mul", "div") and args[0] is gradient and not (torch.is_tensor(args[1]) and args[1].numel() > 1):
            factor = args[1] if name == "mul" else 1 / args[1]
            return cls(gradient.content, [term.scaled(factor) for term in gradient.terms])
        if name == "isnan":  # detect_anomaly asks each gradient
            known = [(term.factor,) if isinstance(term, Precomputed) else term.gradients for term in gradient.terms]
            return torch.stack([each.isnan().any() for gradients in known for each in gradients if each is not None])
        raise MemoError(NO_WHOLE_GRADIENT.format(func))

    def tolist(self) -> Any:
        raise MemoError(NO_WHOLE_GRADIENT.format("tolist"))


def terms_of(gradient: torch.Tensor, content: LazyValue) -> list[Term | Precomputed]:
    """Return the terms of a gradient of this content; a dense one, of logits that were made whole, is one term."""
    if isinstance(gradient, LazyGradient):
        return gradient.terms
    if content.moved:
        gradient = gradient.movedim(1, -1)
    return [Term(content, identity, (), (gradient.reshape(content.rows, content.vocabulary),))]


def identity(values: torch.Tensor) -> torch.Tensor:
    return values


class HeadGradients:
    """Gradients of one call's hidden states and of the head's parameters, summed over tiles.

    Args:
        source: the call.
        hidden_NH: its hidden states.
        wanted: True for each input of OutputHead, the hidden states first, that needs a gradient.
    """

    def __init__(self, head_call: HeadCall, hidden_NH: torch.Tensor, wanted: Sequence[bool]) -> None:
        self._head_call = head_call
        self._d_hidden_NH = torch.zeros_like(hidden_NH) if wanted[0] else None
        self._trained = [index for index, needed in enumerate(wanted[1:]) if needed]
        self._inputs = len(wanted)
        self._sums = GradientSums([])

    def add(self, hidden_NH: torch.Tensor, values: Sequence[torch.Tensor], terms: Sequence[Term]) -> None:
        """Add the gradients of terms with the same rows, in one loop over tiles.

        Args:
            values: of the head's parameters.
        """
        head_call, content, d_hidden_NH = self._head_call, terms[0].content, self._d_hidden_NH
        aliases = [value.detach().requires_grad_(index in self._trained) for index, value in enumerate(values)]
        self._sums.follow([aliases[index] for index in self._trained])
        index = content.maps[0].reshape(-1)
        with torch.enable_grad(), _own_saved_tensors(), head_call.with_parameters(aliases):
            for span in content.tiles():
                hidden = hidden_NH[index[span]].requires_grad_(d_hidden_NH is not None)
                known = {as_they_are: head_call.forward(hidden)}
                outputs, gradients = [], []
                for term in terms:
                    values_now = RowTile(term.content, span, known).values(term.content.expression)
                    parts = as_tuple(term.fn(values_now, *(argument[span] for argument in term.arguments)))
                    for part, gradient in zip(parts, term.gradients, strict=True):
                        if gradient is not None and part.requires_grad:
                            of_tile = gradient[span]
                            if type(of_tile) is not torch.Tensor:  # lazy logits that an autograd.Function had saved
                                of_tile = of_tile.compute("a gradient")  # type: ignore[attr-defined]
                            outputs.append(part)
                            gradients.append(of_tile.to(part.dtype))
                if not outputs:
                    continue
                found = self._sums.backward(outputs, gradients, [] if d_hidden_NH is None else [hidden])
                if d_hidden_NH is not None and found[0] is not None:
                    d_hidden_NH.index_add_(0, index[span], found[0].to(d_hidden_NH.dtype))

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply by a scalar, in float32: in bfloat16 the factor itself would be off by up to 0.4 %. Zero stays zero."""
        self._sums.scale(factor)
        for part in () if self._d_hidden_NH is None else self._d_hidden_NH.split(self._head_call.tile_rows):
            part.copy_(times(part.to(torch.promote_types(part.dtype, torch.float32)), factor))

    def take(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of OutputHead's inputs, and forget those of the parameters."""
        taken = [self._d_hidden_NH, *[None] * (self._inputs - 1)]
        for index, gradient in zip(self._trained, self._sums.take(), strict=True):
            taken[index + 1] = gradient
        return tuple(taken)


def _own_saved_tensors() -> AbstractContextManager:
    """Keep what a tile's graph saves from hooks around the forward (a checkpoint, an offload), which mean the outer graph."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(identity, identity)


class OutputHead(Function):
    """The head's call: its backward is the one loop over tiles."""

    @staticmethod
    def forward(ctx: Any, make: Any, content: LazyValue, hidden_NH: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.content = content
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, *parameters)
        return make(content)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise MemoError(
                "a gradient of a gradient (create_graph=True) was asked for, which lazy logits cannot give. Set "
                'memo.kernels.cross_entropy to "whole"'
            )
        try:
            hidden_NH, *parameters = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace" not in str(error):
                raise
            raise MemoError(CHANGED.format("hidden states or weights")) from error
        hidden_NH = hidden_NH.detach()
        by_rows: dict[int, list[Term]] = {}
        sums = None
        for term in terms_of(gradient, ctx.content):
            if isinstance(term, Precomputed) and sums is None and term.gradients:
                sums = term.gradients.pop()
                sums.scale(term.factor)
                continue
            term = term.as_term() if isinstance(term, Precomputed) else term
            by_rows.setdefault(id(term.content.maps[0]), []).append(term)
        if sums is None:
            sums = HeadGradients(ctx.content.head_call, hidden_NH, ctx.needs_input_grad[2:])
        if by_rows:
            then, now = ctx.content.head_call.sums, sums_of(hidden_NH, parameters)
            changed = ((now - then).abs() > _SAME * then[:, 1:]).any()
            refuse_if(changed, MemoError(CHANGED.format("hidden states or weights")))
        for terms in by_rows.values():
            sums.add(hidden_NH, parameters, terms)
        return None, None, *sums.take()


class Derive(Function):
    """An op by row, or a choice of rows: lazy logits to lazy logits. Its terms are relative to the head already."""

    @staticmethod
    def forward(ctx: Any, make: Any, logits: Any) -> torch.Tensor:
        made = make()
        if made is logits:  # changed in place
            ctx.mark_dirty(logits)
        ctx.before, ctx.after = logits.content, made.content
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None, None if gradient is None else LazyGradient(ctx.before, terms_of(gradient, ctx.after))


class Reduce(Function):
    """Results by row of ``fn(values, *arguments)``. Nothing is saved: the backward computes the tile again."""

    @staticmethod
    def forward(ctx: Any, logits: Any, fn: PerRow, arguments: tuple, device: torch.device | None) -> tuple[torch.Tensor, ...]:
        content = logits.content
        ctx.content, ctx.fn, ctx.arguments = content, fn, [KeptOperand(argument, content.few) for argument in arguments]
        ctx.set_materialize_grads(False)
        found = results(logits.content, logits.inputs, fn, arguments, device)
        ctx.mark_non_differentiable(*(part for part in found if not part.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        there = tuple(None if gradient is None else gradient.to(ctx.content.device) for gradient in gradients)
        arguments = tuple(kept.get() for kept in ctx.arguments)
        return LazyGradient(ctx.content, [Term(ctx.content, ctx.fn, arguments, there)]), None, None, None


class Whole(Function):
    """All values of logits, which share memory with `values`."""

    @staticmethod
    def forward(ctx: Any, logits: Any, content: LazyValue, values: torch.Tensor) -> torch.Tensor:
        ctx.content = content
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return LazyGradient(ctx.content, terms_of(gradient, ctx.content)), None, None


class Follow(Function):
    """Make the gradients that come to lazy logits themselves, as from an autograd.Function, those of the real tensor."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(logits)
        ctx.version, ctx.mark = real._version, real.detach()
        ctx.mark.data = real.new_empty(0)  # counts the same changes, and holds no memory
        ctx.set_materialize_grads(False)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None and ctx.mark._version != ctx.version:
            raise MemoError("an autograd.Function was given lazy logits that became real and were then changed. Give it a clone")
        return None, gradient


class Sum(Function):
    """Sum over all rows of ``fn(values, *arguments)``, one number each, in float32 or wider.

    The gradient of every row is the same factor, so the forward computes all gradients but for it: each tile's logits are
    computed once.
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, fn: PerRow, arguments: tuple) -> torch.Tensor:
        content, inputs, sums = logits.content, logits.inputs, []
        inputs.check()
        content.check()

        def noted(values: torch.Tensor, *of_rows: torch.Tensor) -> torch.Tensor:
            found = fn(values, *of_rows)
            sums.append(found.detach().sum())
            return found

        ones = torch.ones((), device=content.device).expand(content.rows)
        gradients = HeadGradients(content.head_call, inputs.hidden_NH, content.head_call.wanted)
        gradients.add(inputs.hidden_NH, inputs.values(), [Term(content, noted, arguments, (ones,))])
        ctx.known = Precomputed(Term(content, fn, arguments, ()), [gradients], ones)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return LazyGradient(ctx.known.term.content, [replace(ctx.known, factor=gradient)]), None, None
