"""Tiles over CUDA's attention kernels, here stand-ins with their metadata (tests/attention_kernels.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
from torch import nn

from tests.attention_kernels import cuda_kernels
from tests.everyday import everyday
from tests.models import Batch, Block, Outcome, step
from tests.remat.test_cuda_attention import Grouped
from tests.tiles.rig import LAYERS, assert_was_tiled, attached, compare, small, tiled_layers, toy
from tests.tiles.test_random_numbers import slope

BATCH = Batch.random(2, 45)
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "causal": toy,
    "grouped": functools.partial(toy, functools.partial(Grouped, dropout=0.0)),
    "llama": functools.partial(small, "llama"),
    "mistral": functools.partial(small, "mistral"),
}
PAIRS = [
    (name, kernel)
    for name, kernel in itertools.product(BUILDS, ("cudnn", "flash", "efficient"))
    if (name, kernel) != ("mistral", "flash")  # its window is a mask
]
PRODUCTS = [(*pair, alpha, groups) for pair in PAIRS for alpha in (0.0, 0.5, 1.0) for groups in (1, 2)]


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


@pytest.mark.parametrize("name, kernel, alpha, groups", everyday(PRODUCTS, [("grouped", "flash", 0.5, 2)], slow=PRODUCTS[::13]))
def test_gradients(name: str, kernel: str, alpha: float, groups: int) -> None:
    """The efficient kernel runs for all heads at once, and a warning says so."""
    with cuda_kernels(kernel) as ran:
        report = compare(BUILDS[name](), drive, alpha=alpha, groups=groups, quiet=kernel == "efficient")
        assert_was_tiled(report)
        backwards = sum(op.endswith("_backward") for op in ran)
        assert backwards == 2 * LAYERS * (1 + (1 if kernel == "efficient" else groups)), "stock's and ours, in two steps"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("groups, alpha", [(1, 1.0), (2, 0.0)])
def test_dropout_of_attention_is_the_forwards(kernel: str, groups: int, alpha: float) -> None:
    """Gradients are the slope of the very function that the forward computed. Kernels drop by the number of the head."""
    tiled = toy(lambda: Block(attention_dropout=0.2)).double()
    with cuda_kernels(kernel), attached(tiled, quiet=True, alpha=alpha, groups=groups) as handle:
        by_gradients, by_values = slope(tiled, BATCH, seed=1)
        assert by_gradients == pytest.approx(by_values, rel=1e-5)
        assert tiled_layers(handle) == [0, 1]
