"""Random states: PyTorch's, Python's, NumPy's, and the named states of DeepSpeed's and Megatron's tensor-parallel layers."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ds_memo.errors import MemoError
from ds_memo.remat.functions import SkipsCompiled
from ds_memo.remat.undo import Undoing

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
GLOBAL_GENERATORS = {"Python's random": random.getstate.__self__, "NumPy's random": np.random.get_state.__self__}  # type: ignore[attr-defined]
"""By the name that messages use. PyTorch's own are put back by torch.utils.checkpoint, and by `forked`."""
_MODULES = ("deepspeed.runtime.activation_checkpointing.checkpointing", "megatron.core.tensor_parallel.random")
"""Modules with a tracker: a dict of named states that ``tracker.fork()`` draws from."""


def generator_of(device: torch.device) -> torch.Generator:
    """Return PyTorch's own generator of a device."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def set_state(generator: Any, state: bytes) -> None:
    """Give a generator a state from :func:`state_of`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    else:
        generator.set_state(pickle.loads(state))


def states_of(generators: Iterable[Any]) -> list[tuple[Any, bytes]]:
    """Return generators with their states, for :func:`set_states`."""
    return [(generator, state_of(generator)) for generator in generators]


def set_states(states: Iterable[tuple[Any, bytes]]) -> None:
    for generator, state in states:
        set_state(generator, state)


def another(generator: Any) -> Any:
    """Return a new generator of the same class, with the same state."""
    return generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)


def own_states(device: torch.device) -> list[tuple[Any, bytes]]:
    """Return PyTorch's own generators, of the host and of a device, with their states."""
    return states_of(dict.fromkeys((torch.default_generator, generator_of(device))))


@contextmanager
def forked(device: torch.device, given: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore all generators of this device and the host at the end of the block, and those given."""
    states = states_of([*GLOBAL_GENERATORS.values(), *given])  # Whisper masks its input with NumPy's
    with Undoing(partial(set_states, [*own_states(device), *states])), _named_kept():
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed inside the block: PyTorch's generators of this device and the host. Others are not touched."""
    states = own_states(device)
    with Undoing(partial(set_states, states)):
        for generator, _ in states:
            generator.manual_seed(seed)
        yield


@contextmanager
def drawing_from(states: list[tuple[Any, bytes]], device: torch.device) -> Iterator[None]:
    """Draw from these of :func:`own_states` inside the block."""
    with forked(device):
        set_states(states)
        yield


class KeepsGiven(SkipsCompiled):
    """Sees the generators that ops are given, and puts them back at the end of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, tuple[torch.Generator, bytes]] = {}
        """By id, with the state before the first draw."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (generator := kwargs.get("generator")) is not None and id(generator) not in self.given:
            self.given[id(generator)] = generator, state_of(generator)
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        set_states(self.given.values())


def named_states() -> bytes:
    """Return the named states, to compare."""
    return b"".join(state.cpu().numpy().tobytes() for _, named in _named() for state in named.values())


def from_current_states(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` wrapped so that each call draws from the named states as they are now, and does not advance them.

    torch.utils.checkpoint takes care of PyTorch's own states.

    Raises:
        MemoError: the states cannot be restored.
    """
    states = _named()
    if not states:
        return fn

    def run(*args: Any) -> Any:
        with _named_kept():
            for tracker, named in states:
                tracker.set_states(dict(named))  # fork() writes to what it is given
            return fn(*args)

    return run


def _named_kept() -> Undoing:
    """Restore the named states at the end of the block."""
    states = _named()

    def put_back() -> None:
        for tracker, named in states:
            tracker.set_states(named)

    return Undoing(put_back)


def _named() -> list[tuple[Any, dict[str, torch.Tensor]]]:
    trackers = [getattr(sys.modules.get(module), "_CUDA_RNG_STATE_TRACKER", None) for module in _MODULES]
    states = [(tracker, named) for tracker in trackers if tracker is not None and (named := tracker.get_states())]
    for _, named in states:
        if not all(isinstance(state, torch.Tensor) for state in named.values()):
            raise MemoError(
                "Megatron's random states are generators here (use_cudagraphable_rng), which memo does not put back for a "
                "replay: dropout would differ. Switch that off, or train without memo"
            )
    return states
