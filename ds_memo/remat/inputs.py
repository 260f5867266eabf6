"""A layer's inputs: which ones its frame keeps, and the saved-tensor hooks that move them."""

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
    """A layer input that stays on the device, outside the frame. It must not be changed before the replay."""

    __slots__ = ("layer", "tensor", "version")

    def __init__(self, layer: str, tensor: torch.Tensor) -> None:
        self.layer = layer  # not the call: the call refers to this object
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def check(self) -> torch.Tensor:
        """Return the tensor. Raise MemoError if it was changed in place since."""
        if self.version is not None and self.tensor._version != self.version:
            raise MemoError(
                f"layer {self.layer}: an argument of shape {tuple(self.tensor.shape)} was changed in place after the layer "
                "began, so the layer cannot be run again as it was. Give each call a tensor of its own."
            )
        return self.tensor


def analysing_pack(call: Call, observed: Observed) -> Callable[[torch.Tensor], Any]:
    """Return the pack hook of a call that is analysed: it decides which inputs the frame keeps."""

    def pack(tensor: torch.Tensor) -> Any:
        if not tensor.numel():  # torch 2.11 saves an empty tensor first
            return tensor
        position = len(observed.inputs)
        # Hidden states come first or need a gradient. All layers share the others (masks, rotary tables): device inputs.
        goes = (position == 0 or tensor.requires_grad) and tensor.is_floating_point() and storable(tensor)
        observed.inputs.append(tensor.detach() if goes else None)
        return functools.partial(call.input_tensor, position) if goes else DeviceInput(call.frame.name, tensor).check

    return pack


def recording_pack(call: Call) -> Callable[[torch.Tensor], Any]:
    """Return the pack hook of a call that follows its recipe."""
    inputs = iter(enumerate(call.recipe.inputs))

    def pack(tensor: torch.Tensor) -> Any:
        if not tensor.numel():
            return tensor
        position, kept = next(inputs, (0, None))
        if kept is None or tensor.shape != kept.shape or tensor.stride() != kept.stride:
            return DeviceInput(call.frame.name, tensor).check
        call.engine.keep(call.frame, kept, tensor)
        return functools.partial(call.input_tensor, position)

    return pack


def unpack(value: Any) -> torch.Tensor:
    """Return the tensor from what a pack hook returned: a tensor as it is, or a function."""
    return value if isinstance(value, torch.Tensor) else value()


class Lifted(NamedTuple):
    """A call in which every tensor that needs a gradient is positional, and no tensor comes twice."""

    fn: Callable[..., Any]
    """The forward calls it with `args`."""
    replay: Callable[..., Any]
    """The replay calls it with `args`. It gets dicts and lists as they were before the forward changed them."""
    args: tuple
    bound: dict[str, Any]
    """Keywords that `fn` and `replay` have bound."""


def lift_keywords(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Lifted:
    """Make keyword tensors that need a gradient positional: torch's checkpoint gives saved-tensor hooks no others.

    A tensor that is passed twice is lifted once, and the replay gets one tensor: layers test identity (``key is query``).
    """
    given, containers = set(), {}
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            given.add(id(value))
        elif isinstance(value, (dict, list)):
            containers[position] = value
    lifted, rest, has_containers = [], {}, bool(containers)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            if value.requires_grad or id(value) in given:
                lifted.append(name)
                continue
        elif isinstance(value, (dict, list)):
            has_containers = True
        rest[name] = value
    positional, values = len(args), (*args, *[kwargs[name] for name in lifted])
    call = _with_keywords(fn, positional, lifted, rest)
    if not has_containers:
        return _each_once(Lifted(call, call, values, rest))
    # The layer may add to a container that it was given, or remove from it: the replay gets copies made before the forward.
    original = _containers_copied((containers, rest))

    def replay(*values: Any) -> Any:
        containers, rest = _containers_copied(original)
        own = [containers.get(position, value) for position, value in enumerate(values)]
        return _with_keywords(fn, positional, lifted, rest)(*own)

    return _each_once(Lifted(call, replay, values, rest))


def _with_keywords(fn: Callable[..., Any], positional: int, lifted: list[str], rest: dict[str, Any]) -> Callable[..., Any]:
    if not lifted:
        return functools.partial(fn, **rest) if rest else fn

    def call(*values: Any) -> Any:
        return fn(*values[:positional], **rest, **dict(zip(lifted, values[positional:], strict=True)))

    return call


def _each_once(lifted: Lifted) -> Lifted:
    """Return the same call with each tensor passed once."""
    tensors = [id(value) for value in lifted.args if isinstance(value, torch.Tensor)]
    if len(set(tensors)) == len(tensors):
        return lifted
    firsts = {id(value): value for value in lifted.args}
    positions = [list(firsts).index(id(value)) for value in lifted.args]

    def from_firsts(call: Callable[..., Any], *firsts: Any) -> Any:
        return call(*(firsts[position] for position in positions))

    fn, replay = (functools.partial(from_firsts, call) for call in (lifted.fn, lifted.replay))
    return Lifted(fn, replay, tuple(firsts.values()), lifted.bound)


def _containers_copied(tree: Any) -> Any:
    return tree_map(lambda value: value, tree)
