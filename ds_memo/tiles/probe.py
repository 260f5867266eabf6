"""The first use of a layer class: find where its tokens lie, and check that it can run tile by tile.

A few tokens run as two tiles and a shorter third, and once whole. Outputs and gradients must agree, token by token: what mixes
tokens outside of attention (a convolution, a token shift, a recurrence) differs where tiles meet. Where a layer calls no
attention, caught convolutions and scans go on from tile to tile; ranks that share the sequence take both runs in the order of
tiles. Tiles choose experts as the whole did, if the scores of both choices are next to equal.

Hidden states are drawn from a seed, alike on all ranks. Ranks that share GEMMs run the check together: what depends on values or
time is refused at the end, after all collectives.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ds_memo.distributed.agree import world_size
from ds_memo.distributed.topology import gathers_by_module
from ds_memo.errors import MemoError
from ds_memo.remat.layer_state import LayerState, unchanged
from ds_memo.remat.op_policy import materialises_scores
from ds_memo.remat.random_states import KeepsGiven, forked, named_states, own_states
from ds_memo.remat.tensors import storage_of, tensor_leaves
from ds_memo.remat.undo import Undoing
from ds_memo.sequence.catch_mixers import calls_mixers, carrying
from ds_memo.sequence.mixers import WHOLE, fitting
from ds_memo.sequence.parts import parts_of, running_on
from ds_memo.sequence.striped import Striped
from ds_memo.spans import Span
from ds_memo.tiles.around import aliased, autocast_now, dropping
from ds_memo.tiles.attention_call import AttentionCall, CannotTile, Gathered, NoAttention, run_to_attention, run_with_attention
from ds_memo.tiles.choices import Choices
from ds_memo.tiles.slices import Arguments, hidden_states, part, token_dims
from ds_memo.tiles.weight_gradients import graph_of

LEAST_TOKENS = 5
"""Shortest sequence that is cut: the check needs two tiles and a third."""
_TOKENS = 48
"""Length of the check's tiles."""
_TILES = 3
"""Tiles of one sequence in the check."""
_LET_GO_S = 1.0
"""Time for gloo's thread to let go of the tensors of a collective (AutoTP). The caller goes on a few ms before that."""
BY_MODULE = "ZeRO-3 gathers its parameters module by module. Let ds_memo.initialize make the engine"
"""Why a layer runs whole that was attached without its engine."""
MATRIX = "its attention makes a matrix of tokens × tokens"
_SCALE = 0.1
"""Standard deviation of the hidden states. Much larger ones would hide what a layer adds to them."""
_NEAR = 4
"""Tokens on each side of a cut, where what mixes tokens shows first."""
_MOST_FLIPPED = 0.05
"""Share of tokens that a GEMM of another size may flip: an activation's input goes to the other side of its kink (ReLU), which
shows in gradients alone."""


@dataclass(frozen=True)
class Returned:
    """A function's result, of which one leaf is a tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """None in the tensor's place."""
    index: int
    """Position of the tensor among the leaves."""
    dim: int
    """Dimension of its tokens."""
    shape: tuple[int, ...]
    """Shape of the tensor for one sequence and some tokens."""

    def tensor(self, result: Any) -> torch.Tensor:
        return tree_leaves(result)[self.index]

    def new(self, rows: int, tokens: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return memory for the tensor, all of a token side by side: (b, tokens, …)."""
        others = [size for i, size in enumerate(self.shape) if i not in (0, self.dim)]
        return torch.empty(rows, tokens, *others, dtype=dtype, device=device).movedim(1, self.dim)

    @property
    def elements_per_token(self) -> int:
        return math.prod(self.shape) // self.shape[self.dim]

    def only_tensor(self, result: Any) -> torch.Tensor:
        """Return the tensor of a result, if it holds no other. Ulysses returns heads and their dimension as one.

        Raises:
            CannotTile: it holds another, or of another shape.
        """
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        joined = len(tensors) == 1 and tensors[0].dim() == 3 and len(self.shape) == 4 and self.dim == 1
        if joined and tensors[0].shape[2] % self.shape[3] == 0:  # there may be fewer heads
            return tensors[0].unflatten(2, (-1, self.shape[3]))
        if any(tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3] for tensor in tensors[1:]):
            raise CannotTile(MATRIX)
        if len(tensors) != 1 or tensors[0].dim() != len(self.shape):
            raise CannotTile(f"attention returns tensors of the shapes {[tuple(tensor.shape) for tensor in tensors]}")
        return tensors[0]

    def of(self, tensor: torch.Tensor) -> Any:
        return tree_unflatten([tensor if i == self.index else leaf for i, leaf in enumerate(self.leaves)], self.spec)


@dataclass(frozen=True)
class Shapes:
    """What the check of a layer class finds. This alone: it calls no attention, and its tiles are a chain."""

    output: Returned
    """What the layer returns."""
    draws: bool
    """True if the layer draws random numbers."""
    arrivals: tuple[int, ...] = field(default=(), kw_only=True)
    """Indices of the layer's parameters in the order in which a backward of the whole layer comes to their gradients."""
    mixes: bool = field(default=False, kw_only=True)
    """True if it has functions that carry something from tile to tile."""


@dataclass(frozen=True)
class AttentionShapes(Shapes):
    """Where the tokens lie in what a layer class gives to attention and gets from it."""

    arguments: tuple[int | None, ...]
    """By leaf of attention's arguments, the dimension of its tokens."""
    differentiable: tuple[int, ...]
    """The leaves that need a gradient."""
    result: Returned
    """What attention returns."""
    sdpa: bool
    """True if it calls F.scaled_dot_product_attention itself."""


def probe(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Shapes:
    """Check a layer class on some tokens: if it can be cut at attention, and, if it calls none, as a chain of tiles.

    Args:
        forward: the layer's own.
        args, kwargs: of the call.

    Raises:
        CannotTile: with the reason.
    """
    mixes = calls_mixers(module)
    try:
        return _probe(module, forward, args, kwargs, mixes, chained=False)
    except NoAttention as reason:
        if named := sorted({type(part_of_it).__name__ for part_of_it in module.modules()} & WHOLE):
            raise CannotTile(f"its {named[0]} mixes tokens in code of its own") from None
        if hidden_states(args, kwargs).is_meta and not (mixes or _is_mlp(module)):  # no values would show that it mixes tokens
            raise
        if others := Arguments(args, kwargs).others:
            raise CannotTile(f"it gets a {others[0]}, which each tile would change. Set use_cache=False") from None
        try:
            return _probe(module, forward, args, kwargs, mixes, chained=True)
        except CannotTile as why:
            raise (why if mixes else reason) from None


def _is_mlp(layer: nn.Module) -> bool:
    """Return True for a layer that has norms and MLPs or experts alone, by the names of Transformers' classes."""
    names = [type(part_of_it).__name__ for part_of_it in layer.children()]
    return all("Norm" in name or name.endswith(("MLP", "MoE")) for name in names)


def _probe(
    module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], mixes: bool, chained: bool
) -> Shapes:
    """Check a layer class on some tokens, with the arguments of a call's first ones.

    Args:
        mixes: True if it calls convolutions or scans that are caught.
        chained: True if it calls no attention.
    """
    hidden = hidden_states(args, kwargs)
    arguments = Arguments(args, kwargs)
    if len(arguments.differentiable()) < sum(leaf.requires_grad for leaf in arguments.tensors):
        raise CannotTile("an argument besides its hidden states needs a gradient, and is not cut")
    tokens = min(_TOKENS, (arguments.length - 1) // 2)
    length = min(arguments.length, 2 * tokens + max(1, tokens // 3))
    rows = min(arguments.batch, 2)
    drawn = torch.randn(rows, length, hidden.shape[2], generator=torch.Generator().manual_seed(0))
    x = (_SCALE * drawn).to(hidden).requires_grad_()  # row-major, as tiles of any layout are
    own_args, own_kwargs = arguments.first(x)
    own = Arguments(own_args, own_kwargs, like=arguments)
    cuts = [0, tokens, 2 * tokens, length]
    spans = [Span(slice(row, row + 1), slice(*ends)) for row in range(rows) for ends in itertools.pairwise(cuts)]
    trained = _trained(module)
    arrived: list[int] = []
    forward = _saying_why(forward)
    reasons: list[CannotTile] = []
    parts = parts_of(module) if mixes else None
    striped = None if parts is None else Striped(fitting(parts, length, type(module).__name__), tokens, rows)
    ordered = running_on(module, striped)
    with ordered, forked(x.device), unchanged(module), aliased(module, [*trained.values()]) as parameters, torch.enable_grad():
        leaves = [x, *own.differentiable(), *parameters]
        runs = _run_chained if chained else _run
        run = functools.partial(runs, forward, own_args, own_kwargs)
        before = own_states(x.device)
        with _Watch() as watch:
            try:
                run()
            except NoAttention as reason:
                raise (NoAttention(_own_attention(watch.attends)) if watch.attends is not None else reason) from None
        draws = own_states(x.device) != before
        if watch.given:
            raise CannotTile("it draws random numbers from a generator of its own, which tiles would draw anew")
        _refuse_writes(module, run)
        with _at_the_end(reasons):
            _refuse_hidden_draws(run, x.device)
        with _at_the_end(reasons):
            _refuse_escapes(functools.partial(_as_a_first_tile, run))
        if draws:
            _refuse_draws_of_sequences(functools.partial(runs, forward), own, x, spans)
        with _evaluating(module) if draws else nullcontext():  # a tile draws other numbers than the whole
            to_attention = [] if chained else run_to_attention(forward, own_args, own_kwargs).leaves
            choices = Choices(rows, length)
            with choices:
                expected = run()
            shapes: Shapes
            if chained:
                shapes, found = _in_chain(forward, own, x, spans, draws, mixes, striped, choices)
                if striped is not None:
                    with _at_the_end(reasons):
                        _refuse_order(shapes.output, expected, forward, own, x)
                gathered: list[Any] = []
            else:
                if striped is not None:
                    raise CannotTile("it has attention and mixers, and its ranks share a sequence")
                shapes, gathered, found = _in_tiles(forward, own, x, spans, parameters, draws, mixes, choices)
            if x.is_meta:  # no values to compare: only an estimate runs there
                return shapes
            with _at_the_end(reasons):
                _refuse_others(to_attention, gathered, _tolerance(x))
            _refuse_other_gradients([shapes.output.tensor(expected), *tensor_leaves(to_attention)], leaves)
            for index, parameter in zip(trained, parameters, strict=True):
                parameter.register_hook(lambda _, index=index: arrived.append(index))
            with _at_the_end(reasons):
                _compare(shapes.output.tensor(expected), found, leaves, cuts[1:-1], choices)
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


def by_arrival(module: nn.Module, arrivals: Sequence[int]) -> list[nn.Parameter]:
    """Return a layer's parameters that are trained, the last to get its gradient first."""
    turns = {index: turn for turn, index in enumerate(arrivals)}
    found = _trained(module)
    return [found[index] for index in sorted(found, key=lambda index: -turns.get(index, len(turns)))]


def _trained(module: nn.Module) -> dict[int, nn.Parameter]:
    return {index: parameter for index, parameter in enumerate(module.parameters()) if parameter.requires_grad}


def _run(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a layer with a stand-in for attention: a rank may run it alone, and documents need not fit the tokens."""
    return run_with_attention(forward, args, kwargs, AttentionCall.stand_in)


def _run_chained(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _as_a_first_tile(run: Callable[[], Any]) -> None:
    with carrying(None):
        run()


def _saying_why(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of the model raise CannotTile if a tile makes it fail."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (CannotTile, MemoError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            why = (str(error) or type(error).__name__).splitlines()[0][:160]
            raise CannotTile(f"a tile of it raises {type(error).__name__}: {why}") from error

    return run


def _refuse_writes(module: nn.Module, run: Callable[[], Any]) -> None:
    """Run a layer, and refuse it if it writes to what it holds (counts, running statistics) or draws from other generators."""
    before, named = LayerState("", module).before(learns=True), named_states()
    run()
    if changed := before.changed():
        raise CannotTile(f"it writes to its {changed[0]}, which tiles would do each")
    drawn = [*before.drew_from(), *(["a tensor-parallel state"] if named_states() != named else [])]
    if drawn:
        raise CannotTile(f"it draws random numbers from {drawn[0]}, which tiles would draw anew")


def _refuse_hidden_draws(run: Callable[[], Any], device: torch.device) -> None:
    """Refuse a layer whose runs from the same random states differ."""
    if device.type == "meta":
        return
    outputs = []
    for _ in range(2):
        with forked(device):
            outputs.append(next(leaf for leaf in tensor_leaves(run()) if leaf.is_floating_point()).detach().float())
    a, b = outputs
    if a.shape != b.shape or ((a - b).norm(dim=-1) > _tolerance(a) * a.norm(dim=-1)).float().mean() > _MOST_FLIPPED:
        raise CannotTile("two runs of it from the same random states differ: it draws random numbers that memo does not see")


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


def refuse_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a call that cannot be tiled, whatever the layer is. This is cheap, and every call is looked at.

    Raises:
        CannotTile: with the reason.
    """
    hidden = hidden_states(args, kwargs)
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or not hidden.is_floating_point():
        raise CannotTile("its first argument is no tensor of hidden states (batch, tokens, hidden)")
    for name, part_of_it in module.named_modules():
        if name and any(map(_is_foreign, (*part_of_it._forward_hooks.values(), *part_of_it._forward_pre_hooks.values()))):
            raise CannotTile(f"a hook of its {name} would run once for each tile")
    leaf = next((name for name, part_of_it in module.named_modules() if name and getattr(part_of_it, "_z3_leaf", False)), None)
    if leaf is not None and not getattr(module, "_z3_leaf", False):
        raise CannotTile(f"its {leaf} is a leaf module of ZeRO-3, whose gradients are reduced by a hook. Set memo.tile_tokens")
    if gathers_by_module(module):
        raise CannotTile(BY_MODULE)


def _is_foreign(hook: Any) -> bool:
    return not getattr(hook, "__module__", "").startswith(("deepspeed.", "ds_memo.sequence."))


def _refuse_draws_of_sequences(run: Callable[..., Any], arguments: Arguments, x: torch.Tensor, spans: Sequence[Span]) -> None:
    """Refuse a layer that draws numbers which all tokens of a sequence share (stochastic depth): each tile would draw its own."""
    drawn = []
    for span in (spans[0], spans[-1]):
        with _Watch() as watch:
            run(*arguments.tile(part(x, span, 1), span)[:2])
        drawn.append(watch.drawn)
    for shape, other in zip(*drawn, strict=False):
        if shape == other:
            raise CannotTile(
                f"it draws random numbers of the shape {shape} whatever its tokens are (stochastic depth), and each tile would "
                "draw others"
            )


def _in_tiles(
    forward: Callable[..., Any],
    arguments: Arguments,
    x: torch.Tensor,
    spans: Sequence[Span],
    parameters: Sequence[torch.Tensor],
    draws: bool,
    mixes: bool,
    choices: Choices,
) -> tuple[AttentionShapes, list[Any], torch.Tensor]:
    """Run the tokens of `x` (b, s, h) in tiles, by ordinary autograd. Return where tokens lie, what attention gets, and the
    layer's output.

    Args:
        parameters: of the layer.
        choices: of the whole.
    """
    tiles = [arguments.tile(part(x, span, 1), span) for span in spans]
    lengths = spans[0].size[1], spans[-1].size[1]
    calls = _one_after_another(functools.partial(run_to_attention, forward), tiles, spans, None, choices)
    first, last = calls[0], calls[-1]
    dims = _dims("attention gets", first.leaves, last.leaves, lengths)
    differentiable = tuple(i for i, leaf in enumerate(first.leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    if any(dims[i] is None and not any(first.leaves[i] is parameter for parameter in parameters) for i in differentiable):
        raise CannotTile("attention gets a tensor without tokens that needs a gradient and is no parameter")
    result = _one_tensor("attention", first.stand_in(), first.result_dim())
    gathered = Gathered(dims, *x.shape[:2])
    for call, span, (*_, wholes) in zip(calls, spans, tiles, strict=True):
        gathered.add(span, call, wholes)
    outputs = _one_after_another(functools.partial(_run, forward), tiles, spans, None, choices)
    output, found = _joined(outputs, x, spans)
    shapes = AttentionShapes(output, draws, tuple(dims), differentiable, result, first.is_sdpa, mixes=mixes)
    return shapes, gathered.leaves, found


def _in_chain(
    forward: Callable[..., Any],
    arguments: Arguments,
    x: torch.Tensor,
    spans: Sequence[Span],
    draws: bool,
    mixes: bool,
    striped: Striped | None,
    choices: Choices,
) -> tuple[Shapes, torch.Tensor]:
    """Do the same with a layer without attention: each tile goes on where the one before ended."""
    tiles = [arguments.tile(part(x, span, 1), span) for span in spans]
    outputs = _one_after_another(lambda args, kwargs: forward(*args, **kwargs), tiles, spans, striped, choices)
    output, found = _joined(outputs, x, spans)
    return Shapes(output, draws, mixes=mixes), found


def _one_after_another(
    run: Callable[..., Any], tiles: Sequence[tuple], spans: Sequence[Span], striped: Striped | None, choices: Choices
) -> list[Any]:
    """Run each tile from where the one before ended.

    Args:
        tiles: their arguments.
    """
    results: list[Any] = []
    left: list[torch.Tensor] = []
    for (args, kwargs, _), span in zip(tiles, spans, strict=True):
        stretch = None if striped is None else striped.stretch(span)
        with choices.of_whole(span), carrying(left if span.tokens.start else None, stretch) as carry:
            results.append(run(args, kwargs))
        left = carry.left
    return results


def _refuse_order(output: Returned, expected: Any, forward: Callable[..., Any], arguments: Arguments, x: torch.Tensor) -> None:
    """Refuse a layer that reads what else it gets of each token: ranks that share a sequence move hidden states alone."""
    args, kwargs = arguments.disordered(x)
    with torch.no_grad():
        other = output.tensor(forward(*args, **kwargs))
    if not x.is_meta and not torch.allclose(other, output.tensor(expected), _tolerance(x), _tolerance(x), equal_nan=True):
        raise CannotTile("it reads more than hidden states of its tokens, which ranks that share a sequence put in another order")


def _joined(outputs: Sequence[Any], x: torch.Tensor, spans: Sequence[Span]) -> tuple[Returned, torch.Tensor]:
    """Describe what tiles return, and return the output for all tokens."""
    output = _one_tensor("it", outputs[0], 1)
    if any(output.tensor(tile).shape != part(x, span, 1).shape for tile, span in zip(outputs, spans, strict=True)):
        raise CannotTile("its output has another shape than its hidden states")
    of_rows = [[output.tensor(tile) for tile in outputs[i : i + _TILES]] for i in range(0, len(outputs), _TILES)]
    return output, torch.cat([torch.cat(of_row, 1) for of_row in of_rows])


def _refuse_others(whole: list[Any], gathered: list[Any], tolerance: float) -> None:
    """Refuse a layer if what attention gets from tiles, put together, is not what it gets from the whole."""
    for a, b in zip(whole, gathered, strict=True):
        if not isinstance(a, torch.Tensor):
            continue
        if a.shape != b.shape:
            raise CannotTile(f"attention gets a tensor of shape {tuple(b.shape)} by tiles, {tuple(a.shape)} by the whole")
        scale = float(a.detach().double().square().mean().sqrt()) if a.requires_grad else 1.0
        within = 10 * tolerance * scale if math.isfinite(scale) else tolerance
        if not torch.allclose(a.double(), b.double(), tolerance, within, equal_nan=True):
            raise CannotTile("attention gets other values by tiles than by the whole: something before it mixes its tokens")


def _refuse_other_gradients(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Refuse a layer if autograd leads from its results to other tensors than these leaves: it would end at a tile."""
    known = {id(leaf) for leaf in leaves}
    for node, _ in graph_of(results):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise CannotTile("a tensor that is neither its argument nor its parameter needs a gradient")


def _one_tensor(who: str, result: Any, dim: int) -> Returned:
    """Describe what a function returns, of which a tensor has its tokens along `dim`."""
    leaves, spec = tree_flatten(result)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(tensors) != 1:
        raise CannotTile(f"{who} returns {len(tensors)} tensors")
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Returned(spec, rest, tensors[0], dim, tuple(leaves[tensors[0]].shape))


def _dims(what: str, short: list[Any], long: list[Any], lengths: tuple[int, int]) -> list[int | None]:
    try:
        return token_dims(short, long, lengths)
    except ValueError as error:
        raise CannotTile(f"{what} {error}") from None


def _compare(expected: torch.Tensor, found: torch.Tensor, leaves: list[torch.Tensor], cuts: list[int], choices: Choices) -> None:
    """Refuse a layer if tiles give other outputs or gradients than the whole.

    A token's gradient may differ by chance (an activation's kink). Gradients of parameters are compared without such tokens.
    """
    tolerance = _tolerance(leaves[0])
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected)

    def backward(gradient: torch.Tensor) -> list[tuple[torch.Tensor | None, ...]]:
        return [torch.autograd.grad(y, leaves, gradient, retain_graph=True, allow_unused=True) for y in (expected, found)]

    whole, tiled = backward(gradient)
    off = _off(whole[0], tiled[0], tolerance)
    whole, tiled = backward(gradient.masked_fill(off[..., None], 0))
    mixes = "something besides attention mixes its tokens"
    if not choices.are_alike(tolerance):
        raise CannotTile(f"tiles choose other experts than the whole: {mixes}")
    if _off(expected, found, tolerance).any():
        raise CannotTile(f"tiles give other outputs than the whole: {mixes}")
    if _at_every_cut(off, cuts) or off.sum() > max(1, _MOST_FLIPPED * off.numel()):
        raise CannotTile(f"tiles give other gradients of its input than the whole: {mixes}")
    largest = max((g.float().norm() for g in whole if g is not None), default=0)
    for a, b in zip(whole, tiled, strict=True):
        if (a is None) != (b is None) or (
            a is not None and (a.float() - b.float()).norm() > tolerance * max(a.float().norm(), 1e-3 * largest)
        ):
            raise CannotTile("tiles give other gradients of its parameters than the whole")


def _off(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return for each token (b, s) whether two values of it differ."""
    return (a.float() - b.float()).norm(dim=-1) > tolerance * a.float().norm(dim=-1).square().mean().sqrt()


def _at_every_cut(off: torch.Tensor, cuts: Sequence[int]) -> bool:
    """Return True if a token differs at the same distance from every cut, as where tokens are mixed; by chance few do."""
    length = off.shape[1]
    by_distance = ([cut + near for cut in cuts if 0 <= cut + near < length] for near in range(-_NEAR, _NEAR))
    return any(places and bool(off[:, places].all()) for places in by_distance)


def is_by_token(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """Return True if a function of hidden states (b, s, h) gives a few tokens the same values together and apart."""
    few = x.detach()[:2, : 2 * _NEAR]
    with torch.no_grad():
        together = function(few)
        apart = torch.cat([function(token) for token in few.split(1, 1)], 1)
    return together.shape == apart.shape and torch.allclose(together, apart, _tolerance(x), _tolerance(x), equal_nan=True)


def _tolerance(x: torch.Tensor) -> float:
    """Return the share of its size that a value of the layer may be off in another GEMM."""
    dtypes = [x.dtype, *(dtype for _, enabled, dtype in autocast_now() if enabled)]
    return max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5


class _Watch(KeepsGiven):
    """Sees what a run draws, and which memory it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, ...]] = []
        """Shapes of tensors of random numbers."""
        self.made: list[StorageWeakRef] = []
        self.attends: nn.Module | None = None
        """Module whose code takes a softmax over scores."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        tensors, given = tensor_leaves(out), {storage_of(tensor) for tensor in tensor_leaves((args, kwargs))}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.drawn += [tuple(tensor.shape) for tensor in tensors]
        if self.attends is None and materialises_scores(func, args[0] if args else None):
            self.attends = _caller()
        self.made += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if storage_of(tensor) not in {0, *given}]
        return out


def _caller() -> nn.Module | None:
    """Return the innermost module with parameters whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module) and any(True for _ in caller.parameters()):
            return caller
        frame = frame.f_back
    return None


def _own_attention(attends: nn.Module) -> str:
    """Name the module of a layer that attends without a function which could be caught."""
    name, file = type(attends).__name__, sys.modules[type(attends).__module__]
    if hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        how = getattr(getattr(attends, "config", None), "_attn_implementation", None)
        return f'its {name} makes a matrix of tokens × tokens: attn_implementation is "{how}"'
    return f"its {name} multiplies queries by keys in code of its own"


def _refuse_escapes(run: Callable[[], Any]) -> None:
    """Run a layer, and refuse it if tensors of the run are still alive when its output is gone."""
    with _Watch() as watch, dropping():
        run()
    deadline = time.monotonic() + (_LET_GO_S if world_size() > 1 else 0)
    while not all(made.expired() for made in watch.made):
        if time.monotonic() >= deadline:
            raise CannotTile("tensors of a call outlive it: a hook, a list or an attribute holds them")
        time.sleep(1e-3)
