"""A layer's inputs: which of them wait in its frame, and the saved-tensor hooks that take them there and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ds_memo.errors import MemoError
from ds_memo.remat.call import Call
from ds_memo.remat.recipe import Observed, storable


class DeviceInput:
    """A layer input that waits on the device, not in the frame. It must not be changed before the replay."""

    __slots__ = ("layer", "tensor", "version")

    def __init__(self, layer: str, tensor: torch.Tensor) -> None:
        self.layer = layer  # not the call, which holds this
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def check(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise MemoError(
                f"layer {self.layer}: an argument of shape {tuple(self.tensor.shape)} was changed in place after the layer "
                "began, so the layer cannot be run again as it was. Give each call a tensor of its own."
            )
        return self.tensor


class Input:
    """Stands for a layer input that waits in its frame."""

    __slots__ = ("call", "position")

    def __init__(self, call: Call, position: int) -> None:
        self.call = call
        self.position = position


def pack_watched(call: Call, observed: Observed) -> Callable[[torch.Tensor], Any]:
    def pack(tensor: torch.Tensor) -> Any:
        if not tensor.numel():  # torch 2.11 saves an empty tensor first
            return tensor
        position = len(observed.inputs)
        # Hidden states come first or need a gradient. Others (masks, rotary tables) are shared by all layers: they stay.
        goes = (position == 0 or tensor.requires_grad) and tensor.is_floating_point() and storable(tensor)
        observed.inputs.append(tensor.detach() if goes else None)
        return Input(call, position) if goes else DeviceInput(call.frame.name, tensor)

    return pack


def pack_followed(call: Call) -> Callable[[torch.Tensor], Any]:
    inputs = iter(enumerate(call.recipe.inputs))

    def pack(tensor: torch.Tensor) -> Any:
        if not tensor.numel():
            return tensor
        position, kept = next(inputs, (0, None))
        if kept is None or tensor.shape != kept.shape or tensor.stride() != kept.stride:
            return DeviceInput(call.frame.name, tensor)
        call.engine.keep(call.frame, kept, tensor)
        return Input(call, position)

    return pack


def unpack(value: Any) -> torch.Tensor:
    if isinstance(value, Input):
        return value.call.input_tensor(value.position)
    return value.check() if isinstance(value, DeviceInput) else value


class Lifted(NamedTuple):
    """A call whose tensors that need a gradient are all positional, each once."""

    fn: Callable[..., Any]
    """What the forward calls with `args`."""
    again: Callable[..., Any]
    """What the replay calls with them; it sees dicts and lists as they were before the forward changed them."""
    args: tuple
    bound: dict[str, Any]
    """Keywords that both have bound."""


def lift_keywords(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Lifted:
    """Make keyword tensors that need a gradient positional: torch's checkpoint shows saved-tensor hooks no others.

    A tensor that is given twice becomes one, and the replay gets it back as one: layers ask (attention: ``key is query``).
    """
    if isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    given = {id(value) for value in args if isinstance(value, torch.Tensor)}
    lifted = [
        name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and (value.requires_grad or id(value) in given)
    ]
    rest = {name: value for name, value in kwargs.items() if name not in lifted}
    positional, values = len(args), (*args, *(kwargs[name] for name in lifted))
    call = _with_keywords(fn, positional, lifted, rest)
    containers = {position: value for position, value in enumerate(args) if isinstance(value, (dict, list))}
    if not containers and not any(isinstance(value, (dict, list)) for value in rest.values()):
        return _each_once(Lifted(call, call, values, rest))
    # The layer may put something into a container that it was given, or take it out: the replay gets copies made before.
    as_now = tree_map(_same, (containers, rest))

    def again(*values: Any) -> Any:
        containers, rest = tree_map(_same, as_now)
        own = [containers.get(position, value) for position, value in enumerate(values)]
        return _with_keywords(fn, positional, lifted, rest)(*own)

    return _each_once(Lifted(call, again, values, rest))


def _with_keywords(fn: Callable[..., Any], positional: int, lifted: list[str], rest: dict[str, Any]) -> Callable[..., Any]:
    if not lifted:
        return functools.partial(fn, **rest) if rest else fn

    def call(*values: Any) -> Any:
        return fn(*values[:positional], **rest, **dict(zip(lifted, values[positional:], strict=True)))

    return call


def _each_once(lifted: Lifted) -> Lifted:
    """The same call, of each tensor one."""
    tensors = [id(value) for value in lifted.args if isinstance(value, torch.Tensor)]
    if len(set(tensors)) == len(tensors):
        return lifted
    firsts = {id(value): value for value in lifted.args}
    places = [list(firsts).index(id(value)) for value in lifted.args]
    fn, again = (functools.partial(_placed, call, places) for call in (lifted.fn, lifted.again))
    return Lifted(fn, again, tuple(firsts.values()), lifted.bound)


def _placed(call: Callable[..., Any], places: list[int], *firsts: Any) -> Any:
    return call(*(firsts[place] for place in places))


def _same(value: Any) -> Any:
    return value
