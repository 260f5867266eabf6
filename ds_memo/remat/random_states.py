"""Random states: PyTorch's, Python's, NumPy's, and the named states of DeepSpeed's and Megatron's tensor-parallel layers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ds_memo.errors import MemoError
from ds_memo.remat.call import generator_of
from ds_memo.remat.functions import SkipsCompiled
from ds_memo.remat.module_state import set_state, state_of

_MODULES = ("deepspeed.runtime.activation_checkpointing.checkpointing", "megatron.core.tensor_parallel.random")
"""Modules with a tracker: a dict of named states that ``tracker.fork()`` draws from."""


@contextmanager
def forked(device: torch.device, given: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore all generators of this device and the host at the end of the block, and those given."""
    others = [(generator, state_of(generator)) for generator in given]
    pythons, numpys = random.getstate(), np.random.get_state()  # Whisper masks its input with NumPy's
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _named_kept():
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        for generator, state in others:
            set_state(generator, state)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed inside the block: PyTorch's generators of this device and the host. Others are not touched."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for generator in {torch.default_generator, generator_of(device)}:
            generator.manual_seed(seed)
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
        for generator, state in self.given.values():
            set_state(generator, state)


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


@contextmanager
def _named_kept() -> Iterator[None]:
    states = _named()
    try:
        yield
    finally:
        for tracker, named in states:
            tracker.set_states(named)


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
