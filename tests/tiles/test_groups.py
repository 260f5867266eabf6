"""Layers that compute their input: gradients are stock's, and the inputs are the forward's to the bit."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.models import Batch, Outcome, poisoned_memory, step
from tests.tiles.rig import FAMILIES, assert_step, attached, small

LAYERS = 6


@functools.cache
def model(name: str) -> torch.nn.Module:
    return small(name, layers=LAYERS)


@functools.cache
def stock(name: str, shape: tuple[int, int]) -> Outcome:
    return step(model(name), Batch.random(*shape))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("tile", [5, 16, 64])
@pytest.mark.parametrize("every", [2, 3, 6])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name: str, every: int, tile: int, alpha: float) -> None:
    shape = (2, 33)
    want, batch = stock(name, shape), Batch.random(*shape)
    with attached(model(name), tile=tile, alpha=alpha, input_every=every) as handle:
        for _ in range(2):
            with poisoned_memory():
                got = step(model(name), batch)
            assert_step(got, want)
        print(handle.report()["tiles"], handle.report()["bytes_to_host"], handle.report()["gemm_flops_recomputed_fraction"])
