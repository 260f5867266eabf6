"""Shared parts of the CUDA scenarios: their table, slots to request, and the calls that the stand-in records."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ds_memo.ops.allocator import NATIVE, Allocator

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
SCENARIOS: dict[str, Callable[[], None]] = {}
ON_A_GPU: set[str] = set()
ON_A_STANDIN: set[str] = set()
LEAVES_AN_ARENA: set[str] = set()
"""Scenarios that ran and left an arena with live blocks, as intended."""


def scenario(run: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[run.__name__] = run
    return run


def gpu(run: Callable[[], None]) -> Callable[[], None]:
    ON_A_GPU.add(run.__name__)
    return scenario(run)


def standin(run: Callable[[], None]) -> Callable[[], None]:
    ON_A_STANDIN.add(run.__name__)
    return scenario(run)


def is_standin() -> bool:
    return hasattr(ctypes.CDLL(None), "emulated_calls")


def expandable() -> bool:
    """Return True if torch's own blocks are in expandable segments. If the driver cannot share those, the op cannot either."""
    return "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def standin_calls() -> list[tuple[str, int, int]]:
    """Return the calls since the last time, as (name, event or block, stream or bytes)."""
    take = ctypes.CDLL(None).emulated_calls
    take.restype = ctypes.c_char_p
    return [(call, int(a), int(b)) for call, a, b in map(str.split, take().decode().splitlines())]


@contextmanager
def slow_links() -> Iterator[None]:
    """Let copies of the stand-in take a second per MiB, so that none is over when it is asked. On a GPU do nothing."""
    links = ctypes.CDLL(None).emulated_links if is_standin() else lambda d2h, h2d: None
    links(ctypes.c_double(MIB), ctypes.c_double(MIB))
    try:
        yield
    finally:
        links(ctypes.c_double(math.inf), ctypes.c_double(math.inf))


class Slots:
    """A visit with the given slots in an arena that just holds them; `take` makes the next request.

    Args:
        slots: (offset, bytes) in MiB.
    """

    def __init__(self, *slots: tuple[int, int]) -> None:
        self.allocator = Allocator(DEVICE)
        self.allocator.install()
        places = [(size * MIB, NATIVE if offset == NATIVE else offset * MIB) for offset, size in slots]
        self.allocator.load_plan(0, [("embed", places)] * 8)
        self.allocator.reserve(max(offset + size for size, offset in places if offset != NATIVE))
        self.allocator.follow(0)
        self.allocator.phase("embed")
        self._before = self.allocator.stats()

    def again(self) -> None:
        """Start again at the first slot."""
        self.allocator.phase("embed")

    def take(self, mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.allocator.owns(tensor.data_ptr())

    def count(self, name: str) -> int:
        return self.allocator.stats()[name] - self._before[name]


def write(tensor: torch.Tensor, value: int) -> torch.Tensor:
    return tensor.copy_(torch.full(tensor.shape, value, dtype=torch.uint8))


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor.cpu() == value).all())
