"""Models that train in two threads at once: while layers of one run in tiles, nothing of the other is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _python_dispatch

from tests.models import Block, Outcome, step
from tests.tiles.rig import BATCH, assert_step, assert_was_tiled, attached, toy

LIMIT_S = 60


class Meets(Block):
    """Calls `then` in one forward and its replay, where its attention begins."""

    then: Callable[[], Any] | None = None

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        then, self.then = self.then, None
        if then is not None:
            then()
        return super().attend(x)


@pytest.mark.parametrize("other", ["stock", "in tiles"])
def test_two_threads(other: str) -> None:
    """The other's step begins inside a layer of the first, and ends when the first's is over."""
    linear, first, second = F.linear, toy(Meets), toy(Meets)
    want = step(toy(), BATCH)
    inside, both, over = threading.Event(), threading.Event(), threading.Event()
    found: list[Outcome] = []
    seen: list[Any] = []

    def train_second() -> None:
        assert inside.wait(LIMIT_S)
        second.blocks[0].then = lambda: (seen.append(F.linear), both.set(), over.wait(LIMIT_S), seen.append(F.linear))
        found.append(step(second, BATCH))

    with (
        attached(first, host_memory_gib=0.01) as handle,
        attached(second, host_memory_gib=0.02) if other == "in tiles" else nullcontext(),
    ):
        for model in (first, second):
            step(model, BATCH)  # it is analysed
        thread = threading.Thread(target=train_second, daemon=True)
        thread.start()
        first.blocks[0].then = lambda: (inside.set(), both.wait(LIMIT_S))
        assert_step(step(first, BATCH), want)
        over.set()
        thread.join(LIMIT_S)
        assert_step(*found, want)
        assert_was_tiled(handle.report())
    assert set(seen) == {linear} and F.linear is linear
    assert not _python_dispatch.is_in_torch_dispatch_mode()
