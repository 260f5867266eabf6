"""The first use of a layer class: find where its tokens lie, and check that it can run tile by tile.

A few tokens run as two tiles and a shorter third, and once whole. Outputs and gradients must agree, token by token: what mixes
tokens outside of attention (a convolution, a token shift, a recurrence) differs where tiles meet. Where a layer calls no
attention, caught convolutions and scans go on from tile to tile; ranks that share the sequence take both runs in the order of
tiles. Tiles choose experts as the whole did, if the scores of both choices are next to equal.

Hidden states are drawn from a seed, alike on all ranks. Ranks that share GEMMs all run the check: what depends on values or
time is refused at the end, after all collectives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_memo.remat.layer_state import unchanged
from ds_memo.remat.random_states import forked, own_states
from ds_memo.remat.shared_changes import Undo, for_good
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.remat.undo import Undoing
from ds_memo.sequence.catch_mixers import Carrying, calls_mixers
from ds_memo.sequence.mixers import WHOLE, fitting
from ds_memo.sequence.parts import parts_of, running_on
from ds_memo.sequence.striped import Striped
from ds_memo.spans import Span
from ds_memo.tiles.aliases import aliased, places_of
from ds_memo.tiles.attention_call import AttentionCall, CannotTile, Gathered, NoAttention, run_to_attention, run_with_attention
from ds_memo.tiles.check.choices import Choices
from ds_memo.tiles.check.compare import compare, refuse_others, tolerance_of
from ds_memo.tiles.check.refuse import (
    Watch,
    own_attention,
    refuse_draws_of_sequences,
    refuse_escapes,
    refuse_hidden_draws,
    refuse_writes,
    saying_why,
)
from ds_memo.tiles.check.token_dims import token_dims
from ds_memo.tiles.graph import refuse_other_gradients
from ds_memo.tiles.probe_result import AttentionShapes, Returned, Shapes, one_tensor, trained_of
from ds_memo.tiles.slices import Arguments, part

LEAST_TOKENS = 5
"""Shortest sequence that is cut: the check needs two tiles and a third."""
_TOKENS = 48
"""Length of the check's tiles."""
_TILES = 3
"""Tiles of one sequence in the check."""
_SCALE = 0.1
"""Standard deviation of the hidden states. Much larger ones would hide what a layer adds to them."""


def probe(
    module: nn.Module, forward: Callable[..., Any], arguments: Arguments, undo_with: Callable[[Undo], Any] = for_good
) -> Shapes:
    """Check a layer class on some tokens: if it can be cut at attention, and, if it calls none, as a chain of tiles.

    Args:
        forward: the layer's own.
        arguments: of the call.
        undo_with: see :func:`calls_mixers`.

    Raises:
        CannotTile: with the reason.
    """
    if named := sorted({type(part_of_it).__name__ for part_of_it in module.modules()} & WHOLE):  # they write to what they get
        raise CannotTile(f"its {named[0]} mixes tokens in code of its own")
    mixes = calls_mixers(module, undo_with)
    try:
        return _probe(module, forward, arguments, mixes, attends=True)
    except NoAttention as reason:
        if arguments.hidden.is_meta and not (mixes or _is_mlp(module)):  # no values would show that it mixes tokens
            raise
        if others := arguments.others:
            raise CannotTile(f"it gets a {others[0]}, which each tile would change. Set use_cache=False") from None
        try:
            return _probe(module, forward, arguments, mixes, attends=False)
        except CannotTile as why:
            raise (why if mixes else reason) from None


def _is_mlp(layer: nn.Module) -> bool:
    """Return True for a layer that has norms and MLPs or experts alone, by the names of Transformers' classes."""
    names = [type(part_of_it).__name__ for part_of_it in layer.children()]
    return all("Norm" in name or name.endswith(("MLP", "MoE")) for name in names)


def _probe(module: nn.Module, forward: Callable[..., Any], arguments: Arguments, mixes: bool, attends: bool) -> Shapes:
    """Check a layer class on some tokens, with the arguments of a call's first ones.

    Args:
        mixes: True if it calls convolutions or scans that are caught.
        attends: False if it calls no attention.
    """
    if len(arguments.differentiable()) < sum(leaf.requires_grad for leaf in arguments.tensors):
        raise CannotTile("an argument besides its hidden states needs a gradient, and is not cut")
    tokens = min(_TOKENS, (arguments.length - 1) // 2)
    length = min(arguments.length, 2 * tokens + max(1, tokens // 3))
    rows = min(arguments.batch, 2)
    drawn = torch.randn(rows, length, arguments.hidden.shape[2], generator=torch.Generator().manual_seed(0))
    x = (_SCALE * drawn).to(arguments.hidden).requires_grad_()  # row-major, as tiles of any layout are
    own_args, own_kwargs = arguments.first(x)
    own = Arguments(own_args, own_kwargs, like=arguments)
    cuts = [0, tokens, 2 * tokens, length]
    spans = [Span(slice(row, row + 1), slice(*ends)) for row in range(rows) for ends in itertools.pairwise(cuts)]
    trained = trained_of(module.parameters())
    arrived: list[int] = []
    run_one = functools.partial(_with_stand_in if attends else _as_it_is, saying_why(forward))
    run = functools.partial(run_one, own_args, own_kwargs)
    reasons: list[CannotTile] = []
    parts = parts_of(module) if mixes else None
    striped = None if parts is None else Striped(fitting(parts, length, type(module).__name__), tokens, rows)
    ordered = running_on(module, striped)
    with (
        ordered,
        forked(x.device),
        unchanged(module),
        aliased(places_of(module), [*trained.values()]) as parameters,
        torch.enable_grad(),
    ):
        leaves = [x, *own.differentiable(), *parameters]
        before = own_states(x.device)
        with Watch() as watch:
            try:
                run()
            except NoAttention as reason:
                raise (NoAttention(own_attention(watch.attends)) if watch.attends is not None else reason) from None
        draws = own_states(x.device) != before
        if watch.given:
            raise CannotTile("it draws random numbers from a generator of its own, which tiles would draw anew")
        refuse_writes(module, run, own.tensors)
        with _at_the_end(reasons):
            refuse_hidden_draws(run, x.device)
        with _at_the_end(reasons):
            refuse_escapes(functools.partial(_as_a_first_tile, run))
        if draws:
            refuse_draws_of_sequences(run_one, own, x, spans)
        with _evaluating(module) if draws else nullcontext():  # a tile draws other numbers than the whole
            to_attention = functools.partial(run_to_attention, saying_why(forward))
            want = to_attention(own_args, own_kwargs).leaves if attends else []
            choices = Choices(rows, length)
            with choices:
                expected = run()
            tiles = [own.tile(part(x, span, 1), span) for span in spans]
            attention: AttentionShapes | None = None
            got: list[Any] = []
            if attends:
                calls = _one_after_another(to_attention, tiles, spans, striped, choices)
                attention, got = _attention_shapes(calls, tiles, spans, x, parameters)
            outputs = _one_after_another(run_one, tiles, spans, striped, choices)
            output, found = _joined(outputs, x, spans)
            shapes = Shapes(output, attention, draws, mixes)
            if x.is_meta:  # no values to compare: only an estimate runs there
                return shapes
            with _at_the_end(reasons):
                refuse_others(want, got, tolerance_of(x))
            refuse_other_gradients([output.tensor(expected), *tensor_leaves(want)], leaves)
            for index, parameter in zip(trained, parameters, strict=True):
                parameter.register_hook(lambda _, index=index: arrived.append(index))
            with _at_the_end(reasons):
                compare(output.tensor(expected), found, leaves, cuts[1:-1], choices)
            if any(parameter.grad is not None for parameter in parameters):  # these gradients would be lost with the alias
                raise CannotTile("a backward inside its own adds to its parameters' gradients, as DeepSpeed's TiledMLP does")
    if reasons:
        raise reasons[0]
    return replace(shapes, arrivals=tuple(dict.fromkeys(arrived)))


@contextmanager
def _at_the_end(reasons: list[CannotTile]) -> Iterator[None]:
    """Have a reason to refuse the layer wait until the check is over."""
    try:
        yield
    except CannotTile as reason:
        reasons.append(reason)


def _with_stand_in(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a layer with a stand-in for attention: a rank may run it alone, and documents need not fit the tokens."""
    return run_with_attention(forward, args, kwargs, AttentionCall.stand_in)


def _as_it_is(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _as_a_first_tile(run: Callable[[], Any]) -> None:
    with Carrying(None):
        run()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [inner for inner in module.modules() if inner.training]

    def put_back() -> None:
        for inner in training:
            inner.training = True

    with Undoing(put_back):
        for inner in training:
            inner.training = False
        yield


def _one_after_another(
    run: Callable[..., Any], tiles: Sequence[tuple], spans: Sequence[Span], striped: Striped | None, choices: Choices
) -> list[Any]:
    """Run each tile from where the one before ended, with the whole's choices of experts.

    Args:
        tiles: their arguments.
    """
    results: list[Any] = []
    left: list[torch.Tensor] = []
    for (args, kwargs, _), span in zip(tiles, spans, strict=True):
        stretch = None if striped is None else striped.stretch(span)
        with choices.of_whole(span), Carrying(left if span.tokens.start else None, stretch) as carry:
            results.append(run(args, kwargs))
        left = carry.left
    return results


def _attention_shapes(
    calls: Sequence[AttentionCall],
    tiles: Sequence[tuple],
    spans: Sequence[Span],
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> tuple[AttentionShapes, list[Any]]:
    """Find where the tokens lie in the tiles' attention calls. Return that, and what attention gets for all tokens of `x`."""
    first, last = calls[0], calls[-1]
    try:
        dims = token_dims(first.leaves, last.leaves, (spans[0].size[1], spans[-1].size[1]))
    except ValueError as error:
        raise CannotTile(f"attention gets {error}") from None
    differentiable = tuple(i for i, leaf in enumerate(first.leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    if any(dims[i] is None and not any(first.leaves[i] is parameter for parameter in parameters) for i in differentiable):
        raise CannotTile("attention gets a tensor without tokens that needs a gradient and is no parameter")
    result = one_tensor("attention", first.stand_in(), first.result_dim())
    gathered = Gathered(dims, x.shape[0], x.shape[1], spans)
    for number, (call, (*_, cut_from)) in enumerate(zip(calls, tiles, strict=True)):
        call.cut_from = cut_from
        gathered.add(number, call)
    return AttentionShapes(tuple(dims), differentiable, result, first.is_sdpa), gathered.leaves


def _joined(outputs: Sequence[Any], x: torch.Tensor, spans: Sequence[Span]) -> tuple[Returned, torch.Tensor]:
    """Describe what tiles return, and return the output for all tokens."""
    output = one_tensor("it", outputs[0], 1)
    if any(output.tensor(tile).shape != part(x, span, 1).shape for tile, span in zip(outputs, spans, strict=True)):
        raise CannotTile("its output has another shape than its hidden states")
    of_rows = [[output.tensor(tile) for tile in outputs[i : i + _TILES]] for i in range(0, len(outputs), _TILES)]
    return output, torch.cat([torch.cat(of_row, 1) for of_row in of_rows])
