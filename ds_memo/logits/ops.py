"""The ops on lazy logits: recorded, done on the maps of rows, or computed tile by tile.

| op                                              | what is done                                                    |
|-------------------------------------------------|-----------------------------------------------------------------|
| view, slices, chunk, masks of rows, transpose   | the same on the maps of rows                                    |
| casts, scale, tanh, bias, masked_fill           | recorded, and done again in each tile; in place, too            |
| softmax, cross_entropy, gather, argmax, sums    | vocabulary.py: tile by tile, results by row                     |

What PyTorch makes a view of is a view here: it shares memory, and follows changes in place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_memo.logits.lazy_value import KeptOperand, LazyValue, OtherHead, RowTile
from ds_memo.logits.shared_memory import View
from ds_memo.logits.tensor import LazyLogits, alias, by_row, change, derive, handlers, in_place, of_any, view_of
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
    kin = [
        logits for logits in own if logits.content.head_call is content.head_call and logits.content.maps[0] is content.maps[0]
    ]
    widest = max((logits.content for logits in kin), key=lambda each: len(each.maps))
    if not content.by_rows or any(any(a is not b for a, b in zip(logits.content.maps, widest.maps)) for logits in kin):  # noqa: B905
        return NotImplemented
    maps, operands = list(widest.maps), list(widest.operands)
    kept = [each for logits in kin for each in logits.content.kept]

    def by_rows(operand: torch.Tensor | OtherHead) -> Callable[[RowTile], torch.Tensor]:
        number = len(maps)
        maps.append(torch.arange(content.rows, device=content.device).view(content.leading))
        operands.append(operand)
        return lambda tile: tile.operand(number)

    def prepared(value: Any) -> Callable[[RowTile], Any]:
        if isinstance(value, LazyLogits):
            if any(value is logits for logits in kin):
                return _value_of(value.content.expression, detached=base.requires_grad and not value.requires_grad)
            trained = value.requires_grad and torch.is_grad_enabled()
            if trained or value.content.leading != content.leading or not value.content.by_rows:
                raise _Unknown
            return by_rows(OtherHead(value.content, value.inputs))
        if not torch.is_tensor(value):
            return lambda tile: value
        if value.requires_grad and torch.is_grad_enabled():
            raise _Unknown
        kept.append(now := KeptOperand(value.detach(), content.few))
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

    def expression(tile: RowTile) -> torch.Tensor:
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


def _value_of(expression: Callable[[RowTile], torch.Tensor], detached: bool) -> Callable[[RowTile], torch.Tensor]:
    """Return a function that holds no logits: it lives as long as the graph does."""
    return (lambda tile: tile.values(expression).detach()) if detached else (lambda tile: tile.values(expression))


def _sample(content: LazyValue, kin: list[LazyLogits], expression: Callable[[RowTile], torch.Tensor]) -> torch.Tensor:
    """Return the expression's values of no rows: their dtype and size of vocabulary."""
    none = replace(content, maps=tuple(each.reshape(-1)[:0] for each in content.maps))
    known = {
        logits.content.expression: torch.empty(0, logits.content.vocabulary, dtype=logits.dtype, device=logits.device)
        for logits in kin
    }
    with torch.no_grad():
        return expression(RowTile(none, slice(0, 0), known))


def put(func: Any, name: str, logits: LazyLogits, key: Any, value: Any) -> Any:
    """Set entries to a number: those of a mask, or of some of the vocabulary in all rows."""
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
    return NotImplemented


def _whole_key(logits: LazyLogits, key: Any) -> list[Any]:
    """Return an index of each dimension; that of the vocabulary is the last."""
    key = list(key) if isinstance(key, tuple) else [key]
    used = sum(k.dim() if torch.is_tensor(k) and k.dtype == torch.bool else k is not None for k in key if k is not Ellipsis)
    spot = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
    key[spot : spot + 1] = [slice(None)] * (logits.dim() - used)
    return key


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
    return derive(first, replace(contents[0], maps=maps))


def _columns(logits: LazyLogits, part: slice | int) -> LazyLogits:
    """Return a view of some of the vocabulary, or of one entry."""
    one = isinstance(part, int)
    columns = slice(part, part + 1 or None) if isinstance(part, int) else part

    def content(of: LazyValue) -> LazyValue:
        def expression(tile: RowTile) -> torch.Tensor:
            return tile.values(of.expression)[:, columns]

        return replace(of, expression=expression, vocabulary=len(range(of.vocabulary)[columns]), column=one)

    return _view(View(logits, content, lambda whole: whole[..., part]))


def _view(how: View) -> LazyLogits:
    return view_of(how, how.values(_stand_in(how.of)).stride())


def transposed(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if (
        logits.content.column
        or logits.dim() != 3
        or func(torch.empty(2, 3, 5, device="meta"), *args, **kwargs).shape != (2, 5, 3)
    ):
        return NotImplemented

    def content(of: LazyValue) -> LazyValue:
        return replace(of, moved=not of.moved)

    return _view(View(logits, content, lambda whole: func(whole, *args, **kwargs)))


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

    def maps(of: LazyValue) -> Any:
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

            def content(of_parent: LazyValue) -> LazyValue:
                return replace(of_parent, maps=tuple(map(of, maps(of_parent))), chosen={})

            def values(whole: torch.Tensor) -> torch.Tensor:
                """Return the part as a view of its own: PyTorch refuses one of several once their base has changed."""
                part = of(made)
                return whole.as_strided(part.shape, part.stride(), whole.storage_offset() + part.storage_offset())

            return view_of(View(logits, content, values if several else call), of(made).stride())
        return derive(logits, replace(logits.content, maps=tuple(map(of, found))))

    if not several:
        return one(lambda result: result)
    return tuple(one(operator.itemgetter(index)) for index in range(len(found[0])))


def _new(func: Any, name: str, logits: LazyLogits, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(torch.empty((), dtype=logits.dtype, device=logits.device).expand(logits.shape), *args, **kwargs)


def contiguous(func: Any, name: str, logits: LazyLogits, **_: Any) -> LazyLogits:
    return logits if logits.is_contiguous() else derive(logits, logits.content)


_TABLE: dict[Callable[..., Any], str] = {
    elementwise: "add sub mul div truediv radd rsub rmul rdiv rtruediv rpow pow neg exp tanh log log2 sigmoid clamp clamp_min "
    "clamp_max abs square sqrt true_divide multiply divide subtract masked_fill where nan_to_num isnan isinf isfinite eq ne lt "
    "le gt ge logical_not relu softplus log1p expm1 float_power iadd isub imul itruediv ipow",
    casts: "float half bfloat16 double to type type_as cpu cuda",
    on_rows: "view reshape flatten squeeze unsqueeze split chunk tensor_split narrow select index_select unbind",
    chosen: "getitem",
    put: "setitem",
    transposed: "transpose permute swapaxes swapdims movedim moveaxis mT",
    _new: "new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like rand_like randn_like",
    joined: "cat concat concatenate stack",
    contiguous: "contiguous",
    lambda func, name, logits: iter(logits.unbind(0)): "iter",
    lambda func, name, logits: alias(logits): "detach data",
    lambda func, name, logits, **_: derive(logits, logits.content): "clone",
}
handlers.update({name: handler for handler, names in _TABLE.items() for name in names.split()})
in_place.update((elementwise, put))
of_any.update((elementwise, joined))
