"""Layer calls: caught in a forward of the model, and repeated at other lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ds_memo.distributed.topology import is_zero3s, ranks_per_sequence
from ds_memo.errors import MemoError
from ds_memo.remat.autocast import autocast_now
from ds_memo.remat.gathered_params import gathered, reshard
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import LayerCall, OwnForward
from ds_memo.remat.layer_state import unchanged
from ds_memo.remat.modes import inside_a_layer
from ds_memo.remat.random_states import KeepsGiven, forked
from ds_memo.remat.remat import LayerRun
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.remat.undo import Undoing
from ds_memo.shapes import HiddenShape

_INTEGERS = (torch.int32, torch.int64)
_LONG = 4096
"""Tokens above which a probe runs only so many of a layer's."""


Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
"""A function, its arguments and its keywords."""
AsCalled = Callable[[Callable[..., Any], tuple, dict[str, Any]], Call]


def as_it_is(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Call:
    """Return a forward and its arguments unchanged."""
    return fn, args, kwargs


class CaughtCall(LayerCall):
    """A layer call that can be repeated at other lengths. Its layer's module must be alive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.autocast = autocast_now()  # of this moment: Accelerate switches it on inside the model's forward
        self.hidden = next((x for x in tensor_leaves((self.args, self.kwargs)) if x.is_floating_point()), None)
        if self.hidden is None or self.hidden.dim() < 2:
            raise MemoError(f"layer {self.layer.name} takes no hidden states (batch, length, …) that a profile could vary")

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
        """Width of the hidden states."""
        return self.hidden.shape[-1]

    @property
    def encoder_length(self) -> int:
        """Length of the encoder's states that the layer attends to; 0: none, or as long as the hidden states.

        An argument counts as such states if it has the same batch and at least half the width; rotary tables do not.
        """
        if self.hidden.dim() < 3:
            return 0
        states = (x for x in self._other_tensors() if x.dim() == self.hidden.dim() and x.is_floating_point())
        states = (x for x in states if x.shape[0] == self.batch and 2 * x.shape[-1] >= self.width)
        return next((x.shape[1] for x in states if x.shape[1] != self.length), 0)

    @property
    def shape(self) -> HiddenShape:
        rest = self.hidden.shape[2 if self.hidden.dim() > 2 else 1 :]
        return HiddenShape(self.batch, self.length, tuple(rest))

    def others(self) -> list[list[Any]]:
        """Return shapes and dtypes of the call's other tensors, such as a mask.

        The word "length" stands for the call's length. Vectors, such as the ends of documents, are left out: their size differs
        from batch to batch.
        """
        tensors = (x for x in self._other_tensors() if x.dim() > 1)
        return [["length" if size == self.length else size for size in x.shape] + [str(x.dtype)] for x in tensors]

    def _other_tensors(self) -> Iterator[torch.Tensor]:
        return (x for x in tensor_leaves((self.args, self.kwargs)) if x is not self.hidden)

    @property
    def compiled_by(self) -> str | None:
        """Name of the backend that torch.compile compiles the layer with; None: it runs uncompiled."""
        fn = self.forward
        return fn.name if isinstance(fn, OwnForward) and fn.refused(self.layer) is None else None

    @property
    def trains(self) -> bool:
        """True if a parameter or an input of the layer requires a gradient. If none does, the layer keeps nothing."""
        return any(x.requires_grad for x in (self.hidden, *self._other_tensors(), *self.layer.parameters))

    def can_shorten(self) -> bool:
        """Return True if the call can be cut: length and batch differ, and documents end where whole rows do."""
        return self.length != self.batch and all(int(ends[-1]) % self.length == 0 for ends in self._document_ends())

    @property
    def packed(self) -> bool:
        """True if an argument holds the ends of documents."""
        return any(True for _ in self._document_ends())

    def _document_ends(self) -> Iterator[torch.Tensor]:
        """Yield arguments like flash-attention's cu_seqlens, by which kernels would read past a cut."""
        for tensor in self._other_tensors():
            if tensor.dim() == 1 and tensor.numel() > 1 and tensor.dtype in _INTEGERS:
                first, last = tensor[[0, -1]].tolist()
                if first == 0 and last >= self.length:
                    yield tensor

    def _ends_at(self, ends: torch.Tensor, length: int) -> torch.Tensor:
        """Return the ends of documents, rows laid end to end, once each row is cut to `length`."""
        row = ends.div(self.length, rounding_mode="floor")
        return torch.unique_consecutive(row * length + (ends % self.length).clamp(max=length))

    def _dims_to_cut(self, tensor: torch.Tensor) -> list[int]:
        """Return the dimensions of a tensor that are the call's length. The width of hidden states never counts."""
        hidden = self.hidden.shape
        states = tensor.dim() == len(hidden) and tensor.shape[-1] == hidden[-1]
        return [dim for dim, size in enumerate(tensor.shape[:-1] if states else tensor.shape) if size == self.length]

    def at(self, length: int) -> tuple[Callable[..., Any], tuple, list[torch.Tensor]]:
        """Return the call with every tensor cut to `length` and detached, and its inputs that require a gradient.

        Documents keep their ends up to the cut, and a keyword "max_…" (max_length_q, max_seqlen) is at most the longest of them.

        Returns:
            The function, its arguments, and the inputs that require a gradient, hidden states first.
        """
        length = min(length, self.length)
        made = {id(ends): self._ends_at(ends, length) for ends in self._document_ends()}
        longest = max((int(ends.diff().max()) for ends in made.values()), default=None)

        def cut(value: Any) -> Any:
            if _is_block_mask(value):
                return value._adjust(*(length if size == self.length else size for size in value.seq_lengths))
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in made:
                short = value.detach()
                for dim in self._dims_to_cut(value):
                    short = short.narrow(dim, 0, length)
                short = short.contiguous()
                made[id(value)] = short.clone() if short.data_ptr() == value.data_ptr() else short
                made[id(value)].requires_grad_(value.requires_grad)
            return made[id(value)]

        args, kwargs = tree_map(cut, (self.args, self.kwargs), is_leaf=_is_block_mask)
        if longest is not None:
            kwargs = {name: _at_most(longest, value) if name.startswith("max_") else value for name, value in kwargs.items()}
        hidden = made[id(self.hidden)].requires_grad_()
        others = [tensor for tensor in made.values() if tensor.requires_grad and tensor is not hidden]
        return (partial(self.forward, **kwargs) if kwargs else self.forward), args, [hidden, *others]


def _at_most(longest: int, value: Any) -> Any:
    """Return a number, or a tensor of one, that is not above `longest`; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.clamp(max=longest)
    return min(longest, value) if type(value) is int else value


def _is_block_mask(value: Any) -> bool:
    """Return True for FlexAttention's mask, told by its name: its module is slow to import."""
    return type(value).__module__ == "torch.nn.attention.flex_attention" and type(value).__name__ == "BlockMask"


@contextmanager
def hidden_from_training(module: nn.Module) -> Iterator[None]:
    """Run code that must leave no trace in training: undo what it does to the module, and suspend the caller's saved-tensor
    hooks (save_on_cpu, or a torch.utils.checkpoint around the whole model) meanwhile.
    """
    graph = torch._C._autograd
    hooks: list[Any] = []

    def put_back() -> None:
        while hooks:
            if graph._top_saved_tensors_default_hooks(False) != hooks[-1]:
                graph._push_saved_tensors_default_hooks(*hooks[-1])
            hooks.pop()

    with Undoing(put_back), unchanged(module):
        while (top := graph._top_saved_tensors_default_hooks(False)) is not None:
            hooks.append(top)
            graph._pop_saved_tensors_default_hooks()
        yield


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, which a forward may change in place."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class _Enough(Exception):
    """Ends a forward once enough calls are caught."""


def layer_calls(
    instead: Callable[[LayerRun], AbstractContextManager[None]],
    device: torch.device,
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    kinds: Sequence[int],
    enough: Callable[[dict[int, CaughtCall]], bool],
    as_called: AsCalled = as_it_is,
) -> dict[int, CaughtCall]:
    """Run a forward of the model and catch the first call of each kind of layer, in call order.

    Later layers need the output of a caught one. So the first layer of each kind runs, with nothing saved for a backward and its
    ZeRO-3 parameters gathered; later layers of that kind return the same output. Of a long sequence it runs the first tokens:
    whole it may not fit. Random generators and the model's arguments are left unchanged.

    Args:
        instead: returns a context in which every layer call goes to a function, as Remat.instead.
        args, kwargs: arguments of the model's forward.
        kinds: the kind of each layer, see ds_memo.profile.layer_kinds.
        enough: given the calls so far, returns True if the forward may end.
        as_called: returns a layer's forward and arguments as the model, if it is compiled, calls it.

    Raises:
        MemoError: the forward made no layer call.
    """
    calls: dict[int, CaughtCall] = {}
    inside: list[Layer] = []
    outputs: dict[Any, Any] = {}

    def catch(layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if inside or inside_a_layer() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if layer.index >= len(kinds):  # a function that the model checkpoints, and no layer
            with torch.no_grad():
                return fn(*args, **kwargs)
        call, kind = CaughtCall(layer, *as_called(fn, args, kwargs)), kinds[layer.index]
        calls.setdefault(kind, call)
        if enough(calls):
            raise _Enough
        key = kind, call.shape
        if key not in outputs:
            inside.append(layer)
            try:
                outputs[key] = _output(call, partial(uncompiled(fn), *args, **kwargs))
            finally:
                inside.pop()
        return outputs[key]

    try:
        with instead(catch), forked(device), hidden_from_training(model), KeepsGiven():
            try:
                model.forward(*tree_map(_copied, args), **tree_map(_copied, kwargs))
            finally:
                reshard(model)  # hooks behind the layers that were caught have not run
    except _Enough:
        pass
    if not calls:
        raise MemoError(f"{type(model).__name__} ran a training forward without calling a layer")
    return calls


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward, or a partial of it, as it is without torch.compile."""
    if isinstance(fn, partial):
        return partial(uncompiled(fn.func), *fn.args, **fn.keywords)
    return fn.plain if isinstance(fn, OwnForward) else fn


def _output(call: CaughtCall, run: Callable[[], Any]) -> Any:
    """Return what a layer returns; for a long sequence its hidden states in that place, if it returns no other tensor."""
    if call.length <= _LONG or call.encoder_length or ranks_per_sequence(call.layer.module()) > 1 or not call.can_shorten():
        return _run_once(call, run)
    fn, args, (hidden, *_) = call.at(_LONG)
    out = _run_once(call, partial(uncompiled(fn), *args))
    if [tensor.shape for tensor in tensor_leaves(out)] != [hidden.shape]:
        return _run_once(call, run)

    def whole(value: Any) -> Any:
        return call.hidden.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    return tree_map(whole, out)


def _run_once(call: CaughtCall, run: Callable[[], Any]) -> Any:
    """Run a layer without saving anything. Its outputs require a gradient where they would in training. They are copies, because
    later code may change them in place."""
    counted = any(map(is_zero3s, call.layer.parameters))  # ZeRO-3 would wait for the backward
    drop = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
    with torch.set_grad_enabled(not counted), drop, gathered(call.layer.module()):
        out = run()

    def as_trained(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        trained = call.trains if counted else value.requires_grad
        return value.detach().requires_grad_(trained).clone()

    return tree_map(as_trained, out)
