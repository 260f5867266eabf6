"""Rig of the tests of tiles: small models in tiles, one step of each, and the comparison that the tests rest on."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import ds_memo
from ds_memo.runtime.handle import MemoHandle
from tests.models import FP32, MODELS, Different, Outcome, build, poisoned_memory

FAMILIES = tuple(name for name in MODELS if name != "gemma2")
"""Families that run in tiles. Gemma-2's soft cap takes eager attention, which no tile can be cut at."""
LAYERS = 2
FLOOR = 1e-3
"""Share of the largest gradient of a layer. Differences of smaller gradients are measured by it."""


def small(name: str, dtype: torch.dtype = torch.float32, heads: int = 2) -> nn.Module:
    """Build a family's model with two layers.

    Args:
        heads: key-value heads, where the family has fewer of them than heads.
    """
    if name == "gpt2":
        return build(name, dtype, n_layer=LAYERS)
    if name == "plain":
        return build(name, dtype, layers=LAYERS)
    more: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if name == "gemma3":
        more["layer_types"] = ["sliding_attention", "full_attention"]
    if name not in ("opt", "neox"):
        more["num_key_value_heads"] = heads
    return build(name, dtype, **more)


def config(tile: int = 16, alpha: float = 0.3, groups: int = 1, **more: Any) -> dict[str, Any]:
    """Return the settings of a model in tiles."""
    tiles = {"tile_tokens": tile, "head_groups": groups}
    return {"alpha": alpha, "resident_layers": 0, "plan": {"enabled": False}, **tiles, **more}


@contextmanager
def attached(model: nn.Module, *, layers: list[str] | None = None, quiet: bool = False, **settings: Any) -> Iterator[MemoHandle]:
    """Attach a model with :func:`config`, and detach it at the end.

    Args:
        layers: as in ``ds_memo.attach``.
        quiet: False: a warning of memo is an error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if quiet else "error", ds_memo.MemoWarning)
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
    if got.keys() != want.keys():
        raise Different(f"gradients of other things: {got.keys() ^ want.keys()}")
    largest: dict[str, float] = {}
    for name, gradient in want.items():
        if gradient is not None:
            largest[_layer(name)] = max(largest.get(_layer(name), 0.0), float(gradient.double().norm()))
    wrong = []
    for name, reference in want.items():
        value = got[name]
        if value is None or reference is None:
            if value is not reference:
                wrong.append(f"{name}: {'none' if value is None else 'one'}, stock has {'none' if reference is None else 'one'}")
            continue
        scale = max(float(reference.double().norm()), FLOOR * largest[_layer(name)])
        distance = float((value.double() - reference.double()).norm())
        if not distance <= tolerance * scale:  # a NaN is wrong too
            wrong.append(f"{name}: off by {distance / scale if scale else distance:.1e}")
    if wrong:
        raise Different(f"{len(wrong)} of {len(want)} gradients: " + "; ".join(wrong[:8]))


def assert_step(got: Outcome, want: Outcome, tolerance: float = FP32) -> None:
    """Compare a step's loss and gradients, and where it leaves the generator."""
    assert torch.equal(got.generator, want.generator), "the random generator is not where stock leaves it"
    torch.testing.assert_close(got.loss, want.loss, rtol=tolerance, atol=0)
    assert_within(got.grads, want.grads, tolerance)


def compare(
    model: nn.Module, drive: Callable[[nn.Module, int], Outcome], steps: int = 2, tolerance: float = FP32, **settings: Any
) -> dict[str, Any]:
    """Drive a stock copy and a copy in tiles through the same steps, and compare each.

    Args:
        drive: runs a step of a model, given the step's number.

    Returns:
        The report after the last step.
    """
    stock, tiled = copy.deepcopy(model), copy.deepcopy(model)
    with attached(tiled, **settings) as handle:
        for number in range(steps):
            want = drive(stock, number)
            with poisoned_memory():
                got = drive(tiled, number)
            try:
                assert_step(got, want, tolerance)
            except Different as different:
                raise Different(f"step {number} with {settings}: {different}") from None
        return handle.report()


def assert_was_tiled(report: dict[str, Any], layers: int = LAYERS) -> None:
    """Check that all layers ran in tiles and no attention ran twice."""
    assert report["tiles"]["not_tiled"] == {}
    assert report["tiles"]["layers"] == list(range(layers))
    assert report["attention_recomputed"] == 0


def _layer(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else name
