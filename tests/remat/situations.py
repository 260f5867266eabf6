"""Helpers of the tests of training situations."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from ds_memo.swap.frame import Frame
from tests.inside import inside
from tests.models import HIDDEN, Batch, Block, Outcome, Toy, step

BATCH = Batch.random(2, 17)


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


def toy(block: Any = Block, **kwargs: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(block, **kwargs)


class Lines(nn.Module):
    """The parts of a layer: three Linears and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)


def assert_nothing_leaked(handle: Any, frames: weakref.WeakSet[Frame]) -> None:
    if frames:
        gc.collect()  # a traceback may hold them in a reference cycle
    assert not frames
    inside(handle).engine.drain()  # what the next forward does first
    assert inside(handle).slab.used == inside(handle).engine.traffic.blocks_lost == 0
