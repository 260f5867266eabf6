"""Random states: PyTorch's, Python's, NumPy's, and the named states of DeepSpeed's and Megatron's tensor-parallel layers."""

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
"""Modules with a tracker: a dict of named states that ``tracker.fork()`` draws from."""


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Restore all generators of this device and the host at the end of the block."""
    pythons, numpys = random.getstate(), np.random.get_state()  # Whisper masks its input with NumPy's
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _named_kept():
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


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
