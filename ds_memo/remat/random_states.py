"""Random states: PyTorch's, Python's and NumPy's, and those that tensor-parallel layers of DeepSpeed and Megatron draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ds_memo.errors import MemoError

_MODULES = ("deepspeed.runtime.activation_checkpointing.checkpointing", "megatron.core.tensor_parallel.random")
"""Each has one tracker: a dict of named states that ``tracker.fork()`` draws from."""


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Put all generators of this device and the host back afterwards to where they were."""
    pythons, numpys = random.getstate(), np.random.get_state()  # Whisper masks its input by the latter
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _named_kept():
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def as_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, but whenever it is called it draws from the named states as they are now, and the call does not move them on.
    PyTorch's own states are left to torch.utils.checkpoint.

    Raises:
        MemoError: states that cannot be put back.
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
