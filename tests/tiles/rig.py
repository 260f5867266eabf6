"""Rig of the tests of tiles: small models in tiles, one step of each, and the comparison that the tests rest on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.runtime.handle import MemoHandle
from tests.models import FP32, MODELS, Batch, Block, Outcome, Toy, assert_close, build, compare_with_stock, step

FAMILIES = tuple(name for name in MODELS if name != "gemma2")
"""Families that run in tiles. Gemma-2's loss differs in rounding: see tests/hf/test_eager_attention.py."""
LAYERS = 2
FLOOR = 1e-3
"""Share of the largest gradient of a layer. Differences of smaller gradients are measured by it."""


BATCH = Batch.random(2, 23)
"""Four tiles: of twelve tokens and of eleven."""


def drive(model: nn.Module, number: int) -> Outcome:
    """Take a step with BATCH."""
    return step(model, BATCH)


def layers_of(model: nn.Module) -> nn.ModuleList:
    return max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)


def toy(block: Any = Block, **more: Any) -> Toy:
    """Build a stack of plain blocks."""
    torch.manual_seed(0)
    return Toy(block, **{"layers": LAYERS, **more})


def model_of(kind: type[Toy], **more: Any) -> Toy:
    torch.manual_seed(0)
    return kind(layers=LAYERS, **more)


def lora(model: nn.Module, dropout: float, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which hides mistakes
            nn.init.normal_(parameter, std=0.1)
    return adapted.train()


def small(name: str, dtype: torch.dtype = torch.float32, heads: int = 2, layers: int = LAYERS) -> nn.Module:
    """Build a family's model.

    Args:
        heads: key-value heads, where the family has fewer of them than heads.
    """
    if name == "gpt2":
        return build(name, dtype, n_layer=layers)
    if name == "plain":
        return build(name, dtype, layers=layers)
    more: dict[str, Any] = {"num_hidden_layers": layers}
    if name == "gemma3":
        more["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    if name not in ("opt", "neox"):
        more["num_key_value_heads"] = heads
    return build(name, dtype, **more)


def config(tile: int | None = 16, alpha: float = 0.3, groups: int = 1, **more: Any) -> dict[str, Any]:
    """Return the settings of a model in tiles.

    Args:
        tile: None: it is not configured.
    """
    tiles = {"head_groups": groups} if tile is None else {"tile_tokens": tile, "head_groups": groups}
    return {"alpha": alpha, "resident_layers": 0, "plan": {"enabled": False}, **tiles, **more}


@contextmanager
def strict(quiet: bool = False) -> Iterator[None]:
    """Make memo's warnings errors inside the block, or ignore them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if quiet else "error", ds_memo.MemoWarning)
        yield


@contextmanager
def attached(model: nn.Module, *, layers: list[str] | None = None, quiet: bool = False, **settings: Any) -> Iterator[MemoHandle]:
    """Attach a model with :func:`config`, and detach it at the end.

    Args:
        layers: as in ``ds_memo.attach``.
        quiet: False: a warning of memo is an error.
    """
    with strict(quiet):
        handle = ds_memo.attach(model, config(**settings), layers=layers)
        try:
            yield handle
        finally:
            handle.detach()


def tiled_layers(handle: MemoHandle) -> list[int]:
    return handle.report()["tiles"]["layers"]


def reasons(handle: MemoHandle) -> list[str]:
    """Return why layers are not tiled, each reason once."""
    return sorted(set(handle.report()["tiles"]["not_tiled"].values()))


def assert_within(got: dict[str, Any], want: dict[str, Any], tolerance: float = FP32) -> None:
    """Compare gradients: each norm of a difference with the gradient's norm, or FLOOR of the layer's largest if that is more.

    Raises:
        Different: names every gradient that is off.
    """
    largest: dict[str, float] = {}
    for name, gradient in want.items():
        if gradient is not None:
            largest[_layer(name)] = max(largest.get(_layer(name), 0.0), float(gradient.double().norm()))
    assert_close(got, want, tolerance, lambda name: max(float(want[name].double().norm()), FLOOR * largest[_layer(name)]))


def assert_step(got: Outcome, want: Outcome, tolerance: float = FP32) -> None:
    """Compare a step's loss and gradients, and where it leaves the generator."""
    assert torch.equal(got.generator, want.generator), "the random generator is not where stock leaves it"
    torch.testing.assert_close(got.loss, want.loss, rtol=tolerance, atol=0)
    assert_within(got.grads, want.grads, tolerance)


def compare(
    model: nn.Module,
    drive: Callable[[nn.Module, int], Outcome],
    steps: int = 2,
    tolerance: float = FP32,
    layers: list[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Drive a stock copy and a copy in tiles through the same steps, and compare each.

    Args:
        drive: runs a step of a model, given the step's number.
        layers, quiet: as in :func:`attached`.

    Returns:
        The report after the last step.
    """
    with strict(quiet):
        return compare_with_stock(model, drive, config(**settings), steps, tolerance, layers, assert_step)


def assert_was_tiled(report: dict[str, Any], layers: int = LAYERS) -> None:
    """Check that all layers ran in tiles and no attention ran twice."""
    assert report["tiles"]["not_tiled"] == {}
    assert report["tiles"]["layers"] == list(range(layers))
    assert report["attention_recomputed"] == 0


def _layer(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else name
