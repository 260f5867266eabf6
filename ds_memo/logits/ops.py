"""The ops on lazy logits: recorded, done on the maps of rows, or computed tile by tile.

| op                                              | what is done                                                    |
|-------------------------------------------------|-----------------------------------------------------------------|
| view, slices, chunk, masks of rows, transpose   | the same on the maps of rows                                    |
| casts, scale, tanh, bias, masked_fill, softmax  | recorded, and done again in each tile                           |
| cross_entropy, gather, argmax, topk, sums       | tile by tile, results by row; then ordinary tensors             |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ds_memo.errors import MemoError
from ds_memo.logits.content import Content, Other, Tile, unchanged
from ds_memo.logits.nodes import Sum
from ds_memo.logits.tensor import LazyLogits, by_row, changed, derive, handlers, under_autocast
from ds_memo.tiles.around import autocast_as, autocast_now

_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


class _Unknown(Exception):
    """An operand that cannot be split by rows."""


# ---- recorded


def elementwise(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Record a function of each row. Operands are numbers, vectors of the vocabulary, or have as many rows as the logits."""
    own = [value for value in (*args, *kwargs.values()) if isinstance(value, LazyLogits)]
    base = max(own, key=lambda logits: logits.requires_grad)
    content, states, in_place = base.content, autocast_now(), func.__name__ in _IN_PLACE or _ends_in_place(func.__name__)
    kin = [logits for logits in own if logits.content.source is content.source and logits.content.maps[0] is content.maps[0]]
    widest = max((logits.content for logits in kin), key=lambda each: len(each.maps))
    if content.moved or any(any(a is not b for a, b in zip(logits.content.maps, widest.maps)) for logits in kin):  # noqa: B905
        return NotImplemented
    maps, operands = list(widest.maps), list(widest.operands)

    def by_rows(operand: torch.Tensor | Other) -> Callable[[Tile], torch.Tensor]:
        number = len(maps)
        maps.append(torch.arange(content.rows, device=content.device).view(content.leading))
        operands.append(operand)
        return lambda tile: tile.operand(number)

    def prepared(value: Any) -> Callable[[Tile], Any]:
        if isinstance(value, LazyLogits):
            if any(value is logits for logits in kin):
                return _value_of(value.content.expression, detached=base.requires_grad and not value.requires_grad)
            trained = value.requires_grad and torch.is_grad_enabled()
            if trained or value.content.leading != content.leading or value.content.moved:
                raise _Unknown
            return by_rows(Other(value.content, value.rows))
        if not torch.is_tensor(value):
            return lambda tile: value
        if value.requires_grad and torch.is_grad_enabled():
            raise _Unknown
        value = value.detach()
        get = unchanged(value)
        if value.dim() == 0:
            return lambda tile: get()
        if value.shape[-1] not in (1, content.vocabulary) or value.dim() > len(content.leading) + 1:
            raise _Unknown
        if all(size == 1 for size in value.shape[:-1]):
            return lambda tile: get().reshape(-1)
        rows = by_rows(value.expand(*content.leading, value.shape[-1]).reshape(-1, value.shape[-1]))
        return lambda tile: get() is value and rows(tile)

    try:
        positional, named = [prepared(value) for value in args], {key: prepared(value) for key, value in kwargs.items()}
    except _Unknown:
        return NotImplemented

    def expression(tile: Tile) -> torch.Tensor:
        values = [value(tile) for value in positional]
        if in_place:
            values[0] = values[0].clone()
        with autocast_as(states):
            return func(*values, **{key: value(tile) for key, value in named.items()})

    sample = _sample(replace(content, maps=tuple(maps), operands=tuple(operands)), kin, expression)
    new = replace(
        content,
        expression=expression,
        maps=content.maps if len(maps) == len(content.maps) else tuple(maps),
        operands=tuple(operands),
        dtype=sample.dtype,
        vocabulary=sample.shape[-1],
        chosen={},
        bases=content.bases if in_place else (),
        changed={},
    )
    return _change(args[0], base, new) if in_place else derive(base, new)


def _value_of(expression: Callable[[Tile], torch.Tensor], detached: bool) -> Callable[[Tile], torch.Tensor]:
    """Return a function that holds no logits: it lives as long as the graph does."""
    return (lambda tile: tile.values(expression).detach()) if detached else (lambda tile: tile.values(expression))


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _sample(content: Content, kin: list[LazyLogits], expression: Callable[[Tile], torch.Tensor]) -> torch.Tensor:
    """Return the expression's values of no rows: their dtype and size of vocabulary."""
    none = replace(content, maps=tuple(each.reshape(-1)[:0] for each in content.maps))
    known = {
        logits.content.expression: torch.empty(0, logits.content.vocabulary, dtype=logits.dtype, device=logits.device)
        for logits in kin
    }
    with torch.no_grad():
        return expression(Tile(none, slice(0, 0), known))


def _change(target: LazyLogits, base: LazyLogits, new: Content) -> LazyLogits:
    """Change logits in place. Terms are relative to the head, so another expression needs no other node."""
    silent = target.requires_grad and not torch.is_grad_enabled()  # a change that autograd would not see
    if silent or (base.requires_grad and not target.requires_grad):
        raise MemoError("lazy logits were changed in place against their graph: without gradients, or detached. Clone them first")
    old, token = target.content, object()
    if new.dtype != old.dtype:
        raise MemoError(f"lazy logits of {old.dtype} were changed in place to {new.dtype}, which takes another tensor")
    for rows_of in (old, *old.bases):
        rows_of.changed[token] = old.maps[0]
    target.content = replace(new, tokens=old.tokens | {token})
    return target


def put(func: Any, name: str, logits: LazyLogits, key: Any, value: Any) -> Any:
    """Change entries of the vocabulary in all rows, or those that a mask names."""
    whole_key, new = _whole_key(logits, key), NotImplemented
    if not torch.is_tensor(value) or (value.numel() == 1 and not value.requires_grad):
        if torch.is_tensor(key) and key.dtype == torch.bool and key.shape == logits.shape:
            new = elementwise(torch.masked_fill, name, logits, key, value)
        elif all(isinstance(part, slice) and part == slice(None) for part in whole_key[:-1]):

            def filled(values: torch.Tensor) -> torch.Tensor:
                values = values.clone()
                values[:, whole_key[-1]] = value
                return values

            new = elementwise(filled, name, logits)
    if new is NotImplemented:
        raise MemoError("some rows of lazy logits were set in place, which they do not follow. Use torch.where or masked_fill")
    _change(logits, logits, new.content)


def _whole_key(logits: LazyLogits, key: Any) -> list[Any]:
    """Return an index of each dimension; that of the vocabulary is the last."""
    key = list(key) if isinstance(key, tuple) else [key]
    used = sum(k.dim() if torch.is_tensor(k) and k.dtype == torch.bool else k is not None for k in key if k is not Ellipsis)
    spot = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
    key[spot : spot + 1] = [slice(None)] * (logits.dim() - used)
    return key


def softmaxes(func: Any, name: str, logits: LazyLogits, dim: int | None = None, *rest: Any, dtype: Any = None, **_: Any) -> Any:
    if not _is_vocabulary(logits, dim):
        return NotImplemented
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
    plain = torch.log_softmax if name == "log_softmax" else torch.softmax
    return elementwise(lambda values: plain(values, -1, dtype=dtype), name, logits)


def casts(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    device, dtype = None, None
    if name in ("cpu", "cuda"):
        device = torch.device(name)
    elif name in _CASTS:
        dtype = _CASTS[name]
    elif args and torch.is_tensor(args[0]):
        device, dtype = args[0].device, args[0].dtype
    elif name == "type":
        dtype = args[0]
    else:
        device, dtype = torch._C._nn._parse_to(*args, **{key: value for key, value in kwargs.items() if key != "copy"})[:2]
    if device is not None and device.type != logits.device.type:  # tile by tile, so that no device holds all of it
        (there,) = by_row(logits, lambda values: values.to(dtype or values.dtype), device=device)
        return there.movedim(-1, 1) if logits.content.moved else there
    if dtype is None or dtype == logits.dtype:
        return logits
    return NotImplemented if logits.content.moved else elementwise(lambda values: values.to(dtype), name, logits)


# ---- on the maps of rows


def on_rows(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Do the same to the maps, which lack the vocabulary."""
    content, dims = logits.content, logits.dim()
    if content.moved:
        return NotImplemented
    if name in ("view", "reshape"):
        shape = args[0] if args and isinstance(args[0], (tuple, list)) else args or kwargs.get("shape", ())
        inferred = shape and shape[-1] == -1 and math.prod(shape[:-1]) == content.rows
        if not shape or isinstance(shape[0], torch.dtype) or not (inferred or shape[-1] == content.vocabulary):
            return NotImplemented
        return _choose(logits, lambda each: each.reshape(shape[:-1]))
    if name == "flatten":
        start, end = (list(args) + [kwargs.get("start_dim", 0), kwargs.get("end_dim", -1)][len(args) :])[:2]
        if end % dims == dims - 1:
            return NotImplemented
        return _choose(logits, lambda each: each.flatten(start % dims, end % dims))
    if name == "squeeze" and not (args or kwargs):
        return _choose(logits, torch.squeeze) if content.vocabulary > 1 else NotImplemented
    where = 1 if name in ("split", "chunk") else 0
    dim = kwargs.pop("dim", args[where] if len(args) > where else 0)
    size = dims + 1 if name == "unsqueeze" else dims
    if not isinstance(dim, int) or dim % size == size - 1:
        return NotImplemented
    call, before, after = getattr(torch.Tensor, name), args[:where], args[where + 1 :]
    return _choose(logits, lambda each: call(each, *before, dim % size, *after, **kwargs))


def chosen(func: Any, name: str, logits: LazyLogits, key: Any) -> Any:
    """Return logits[key]: rows, and a slice of the vocabulary at most."""
    if logits.content.moved:
        return NotImplemented
    key = _whole_key(logits, key)
    of_vocabulary = key.pop()
    if not isinstance(of_vocabulary, slice):
        return NotImplemented
    if of_vocabulary != slice(None):
        logits = elementwise(lambda values: values[:, of_vocabulary], name, logits)
    text = None if any(torch.is_tensor(k) for k in key) else repr(key)
    return _choose(logits, lambda each: each[tuple(key)], text) if key else logits


def transposed(func: Any, name: str, logits: LazyLogits, *args: Any) -> Any:
    if logits.dim() != 3 or getattr(torch.Tensor, name)(torch.empty(2, 3, 5), *args).shape != (2, 5, 3):
        return NotImplemented
    return changed(logits, moved=not logits.content.moved)


def _choose(logits: LazyLogits, choice: Callable[[torch.Tensor], Any], text: str | None = None) -> Any:
    """Return the logits of chosen rows, several where `choice` gives several.

    Args:
        text: of the choice: the same text gives the same maps, so that their terms take one loop. None: not known.
    """
    content = logits.content
    bases = (*content.bases, content)
    if text in content.chosen:
        return changed(logits, maps=content.chosen[text], bases=bases)
    found = [choice(each) for each in content.maps]
    if torch.is_tensor(found[0]):
        if text is not None:
            content.chosen[text] = tuple(found)
        return changed(logits, maps=tuple(found), bases=bases)
    return tuple(changed(logits, maps=maps, bases=bases) for maps in zip(*found, strict=True))


# ---- over the vocabulary


def cross_entropy(
    func: Any,
    name: str,
    logits: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute cross_entropy, or nll_loss of log-probabilities, in float32."""
    lazy_target = isinstance(target, LazyLogits)
    if not isinstance(logits, LazyLogits) or lazy_target or target.requires_grad or (size_average, reduce) != (None, None):
        return NotImplemented
    if logits.dim() > 2 and not logits.content.moved:
        return NotImplemented
    content, classes = logits.content, not target.is_floating_point()
    if not classes and content.moved:
        target = target.movedim(1, -1)
    wide = torch.promote_types(content.dtype, torch.float32)
    weight = None if weight is None else weight.to(wide)

    def loss(values: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
        if name == "nll_loss":
            return F.nll_loss(values.to(wide), of_rows, weight, ignore_index=ignore_index, reduction="none")
        ignored = ignore_index if classes else -100
        return F.cross_entropy(
            values.to(wide), of_rows, weight, ignore_index=ignored, reduction="none", label_smoothing=label_smoothing
        )

    if reduction == "none":
        return by_row(logits, loss, _of_rows(content, target))[0].to(content.dtype)
    total = total_of(logits, loss, _of_rows(content, target))
    if reduction == "mean":
        counts = target != ignore_index
        if not classes:
            total = total / content.rows
        elif weight is None:
            total = total / counts.sum()
        else:
            total = total / (weight[target * counts] * counts).sum()
    return total.to(content.dtype)


def total_of(logits: LazyLogits, fn: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    """Return the sum of one number by row; where it is trained, and the first of its call, its gradients are computed with it."""
    source = logits.content.source
    half = torch.float16 in (logits.content.dtype, logits.rows.hidden_NH.dtype)  # a gradient needs the loss scale to be held
    if logits.requires_grad and torch.is_grad_enabled() and source.wanted and not (half or source.summed):
        source.summed = True
        return Sum.apply(logits, under_autocast(fn), arguments)
    return by_row(logits, fn, *arguments)[0].sum()


def gather(func: Any, name: str, logits: LazyLogits, dim: int, index: torch.Tensor, **_: Any) -> Any:
    if not _is_vocabulary(logits, dim) or index.shape[:-1] != logits.content.leading:
        return NotImplemented
    return by_row(logits, lambda values, of_rows: values.gather(-1, of_rows), _of_rows(logits.content, index))[0]


def kl_div(
    func: Any,
    name: str,
    logits: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    if (size_average, reduce) != (None, None) or not isinstance(logits, LazyLogits):
        return NotImplemented

    def divergence(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.kl_div(values, other, reduction="none", log_target=log_target)

    by_entry = elementwise(divergence, name, logits, target)
    if by_entry is NotImplemented or reduction == "none":
        return by_entry
    total = total_of(by_entry, lambda values: values.sum(-1))
    return total / {"sum": 1, "batchmean": logits.shape[0], "mean": logits.numel()}[reduction]


_TOTALS = ("sum", "nansum", "mean")


def over_vocabulary(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Reduce the vocabulary, or everything."""
    if logits.content.moved:
        return NotImplemented
    at, rest = (1 if name in ("topk", "norm") else 0), list(args)
    default = -1 if name == "topk" else None
    dim = kwargs.pop("dim", kwargs.pop("axis", rest.pop(at) if len(rest) > at else default))
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    call = getattr(torch.Tensor, name)
    if dim is None and name in (*_TOTALS, "max", "min", "amax", "amin", "any", "all") and not rest:
        return _over_everything(name, call, logits, kwargs)
    if not _is_vocabulary(logits, dim):
        return NotImplemented

    if len(rest) >= at and rest:
        rest.insert(at, -1)
    else:
        kwargs["dim"] = -1

    def reduced(values: torch.Tensor) -> Any:
        found = call(values, *rest, **kwargs)
        return tuple(found) if isinstance(found, tuple) else found

    found = by_row(logits, reduced)
    return found[0] if len(found) == 1 else getattr(torch.return_types, name)(found)


def _over_everything(name: str, call: Any, logits: LazyLogits, kwargs: dict[str, Any]) -> torch.Tensor:
    if name not in _TOTALS:
        inner = getattr(torch.Tensor, {"max": "amax", "min": "amin"}.get(name, name))
        return call(by_row(logits, lambda values: inner(values, -1))[0])
    floating = logits.is_floating_point()
    wide = torch.promote_types(logits.dtype, torch.float32 if floating else torch.int64)
    add = torch.nansum if name == "nansum" else torch.sum
    total = total_of(logits, lambda values: add(values, -1, dtype=wide))
    total = total / logits.numel() if name == "mean" else total
    return total.to(kwargs.get("dtype") or (logits.dtype if floating else total.dtype))


def _of_rows(content: Content, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(content.rows, *tensor.shape[len(content.leading) :])


def _is_vocabulary(logits: LazyLogits, dim: Any) -> bool:
    return isinstance(dim, int) and not logits.content.moved and dim % logits.dim() == logits.dim() - 1


def _new(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(torch.empty(0, dtype=logits.dtype, device=logits.device), *args, **kwargs)


_TABLE: dict[Callable[..., Any], str] = {
    elementwise: "add sub mul div truediv radd rsub rmul rdiv rtruediv rpow pow neg exp tanh log log2 sigmoid clamp clamp_min "
    "clamp_max abs square sqrt true_divide multiply divide subtract masked_fill where nan_to_num isnan isinf isfinite eq ne lt "
    "le gt ge logical_not relu softplus log1p expm1 float_power iadd isub imul itruediv ipow",
    softmaxes: "softmax log_softmax",
    casts: "float half bfloat16 double to type type_as cpu cuda",
    on_rows: "view reshape flatten squeeze unsqueeze split chunk narrow select index_select unbind",
    chosen: "getitem",
    put: "setitem",
    transposed: "transpose permute swapaxes",
    cross_entropy: "cross_entropy nll_loss nll_loss_nd",
    kl_div: "kl_div",
    gather: "gather",
    over_vocabulary: "sum nansum mean max min amax amin argmax argmin logsumexp topk norm std var any all",
    _new: "new_zeros new_ones new_empty new_full new_tensor",
    lambda func, name, logits, **_: logits: "contiguous",
    lambda func, name, logits: iter(logits.unbind(0)): "iter",
    lambda func, name, logits: LazyLogits(logits.content, logits.rows): "detach",
    lambda func, name, logits, **_: changed(logits, bases=()): "clone",
}
handlers.update({name: handler for handler, names in _TABLE.items() for name in names.split()})
