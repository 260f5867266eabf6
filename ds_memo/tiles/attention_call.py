"""The attention function of a layer: where tiles are cut, and how it is called for all tokens at once.

It is caught at the function, not at the kernel: below it Ulysses' all-to-all, the unpadding of packed sequences and the
repetition of key-value heads have already run, and they need all tokens.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C import _len_torch_function_stack, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_unflatten

from ds_memo.remat.layer_call import CannotTile
from ds_memo.remat.modes import saves_for_a_checkpoint
from ds_memo.remat.shared_changes import Undo, for_good, need
from ds_memo.remat.undo import Undoing
from ds_memo.spans import Span
from ds_memo.tiles.slices import new_whole, parts

UNDER_A_CHECKPOINT = "a part of it runs under torch.utils.checkpoint, and would run again in each backward of a tile"


class NoAttention(CannotTile):
    """A layer calls no attention that can be caught."""

    def __init__(self, why: str = "it calls neither one of Transformers' attention functions nor F.scaled_dot_product_attention"):
        super().__init__(why)


class AttentionCall:
    """An attention function and its arguments, as a layer calls it.

    Args:
        fn: F.scaled_dot_product_attention(query, key, value, …), which takes and returns (…, tokens, d); or a function of
            Transformers' table, fn(module, query, key, value, …), which takes (b, heads, tokens, d) and returns a tuple of
            (b, tokens, heads, d) and None.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.leaves, self.spec = _flatten(args, kwargs)
        self.cut_from: dict[int, torch.Tensor] = {}
        """By the id of each argument of the tile that was cut, what it was cut from."""

    def run(self, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)

    @property
    def is_sdpa(self) -> bool:
        return self.fn is F.scaled_dot_product_attention

    def ranks(self, leaves: list[Any]) -> int:
        """Return the number of ranks among which the function trades heads (Ulysses); 1 if that is not known.

        A function says so by its attribute `ranks`, called with the module. It then gives each rank a block of neighbouring
        heads, of any number of query heads to a key-value head.
        """
        ranks = getattr(self.fn, "ranks", None)
        return 1 if ranks is None else ranks(next(leaf for leaf in leaves if isinstance(leaf, nn.Module)))

    def _query_key_value(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        given = dict(zip(("query", "key", "value"), args if self.is_sdpa else args[1:], strict=False)) | kwargs
        return given["query"], given["key"], given["value"]

    @property
    def dtype(self) -> torch.dtype:
        """That of the values, which the stand-in has."""
        return self._query_key_value()[2].dtype

    def stand_in(self) -> Any:
        """Return something shaped like the function's result that treats each token by itself, with gradients for all three."""
        query, key, value = self._query_key_value()
        if query.dim() == 4 and key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = (value * torch.tanh((query * key).mean(-1, keepdim=True)) + value).to(value.dtype)
        return out if self.is_sdpa else (out.transpose(1, 2).contiguous(), None)  # models may call view() on it

    def result_dim(self) -> int:
        query = next(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        return query.dim() - 2 if self.is_sdpa else 1


_LEAVES = (torch.Tensor, nn.Module, int, float, str, type(None))


def _flatten(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return ``tree_flatten((args, kwargs))``, which takes 30 µs, in less time where no argument is a container."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not (isinstance(leaf, _LEAVES) or tree_is_leaf(leaf)):
            return tree_flatten((args, kwargs))
    return leaves, _spec(len(args), tuple(kwargs))


@functools.lru_cache(maxsize=64)
def _spec(args: int, names: tuple[str, ...]) -> TreeSpec:
    return tree_flatten(((None,) * args, dict.fromkeys(names)))[1]


class _Reached(BaseException):
    """Ends a layer's forward where attention begins. No `except Exception` of the layer takes it."""


class _Thread(threading.local):
    handler: Callable[[AttentionCall], Any] | None = None


_thread = _Thread()


def run_to_attention(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], sdpa: bool = True) -> AttentionCall:
    """Run a layer's forward until it calls attention, and return that call.

    Args:
        sdpa: False if it is known to call a function of a table: calls of PyTorch's own are then not looked at.

    Raises:
        NoAttention: it calls none that can be caught.
    """
    reached: list[AttentionCall] = []

    def stop(call: AttentionCall) -> Any:
        reached.append(call)
        raise _Reached

    with _Catching(stop, sdpa):
        try:
            forward(*args, **kwargs)
        except _Reached:
            return reached[0]
    raise NoAttention


def run_with_attention(
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    supply: Callable[[AttentionCall], Any],
    sdpa: bool = True,
) -> Any:
    """Run a layer's forward with ``supply(call)`` as the result of its attention.

    Args:
        sdpa: as in :func:`run_to_attention`.

    Raises:
        CannotTile: it calls attention twice, or (NoAttention) not at all.
    """
    calls = 0

    def once(call: AttentionCall) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise CannotTile("it calls attention more than once")
        return supply(call)

    with _Catching(once, sdpa):
        result = forward(*args, **kwargs)
    if not calls:
        raise NoAttention
    return result


class _Catching(Undoing):
    """Have `handler` get the calls of attention inside the block."""

    __slots__ = ("_handler", "_sdpa")

    def __init__(self, handler: Callable[[AttentionCall], Any], sdpa: bool) -> None:
        # No method of its own, which would leave a circle: a handler holds a tile's tensors.
        super().__init__(functools.partial(_put_back, _thread.handler, _len_torch_function_stack()))
        self._handler, self._sdpa = handler, sdpa

    def __enter__(self) -> None:
        super().__enter__()
        _thread.handler = self._handler
        if self._sdpa:
            _push_on_torch_function_stack(_CatchSdpa())


def _put_back(handler: Callable[[AttentionCall], Any] | None, depth: int) -> None:
    _thread.handler = handler
    while _len_torch_function_stack() > depth:
        _pop_torch_function_stack()


def _caught(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    if saves_for_a_checkpoint():  # which would run attention itself, where the tile was given its result
        raise CannotTile(UNDER_A_CHECKPOINT)
    handler, _thread.handler = _thread.handler, None
    try:
        return handler(AttentionCall(fn, args, kwargs)) if handler else fn(*args, **kwargs)
    finally:
        _thread.handler = handler


class _CatchSdpa(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _caught(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def catch_from(table: Any, undo_with: Callable[[Undo], Any] = for_good) -> None:
    """Have a class of tables of attention functions (Transformers') give tiles functions that are caught.

    Elsewhere nothing changes.

    Args:
        undo_with: is given what puts it back, unless another model still needs it.
    """
    need(table, functools.partial(_catch_from, table), undo_with)


def _catch_from(table: Any) -> Undo | None:
    lookup, own = table.__getitem__, vars(table).get("__getitem__")
    if hasattr(lookup, "_ds_memo"):
        return None

    def __getitem__(self: Any, name: str) -> Any:
        function = lookup(self, name)
        if _thread.handler is None:
            return function
        return lambda *args, **kwargs: _caught(function, args, kwargs)

    def undo() -> None:
        if vars(table).get("__getitem__") is not __getitem__:
            return
        if own is None:
            del table.__getitem__
        else:
            table.__getitem__ = own

    __getitem__._ds_memo = True  # type: ignore[attr-defined]
    table.__getitem__ = __getitem__
    return undo


class Gathered:
    """Attention's arguments for all tokens, put together from the tiles' calls.

    Args:
        dims: by leaf, the dimension of its tokens, or None.
        batch, length: of the whole.
        spans: the tiles.
    """

    def __init__(self, dims: Sequence[int | None], batch: int, length: int, spans: Sequence[Span]) -> None:
        self._dims = dims
        self._size = batch, length
        self._spans = spans
        self.call: AttentionCall | None = None
        self.leaves: list[Any] = []
        self.parts: dict[int, list[torch.Tensor]] = {}
        """By index of a leaf that is put together: the tiles' parts of it."""

    def _new(self, tile: torch.Tensor, dim: int) -> torch.Tensor:
        if tile.dim() == 4 and dim == 2:  # (b, heads, s, d): heads of a token side by side, as kernels then return them
            return new_whole(tile.transpose(1, 2).contiguous(), *self._size, 1).transpose(1, 2)
        return new_whole(tile, *self._size, dim)

    def add(self, number: int, call: AttentionCall) -> None:
        """Take what one tile gives to attention."""
        if self.call is None:
            self._begin(call)
        for index, of_tiles in self.parts.items():
            of_tiles[number].copy_(call.leaves[index].detach())
        call.leaves = []  # they hold the tile's graph

    def _begin(self, call: AttentionCall) -> None:
        """Allocate memory for all tokens of what the first tile gives."""
        self.call, self.leaves = call, list(call.leaves)
        for index, (leaf, dim) in enumerate(zip(call.leaves, self._dims, strict=True)):
            if dim is None:
                continue
            self.leaves[index] = whole = call.cut_from.get(id(leaf))
            if whole is None:
                self.leaves[index] = whole = self._new(leaf.detach(), dim)
                self.parts[index] = parts(whole, self._spans, dim)
