"""What surrounds the run of a tile: aliases of parameters, autocast, and an autograd that saves nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.call import generator_of
from ds_memo.remat.random_states import forked

Autocast = tuple[tuple[str, torch.dtype], ...]
"""Devices on which autocast is on, with its dtypes."""


@contextmanager
def aliased(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Have a module use aliases of some of its parameters inside the block; return them."""
    aliases = {parameter: parameter.detach().requires_grad_() for parameter in parameters}
    places = [
        (inner._parameters, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None and parameter in aliases
    ]
    for table, name, parameter in places:
        table[name] = aliases[parameter]  # type: ignore[assignment]
    try:
        yield list(aliases.values())
    finally:
        for table, name, parameter in places:
            table[name] = parameter


class InLinear(Protocol):
    """A mode that is on the stack only while F.linear runs."""

    def linear_begins(self) -> None: ...

    def linear_ends(self) -> None: ...


class _Thread(threading.local):
    in_linear: InLinear | None = None


thread = _Thread()


def _linear(*args: Any, **kwargs: Any) -> torch.Tensor:
    if torch.compiler.is_compiling() or (mode := thread.in_linear) is None:
        return torch._C._nn.linear(*args, **kwargs)
    thread.in_linear = None
    mode.linear_begins()
    try:
        return torch._C._nn.linear(*args, **kwargs)
    finally:
        mode.linear_ends()
        thread.in_linear = mode


@contextmanager
def own_linear() -> Iterator[None]:
    """Have F.linear be PyTorch's own inside the block, and tell `thread.in_linear` of its calls.

    ZeRO-3 puts one in its place whose weight gradients are not seen.
    """
    linear, F.linear = F.linear, _linear
    try:
        yield
    finally:
        F.linear = linear


def generators(device: torch.device) -> list[bytes]:
    """Return the states of PyTorch's generators, of the host and of a device."""
    used = dict.fromkeys((torch.default_generator, generator_of(device)))
    return [generator.get_state().numpy().tobytes() for generator in used]


def set_generators(states: list[bytes] | None, device: torch.device) -> None:
    """Give the generators the states that they had; None: leave them."""
    for generator, state in zip(dict.fromkeys((torch.default_generator, generator_of(device))), states or (), strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@contextmanager
def from_generators(states: list[bytes] | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from these states inside the block; None: nothing draws."""
    if states is None:
        yield
        return
    with forked(device):
        set_generators(states, device)
        yield


def autocast_now() -> Autocast:
    return tuple((device, torch.get_autocast_dtype(device)) for device in ("cuda", "cpu") if torch.is_autocast_enabled(device))


@contextmanager
def autocast_again(autocast: Autocast) -> Iterator[None]:
    """Switch autocast on inside the block, as it was."""
    with ExitStack() as stack:
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off inside the block, as it is in a backward. Its casts of weights are kept for the next tile."""
    if not autocast_now():  # the usual case, several times per tile
        yield
        return
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def refuse_create_graph() -> None:
    """Raise MemoError in a backward that is to be differentiated itself: its tiles leave no graph."""
    if torch.is_grad_enabled():
        raise MemoError(
            "a gradient of a gradient (create_graph=True) was asked for, which layers and norms in tiles cannot give. Set "
            "memo.tile_tokens to 0"
        )


def dropping() -> Any:
    """Have autograd save nothing inside the block: the graph of a forward is not used."""
    return torch.autograd.graph.saved_tensors_hooks(_drop, _drop)


def _drop(_: Any) -> None:
    pass
