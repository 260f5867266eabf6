"""The ops on lazy logits: recorded, done on the maps of rows, or computed tile by tile.

| op                                              | what is done                                                    |
|-------------------------------------------------|-----------------------------------------------------------------|
| view, slices, chunk, masks of rows, transpose   | the same on the maps of rows                                    |
| casts, scale, tanh, bias, masked_fill, softmax  | recorded, and done again in each tile; in place, too            |
| cross_entropy, gather, argmax, topk, sums       | tile by tile, results by row; then ordinary tensors             |

What PyTorch makes a view of is a view here: it shares memory, and follows changes in place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from ds_memo.logits.content import Content, Kept, Other, Tile
from ds_memo.logits.nodes import Sum
from ds_memo.logits.tensor import LazyLogits, alias, by_row, change, derive, handlers, in_place, of_any, under_autocast, view_of
from ds_memo.remat.autocast import autocast_as, autocast_now
from ds_memo.remat.tensors import storage_of

_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


class _Unknown(Exception):
    """An operand that cannot be split by rows."""


# ---- recorded


def elementwise(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Record a function of each row. Operands are numbers, vectors of the vocabulary, or have as many rows as the logits."""
    own = [value for value in (*args, *kwargs.values()) if isinstance(value, LazyLogits)]
    writes = func.__name__.startswith("__i") or (func.__name__.endswith("_") and not func.__name__.endswith("__"))
    base = max(own, key=lambda logits: logits.requires_grad)
    content, states = args[0].content if writes else base.content, autocast_now()
    kin = [logits for logits in own if logits.content.source is content.source and logits.content.maps[0] is content.maps[0]]
    widest = max((logits.content for logits in kin), key=lambda each: len(each.maps))
    if not content.by_rows or any(any(a is not b for a, b in zip(logits.content.maps, widest.maps)) for logits in kin):  # noqa: B905
        return NotImplemented
    maps, operands = list(widest.maps), list(widest.operands)
    kept = [each for logits in kin for each in logits.content.kept]

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
            if trained or value.content.leading != content.leading or not value.content.by_rows:
                raise _Unknown
            return by_rows(Other(value.content, value.rows))
        if not torch.is_tensor(value):
            return lambda tile: value
        if value.requires_grad and torch.is_grad_enabled():
            raise _Unknown
        kept.append(now := Kept(value.detach(), content.few))
        value = now.get()
        if value.dim() == 0:
            return lambda tile: value
        shape = torch.broadcast_shapes(value.shape[:-1], content.leading)
        if value.shape[-1] not in (1, content.vocabulary) or shape != content.leading:
            raise _Unknown
        if all(size == 1 for size in value.shape[:-1]):
            return lambda tile: now.get().reshape(-1)
        rows = by_rows(value.expand(*content.leading, value.shape[-1]).reshape(content.rows, value.shape[-1]))
        return lambda tile: now.get() is value and rows(tile)

    try:
        positional, named = [prepared(value) for value in args], {key: prepared(value) for key, value in kwargs.items()}
    except _Unknown:
        return NotImplemented

    def expression(tile: Tile) -> torch.Tensor:
        values = [value(tile) for value in positional]
        if writes:
            values[0] = values[0].clone()
        with autocast_as(states):
            return func(*values, **{key: value(tile) for key, value in named.items()})

    sample = _sample(replace(content, maps=tuple(maps), operands=tuple(operands)), kin, expression)
    new = replace(
        content,
        expression=expression,
        maps=content.maps if len(maps) == len(content.maps) else tuple(maps),
        operands=tuple(operands),
        kept=tuple(kept),
        dtype=sample.dtype,
        vocabulary=sample.shape[-1],
    )
    return change(args[0], new, base.requires_grad and torch.is_grad_enabled()) if writes else derive(base, new)


def _value_of(expression: Callable[[Tile], torch.Tensor], detached: bool) -> Callable[[Tile], torch.Tensor]:
    """Return a function that holds no logits: it lives as long as the graph does."""
    return (lambda tile: tile.values(expression).detach()) if detached else (lambda tile: tile.values(expression))


def _sample(content: Content, kin: list[LazyLogits], expression: Callable[[Tile], torch.Tensor]) -> torch.Tensor:
    """Return the expression's values of no rows: their dtype and size of vocabulary."""
    none = replace(content, maps=tuple(each.reshape(-1)[:0] for each in content.maps))
    known = {
        logits.content.expression: torch.empty(0, logits.content.vocabulary, dtype=logits.dtype, device=logits.device)
        for logits in kin
    }
    with torch.no_grad():
        return expression(Tile(none, slice(0, 0), known))


def put(func: Any, name: str, logits: LazyLogits, key: Any, value: Any) -> Any:
    """Set entries to a number: those of a mask, of chosen rows, or of some of the vocabulary in all rows."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.requires_grad or isinstance(value, LazyLogits):
            return NotImplemented
        value = value.detach().clone().reshape(())
    if isinstance(key, torch.Tensor) and key.dtype == torch.bool and key.dim() >= len(logits.content.leading):
        mask = key if key.dim() == logits.dim() else key[..., None]
        return elementwise(torch.Tensor.masked_fill_, name, logits, mask, value)
    *rows, of_vocabulary = _whole_key(logits, key)
    if all(isinstance(part, slice) and part == slice(None) for part in rows):
        if isinstance(of_vocabulary, torch.Tensor):
            of_vocabulary = of_vocabulary.clone()

        def filled_(values: torch.Tensor) -> torch.Tensor:
            values[:, of_vocabulary] = value
            return values

        return elementwise(filled_, name, logits)
    part = chosen(func, name, logits, key)
    is_view = isinstance(part, LazyLogits) and part.owner is logits.owner
    return elementwise(torch.Tensor.fill_, name, part, value) if is_view else NotImplemented


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
    if logits.content.column:
        return NotImplemented
    if device is not None and device.type != logits.device.type:  # tile by tile, so that no device holds all of it
        (there,) = by_row(logits, lambda values: values.to(dtype or values.dtype), device=device)
        return there.movedim(-1, 1) if logits.content.moved else there
    if dtype is None or dtype == logits.dtype:
        return derive(logits, logits.content) if kwargs.get("copy") else logits
    return NotImplemented if logits.content.moved else elementwise(lambda values: values.to(dtype), name, logits)


# ---- on the maps of rows


def on_rows(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Do the same to the maps, which lack the vocabulary."""
    content, dims = logits.content, logits.dim()
    if not content.by_rows:
        return NotImplemented

    def choose(choice: Callable[[torch.Tensor], Any]) -> Any:
        return _choose(logits, choice, lambda whole: func(whole, *args, **kwargs), (name, args, kwargs))

    if name in ("view", "reshape"):
        shape = args[0] if args and isinstance(args[0], (tuple, list)) else args or kwargs.get("shape", ())
        inferred = shape and shape[-1] == -1 and math.prod(shape[:-1]) == content.rows
        if not shape or isinstance(shape[0], torch.dtype) or not (inferred or shape[-1] == content.vocabulary):
            return NotImplemented
        return choose(lambda each: each.reshape(shape[:-1]))
    if name == "flatten":
        start, end = (list(args) + [kwargs.get("start_dim", 0), kwargs.get("end_dim", -1)][len(args) :])[:2]
        return NotImplemented if end % dims == dims - 1 else choose(lambda each: each.flatten(start % dims, end % dims))
    if name == "squeeze" and not (args or kwargs):
        return choose(torch.squeeze) if content.vocabulary > 1 else NotImplemented
    where = 1 if name in ("split", "chunk", "tensor_split") else 0
    named = dict(kwargs)
    dim = named.pop("dim", args[where] if len(args) > where else 0)
    size = dims + 1 if name == "unsqueeze" else dims
    if isinstance(dim, int) and dim % dims == dims - 1 and name in ("select", "index_select"):
        return chosen(func, name, logits, (..., named.get("index", args[-1])))
    if not isinstance(dim, int) or dim % size == size - 1 or (name == "squeeze" and len(args) > 1):
        return NotImplemented
    call, before, after = getattr(torch.Tensor, name), args[:where], args[where + 1 :]
    return choose(lambda each: call(each, *before, dim % size, *after, **named))


def chosen(func: Any, name: str, logits: LazyLogits, key: Any) -> Any:
    """Return logits[key]: rows, and some of the vocabulary."""
    if not logits.content.by_rows:
        return NotImplemented
    base, (*rows, of_vocabulary) = logits, _whole_key(logits, key)
    indices: list[Any] = [k for k in rows if isinstance(k, (list, torch.Tensor))]
    if isinstance(of_vocabulary, (list, torch.Tensor)):
        listed = torch.as_tensor(of_vocabulary, device=logits.device).clone()
        if listed.dim() != 1 or any(type(k) is not slice for k in rows):
            return NotImplemented
        logits = elementwise(lambda values: values[:, listed], name, logits)  # a copy
    some = bool(indices) or any(k != slice(None) for k in rows)
    if isinstance(of_vocabulary, slice) and (of_vocabulary != slice(None) or not some):
        logits = _columns(logits, of_vocabulary)
    if some:
        try:
            logits = _choose(logits, lambda each: each[tuple(rows)], lambda whole: whole[(*rows, slice(None))], rows)
        except IndexError:  # PyTorch takes any index where no entry of the vocabulary is asked for
            return NotImplemented
    if isinstance(of_vocabulary, int):
        logits = _columns(logits, of_vocabulary)
    logits.taken = base, key
    return logits


def joined(func: Any, name: str, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Join rows of one call of the head."""
    if not isinstance(tensors, (list, tuple)) or kwargs or not all(isinstance(each, LazyLogits) for each in tensors):
        return NotImplemented
    contents, first = [each.content for each in tensors], tensors[0]
    size = first.dim() + (name == "stack")
    alike = all(each.by_rows and each.expression is contents[0].expression for each in contents)
    graphs = {each.requires_grad for each in tensors}
    if not alike or len(graphs) > 1 or dim % size == size - 1 or any(each.memory.hooked for each in tensors):
        return NotImplemented
    for each in tensors:
        each.memory.joined = True
    maps = tuple(func(list(of_all), dim % size) for of_all in zip(*(each.maps for each in contents), strict=True))
    return derive(first, replace(contents[0], maps=maps, distinct=False))


def _columns(logits: LazyLogits, part: slice | int) -> LazyLogits:
    """Return a view of some of the vocabulary, or of one entry."""
    one = isinstance(part, int)
    columns = slice(part, part + 1 or None) if isinstance(part, int) else part

    def content(of: Content) -> Content:
        def expression(tile: Tile) -> torch.Tensor:
            return tile.values(of.expression)[:, columns]

        return replace(of, expression=expression, vocabulary=len(range(of.vocabulary)[columns]), column=one)

    return _view(logits, lambda whole: whole[..., part], content=content, columns=columns)


def _view(logits: LazyLogits, values: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> LazyLogits:
    return view_of(logits, values(_stand_in(logits)).stride(), values=values, **how)


def transposed(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if (
        logits.content.column
        or logits.dim() != 3
        or func(torch.empty(2, 3, 5, device="meta"), *args, **kwargs).shape != (2, 5, 3)
    ):
        return NotImplemented

    def content(of: Content) -> Content:
        return replace(of, moved=not of.moved)

    return _view(logits, lambda whole: func(whole, *args, **kwargs), content=content)


def _stand_in(logits: LazyLogits) -> torch.Tensor:
    return torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")


def _choose(logits: LazyLogits, choice: Callable[[torch.Tensor], Any], call: Callable[[torch.Tensor], Any], how: Any) -> Any:
    """Return the logits of chosen rows in their order, several where `choice` gives several.

    Args:
        choice: of a map.
        call: the same of logits; PyTorch tells by it what is a view.
        how: name and arguments, or an index of each dimension of the rows.
    """
    tensors = [leaf for leaf in tree_leaves(how) if isinstance(leaf, torch.Tensor)]
    text = None if tensors else repr(how)

    def maps(of: Content) -> Any:
        """Return the choice of each map. The same choice made twice is one, so that terms take one loop."""
        if text is None:
            return [choice(each) for each in of.maps]
        if text not in of.chosen:
            of.chosen[text] = [choice(each) for each in of.maps]
        return of.chosen[text]

    found, stand_in = maps(logits.content), _stand_in(logits)
    several = not torch.is_tensor(found[0])
    made = None if tensors else call(stand_in)  # an index that is a tensor makes a copy

    def one(of: Callable[[Any], Any]) -> LazyLogits:
        if made is not None and storage_of(of(made)) == storage_of(stand_in):

            def content(of_parent: Content) -> Content:
                return replace(of_parent, maps=tuple(map(of, maps(of_parent))), chosen={})

            def values(whole: torch.Tensor) -> torch.Tensor:
                """Return the part as a view of its own: PyTorch refuses one of several once their base has changed."""
                part = of(made)
                return whole.as_strided(part.shape, part.stride(), whole.storage_offset() + part.storage_offset())

            return view_of(logits, of(made).stride(), content=content, values=values if several else call)
        once = all(mask.dtype == torch.bool for mask in tensors) and not any(isinstance(each, list) for each in how)
        return derive(logits, replace(logits.content, maps=tuple(map(of, found)), distinct=logits.content.distinct and once))

    if not several:
        return one(lambda result: result)
    return tuple(one(operator.itemgetter(index)) for index in range(len(found[0])))


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
    if logits.content.column or (logits.dim() > 2 and not logits.content.moved):
        return NotImplemented
    content, classes = logits.content, not target.is_floating_point()
    if not classes and content.moved:
        target = target.movedim(1, -1)
    wide = torch.promote_types(content.dtype, torch.float32)
    weight = None if weight is None else weight.detach().to(wide, copy=True)

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


def gather(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    index = kwargs.get("index", kwargs.get("indices", next(filter(torch.is_tensor, args), None)))
    dim = kwargs.get("dim", next((value for value in args if isinstance(value, int)), None))
    if not isinstance(logits, LazyLogits) or not _is_vocabulary(logits, dim) or index.shape[:-1] != logits.content.leading:
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
    if not logits.content.by_rows:
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
    return isinstance(dim, int) and logits.content.by_rows and dim % logits.dim() == logits.dim() - 1


def _new(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(torch.empty((), dtype=logits.dtype, device=logits.device).expand(logits.shape), *args, **kwargs)


def contiguous(func: Any, name: str, logits: LazyLogits, **_: Any) -> LazyLogits:
    return logits if logits.is_contiguous() else derive(logits, logits.content)


_TABLE: dict[Callable[..., Any], str] = {
    elementwise: "add sub mul div truediv radd rsub rmul rdiv rtruediv rpow pow neg exp tanh log log2 sigmoid clamp clamp_min "
    "clamp_max abs square sqrt true_divide multiply divide subtract masked_fill where nan_to_num isnan isinf isfinite eq ne lt "
    "le gt ge logical_not relu softplus log1p expm1 float_power iadd isub imul itruediv ipow",
    softmaxes: "softmax log_softmax",
    casts: "float half bfloat16 double to type type_as cpu cuda",
    on_rows: "view reshape flatten squeeze unsqueeze split chunk tensor_split narrow select index_select unbind",
    chosen: "getitem",
    put: "setitem",
    transposed: "transpose permute swapaxes swapdims movedim moveaxis mT",
    cross_entropy: "cross_entropy nll_loss nll_loss_nd",
    kl_div: "kl_div",
    gather: "gather take_along_dim",
    over_vocabulary: "sum nansum mean max min amax amin argmax argmin logsumexp topk norm std var any all",
    _new: "new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like rand_like randn_like",
    joined: "cat concat concatenate stack",
    contiguous: "contiguous",
    lambda func, name, logits: iter(logits.unbind(0)): "iter",
    lambda func, name, logits: alias(logits): "detach data",
    lambda func, name, logits, **_: derive(logits, logits.content): "clone",
}
handlers.update({name: handler for handler, names in _TABLE.items() for name in names.split()})
in_place.update((elementwise, put))
of_any.update((elementwise, joined, cross_entropy, kl_div))
