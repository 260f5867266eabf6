"""Calls of layers: caught on their way in, and made again at other lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ds_memo.errors import MemoError
from ds_memo.profile.gathered_params import whole
from ds_memo.remat.call import tensor_leaves
from ds_memo.remat.checkpoint import Layer, Remat
from ds_memo.remat.modes import inside_a_layer
from ds_memo.remat.random_states import forked
from ds_memo.shapes import HiddenShape

_WHOLE = (torch.int32, torch.int64)
_STATISTICS = 1 << 20
"""Bytes. A larger buffer is a table or a quantised weight: no forward changes it, and there may be no room for a copy."""


class LayerCall:
    """A layer and what it was called with, to be called again at other lengths.

    Args:
        layer: its module must be alive.
        fn, args, kwargs: as ds_memo.remat.checkpoint.Remat.run_with takes them.
    """

    def __init__(self, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        if isinstance(fn, partial):
            args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
        self.layer = layer
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self.hidden = next((x for x in tensor_leaves((args, kwargs)) if x.is_floating_point()), None)
        if self.hidden is None or self.hidden.dim() < 2:
            raise MemoError(f"layer {layer.name} takes no hidden states (batch, length, …) that a profile could vary")

    @property
    def batch(self) -> int:
        return self.hidden.shape[0] if self.hidden.dim() > 2 else 1

    @property
    def length(self) -> int:
        return self.hidden.shape[1] if self.hidden.dim() > 2 else self.hidden.shape[0]

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return self.hidden.shape[-1]

    @property
    def source(self) -> int:
        """Length of the other states that it attends to, an encoder's; 0: none, or they are as long as the hidden states.

        They are told from rotary tables and the like by the same batch and at least half the width.
        """
        if self.hidden.dim() < 3:
            return 0
        states = (x for x in self._other_tensors() if x.dim() == self.hidden.dim() and x.is_floating_point())
        states = (x for x in states if x.shape[0] == self.batch and 2 * x.shape[-1] >= self.width)
        return next((x.shape[1] for x in states if x.shape[1] != self.length), 0)

    @property
    def shape(self) -> HiddenShape:
        rest = self.hidden.shape[2 if self.hidden.dim() > 2 else 1 :]
        return HiddenShape(self.batch, self.length, tuple(rest), self.source)

    def others(self, apart: bool = False) -> list[list[Any]]:
        """Shapes and dtypes of the other tensors that it is given (a mask, an encoder's states), in which the word
        "length" stands for its length. Vectors are left out, as the ends of documents: their number is another in each batch.

        Args:
            apart: the word "source" stands for the source's length, too.
        """
        names = {self.length: "length", **({self.source: "source"} if apart else {})}
        return [[names.get(n, n) for n in x.shape] + [str(x.dtype)] for x in self._other_tensors() if x.dim() > 1]

    def _other_tensors(self) -> Iterator[torch.Tensor]:
        return (x for x in tensor_leaves((self._args, self._kwargs)) if x is not self.hidden)

    @property
    def trains(self) -> bool:
        """Whether a parameter or an input of it wants a gradient. If none does, it keeps nothing."""
        return any(x.requires_grad for x in (self.hidden, *self._other_tensors(), *self.layer.parameters))

    def can_shorten(self) -> bool:
        """Whether it is safe to cut the call to a shorter length: the length differs from the batch, and no argument says where
        documents end."""
        return self.length != self.batch and not any(map(self._ends_documents, tree_leaves((self._args, self._kwargs))))

    def _ends_documents(self, value: Any) -> bool:
        """Whether it looks like flash-attention's cu_seqlens, by which kernels would read beyond what was cut."""
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.numel() < 2 or value.dtype not in _WHOLE:
            return False
        first, last = value[[0, -1]].tolist()
        return first == 0 and last >= self.length

    def _dims_of(self, length: int, tensor: torch.Tensor) -> list[int]:
        """The dimensions of a tensor that have this size. Not the last one of hidden states: a model may be as wide as a sequence
        is long."""
        hidden = self.hidden.shape
        states = tensor.dim() == len(hidden) and tensor.shape[-1] == hidden[-1]
        return [dim for dim, size in enumerate(tensor.shape[:-1] if states else tensor.shape) if size == length]

    def at(self, length: int, source: int = 0) -> tuple[Callable[..., Any], tuple, list[torch.Tensor]]:
        """The call with every tensor cut to `length`, cut off from its graph; and those that want a gradient, the hidden states
        first.

        Args:
            source: cut to this where they have the length of that; 0: they stay as they are.
        """
        made: dict[int, torch.Tensor] = {}
        cuts = [(self.length, length), *([(self.source, source)] if source else [])]

        def cut(value: Any) -> Any:
            if _is_block_mask(value):
                queries, keys = (dict(cuts).get(size, size) for size in value.seq_lengths)
                return value._adjust(queries, keys)
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in made:
                short = value.detach()
                for whole_length, part in cuts:
                    for dim in self._dims_of(whole_length, value):
                        short = short.narrow(dim, 0, min(part, whole_length))
                short = short.contiguous()
                made[id(value)] = short.clone() if short.data_ptr() == value.data_ptr() else short
                made[id(value)].requires_grad_(value.requires_grad)
            return made[id(value)]

        args, kwargs = tree_map(cut, (self._args, self._kwargs), is_leaf=_is_block_mask)
        hidden = made[id(self.hidden)].requires_grad_()
        others = [tensor for tensor in made.values() if tensor.requires_grad and tensor is not hidden]
        return (partial(self._fn, **kwargs) if kwargs else self._fn), args, [hidden, *others]


def _is_block_mask(value: Any) -> bool:
    """FlexAttention's mask; its module is slow to import."""
    return type(value).__module__ == "torch.nn.attention.flex_attention" and type(value).__name__ == "BlockMask"


@contextmanager
def beside_the_training(module: nn.Module) -> Iterator[None]:
    """Run something that the training must not see: afterwards buffers have their old values, and saved-tensor hooks of the
    caller (save_on_cpu, or a torch.utils.checkpoint around the whole model) have not taken the profile's tensors for its own.
    """
    # Through .data: the value is the old one again, so autograd need not know of a change.
    buffers = [
        (part, name, buffer, buffer.data.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and buffer.nbytes <= _STATISTICS and not buffer.is_inference()
    ]
    graph, hooks = torch._C._autograd, []
    try:
        while (top := graph._top_saved_tensors_default_hooks(False)) is not None:
            hooks.append(top)
            graph._pop_saved_tensors_default_hooks()
        yield
    finally:
        for pair in reversed(hooks):
            graph._push_saved_tensors_default_hooks(*pair)
        for part, name, buffer, value in buffers:
            buffer.data.copy_(value)
            part._buffers[name] = buffer


def _copied(value: Any) -> Any:
    """A copy, which a forward may change in place."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class _Enough(Exception):
    """Ends a forward of which enough was seen."""


def layer_calls(
    remat: Remat,
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    kinds: Sequence[int],
    enough: Callable[[dict[int, LayerCall]], bool],
) -> dict[int, LayerCall]:
    """Run a forward of the model to catch the first call of each kind of layer, in the order in which they come.

    The layers behind a caught one need its output, so the first layer of each kind runs, with nothing saved for a backward and
    its parameters gathered where ZeRO-3 has them in pieces; later layers of that kind return the same output. Random generators
    and the arguments of the model are left as they were.

    Args:
        args, kwargs: of the model's forward.
        kinds: of each layer, see ds_memo.profile.kinds.
        enough: given the calls so far, whether the forward may end here.

    Raises:
        MemoError: the forward made no layer call.
    """
    calls: dict[int, LayerCall] = {}
    inside: list[Layer] = []
    outputs: dict[Any, Any] = {}

    def catch(layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], _: bool) -> Any:
        if inside or inside_a_layer() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if layer.index >= len(kinds):  # a function that the model checkpoints beside its layers
            with torch.no_grad():
                return fn(*args, **kwargs)
        call, kind = LayerCall(layer, fn, args, kwargs), kinds[layer.index]
        calls.setdefault(kind, call)
        if enough(calls):
            raise _Enough
        key = kind, call.shape
        if key not in outputs:
            inside.append(layer)
            try:
                outputs[key] = _run_once(call, partial(fn, *args, **kwargs))
            finally:
                inside.pop()
        return outputs[key]

    try:
        with remat.instead(catch), forked(remat.engine.device), beside_the_training(model):
            model.forward(*tree_map(_copied, args), **tree_map(_copied, kwargs))
    except _Enough:
        pass
    if not calls:
        raise MemoError(f"{type(model).__name__} ran a training forward without calling a layer")
    return calls


def _run_once(call: LayerCall, run: Callable[[], Any]) -> Any:
    """Run a layer without saving anything. Its outputs want a gradient where they would in training, and are copies: what comes
    behind may change them in place."""
    counted = any(hasattr(parameter, "ds_id") for parameter in call.layer.parameters)  # ZeRO-3 would wait for the backward
    drop = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
    with torch.set_grad_enabled(not counted), drop, whole(call.layer.module()):
        out = run()

    def as_trained(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        trained = call.trains if counted else value.requires_grad
        return value.detach().requires_grad_(trained).clone()

    return tree_map(as_trained, out)
