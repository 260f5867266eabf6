"""The ops on lazy logits that go over the vocabulary: losses, choices and reductions, computed tile by tile.

Their results by row are ordinary tensors. softmax keeps the vocabulary, so it is recorded. A sum over all rows that is trained
computes its gradients with it: each tile's logits are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ds_memo.logits.lazy_value import LazyValue
from ds_memo.logits.nodes import Sum
from ds_memo.logits.ops import elementwise
from ds_memo.logits.tensor import LazyLogits, by_row, handlers, of_any, under_autocast


def softmaxes(func: Any, name: str, logits: LazyLogits, dim: int | None = None, *rest: Any, dtype: Any = None, **_: Any) -> Any:
    if not _is_vocabulary(logits, dim):
        return NotImplemented
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
    plain = torch.log_softmax if name == "log_softmax" else torch.softmax
    return elementwise(lambda values: plain(values, -1, dtype=dtype), name, logits)


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
    head_call = logits.content.head_call
    half = torch.float16 in (logits.content.dtype, logits.inputs.hidden_NH.dtype)  # a gradient needs the loss scale to be held
    if logits.requires_grad and torch.is_grad_enabled() and head_call.wanted and not (half or head_call.summed):
        head_call.summed = True
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


def _of_rows(content: LazyValue, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(content.rows, *tensor.shape[len(content.leading) :])


def _is_vocabulary(logits: LazyLogits, dim: Any) -> bool:
    return isinstance(dim, int) and logits.content.by_rows and dim % logits.dim() == logits.dim() - 1


_TABLE: dict[Callable[..., Any], str] = {
    softmaxes: "softmax log_softmax",
    cross_entropy: "cross_entropy nll_loss nll_loss_nd",
    kl_div: "kl_div",
    gather: "gather take_along_dim",
    over_vocabulary: "sum nansum mean max min amax amin argmax argmin logsumexp topk norm std var any all",
}
handlers.update({name: handler for handler, names in _TABLE.items() for name in names.split()})
of_any.update((cross_entropy, kl_div))
