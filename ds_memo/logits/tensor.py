"""LazyLogits: a tensor with the shape of the logits that holds hidden states.

Ops that ops.py knows are recorded, or run tile by tile. Any other gets the whole logits, with a warning: it is never wrong, only
large. It is caught by its Python function, so autograd sees it on the whole logits. An op that comes past that is caught below
autograd, where values are all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ds_memo.errors import MemoError
from ds_memo.logits.content import Content, PerRow, Rows, results
from ds_memo.logits.nodes import Derive, OutputHead, Reduce, identity
from ds_memo.tiles.around import autocast_as, autocast_now
from ds_memo.units import GIB

_NATIVE = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "dim_order"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "is_same_size", "is_contiguous", "has_names"),
    *("__len__", "__hash__", "__format__", "register_hook", "retain_grad", "requires_grad_", "backward"),
)
"""Methods that ask for no value."""
_VALUES = ("T", "mT", "H", "mH", "real", "imag")
"""Properties that are tensors of values."""
STALE = "lazy logits were changed in place through other logits with the same rows, which they do not follow. Clone them first"
Handler = Callable[..., Any]
handlers: dict[str, Handler] = {}
"""By a function's name: ``handler(func, name, *args, **kwargs)``; NotImplemented: not this use of it. ops.py fills it."""


class LazyLogits(torch.Tensor):
    """Logits that are not computed: `content` is what they are, `rows` what they are computed from."""

    content: Content
    rows: Rows

    @staticmethod
    def __new__(cls, content: Content, rows: Rows) -> LazyLogits:
        self = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype, device=content.device)
        self.content, self.rows = content, rows
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if not args and "input" in kwargs:
            kwargs = kwargs.copy()
            args = (kwargs.pop("input"),)
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
            if name == "data":
                return args[0].detach()
            if name not in _VALUES:
                return _native(func, args, kwargs)
        elif name in _NATIVE:
            return _native(func, args, kwargs)
        if name in ("data_ptr", "untyped_storage", "storage", "__dlpack__"):
            raise MemoError(
                f"{name}() of lazy logits, which have no memory: a kernel of its own reads them. Set "
                'memo.kernels.cross_entropy to "whole"'
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise MemoError(
                f"{name}() of lazy logits under a transform of torch.func (vmap, grad, jvp), which does not know them. Set "
                'memo.kernels.cross_entropy to "whole"'
            )
        if any(isinstance(value, LazyLogits) and value.content.stale for value in args):
            raise MemoError(STALE)
        handler = handlers.get(name) or handlers.get(name.strip("_"))
        if handler is not None and (found := handler(func, name.strip("_"), *args, **kwargs)) is not NotImplemented:
            return found
        return whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("detach", "alias", "view_as"):
            return cls(args[0].content, args[0].rows)

        def values(logits: LazyLogits) -> torch.Tensor:
            _before_whole(logits, name)
            return logits.content.shaped(results(logits.content, logits.rows, identity, ())[0])

        return _with_values(func, values, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        node = f", grad_fn={type(self.grad_fn).__name__}" if self.grad_fn is not None else ""
        return f"LazyLogits({tuple(self.shape)}, {self.dtype}{node})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return whole(torch.Tensor.detach, (self,), {}).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.requires_grad:
            raise RuntimeError("only tensors that are leaves of the graph can be deep-copied: detach the logits first")
        return LazyLogits(self.content, self.rows)


def whole(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function with the whole logits."""

    def values(logits: LazyLogits) -> torch.Tensor:
        _before_whole(logits, func.__name__)
        return logits.content.shaped(Reduce.apply(logits, identity, (), None)[0])

    return _with_values(func, values, args, kwargs)


def call_head(content: Content, rows: Rows, parameters: list[torch.Tensor], hidden_NH: torch.Tensor) -> LazyLogits:
    """Return the logits of a call of the head."""
    return OutputHead.apply(lambda content: LazyLogits(content, rows), content, hidden_NH, *parameters)


def derive(logits: LazyLogits, content: Content) -> LazyLogits:
    """Return logits with a content that was made from theirs."""
    return Derive.apply(lambda content: LazyLogits(content, logits.rows), logits, content)


def changed(logits: LazyLogits, **changes: Any) -> LazyLogits:
    return derive(logits, replace(logits.content, **{"chosen": {}, "changed": {}, **changes}))


def by_row(
    logits: LazyLogits, fn: PerRow, *arguments: torch.Tensor, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Return ``fn(values, *arguments)`` of each row, in the leading dimensions of the logits."""
    found = Reduce.apply(logits, under_autocast(fn), arguments, device)
    return tuple(part.reshape((*logits.content.leading, *part.shape[1:])) for part in found)


def under_autocast(fn: PerRow) -> PerRow:
    """Return `fn` under the autocast of now, whenever it is called."""
    states = autocast_now()

    def run(*arguments: Any) -> Any:
        with autocast_as(states):
            return fn(*arguments)

    return run


def _native(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _with_values(func: Any, values: Callable[[LazyLogits], torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(*tree_map_only(LazyLogits, values, args), **tree_map_only(LazyLogits, values, kwargs))


def _before_whole(logits: LazyLogits, op: str) -> None:
    if logits.content.stale:
        raise MemoError(STALE)
    gib = logits.numel() * logits.element_size() / GIB
    logits.content.source.warn(
        f"'{op}' needs whole logits, {gib:.3g} GiB of {logits.dtype}, which are made for it. Where that is too much, reduce them "
        "first by an op over the vocabulary (argmax, logsumexp, cross_entropy, gather), or take fewer rows"
    )
