"""Shared by the tests of planned addresses: an attached model whose hits and misses are counted, and bitwise comparison.

Importing it skips a module's tests if the op cannot be built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.ops import library
from ds_memo.ops.allocator import Allocator
from tests.models import Batch, Outcome, assert_same

BATCH = Batch.random(4, 128)  # 512 tokens of 64 floats: 128 KiB
CONFIG = {"alpha": 0.5, "resident_layers": 1}
BARE = {**CONFIG, "plan": {"enabled": False}}
if missing := library.missing("cpu"):
    pytest.skip("; ".join(missing), allow_module_level=True)
CPU = Allocator(torch.device("cpu"))


class Counting:
    """An attached model, and the plan's counts since they were last read."""

    def __init__(self, model: nn.Module, config: dict[str, Any] = CONFIG, **options: Any) -> None:
        self.handle = ds_memo.attach(model, config, **options)
        self._before = self.report()

    def report(self) -> dict[str, Any]:
        return self.handle.report()["plan"]

    def counts(self) -> tuple[int, dict[str, int]]:
        now, before = self.report(), self._before
        self._before = now
        misses = {name: count - before["misses"][name] for name, count in now["misses"].items()}
        return now["hits"] - before["hits"], {name: count for name, count in misses.items() if count}

    def assert_followed(self) -> None:
        """Check that at least 99 % of the requests since the last counts had their planned address."""
        hits, misses = self.counts()
        assert hits > 50 and hits >= 0.99 * (hits + sum(misses.values())), (hits, misses)

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.handle.detach()


def outcomes(model: nn.Module, config: dict[str, Any], drive: Callable[[nn.Module, int], Outcome], steps: int) -> list[Outcome]:
    model = copy.deepcopy(model)
    handle = ds_memo.attach(model, config)
    try:
        return [drive(model, number) for number in range(steps)]
    finally:
        handle.detach()


def bit_equal(got: Outcome, want: Outcome) -> None:
    assert_same(got, want, tolerance=0.0)
