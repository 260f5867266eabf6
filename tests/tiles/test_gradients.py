"""Every family, tile length, alpha and number of head groups: gradients are stock's, and nothing needless is computed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from ds_memo.spans import spans
from ds_memo.tiles.modes import SupplyHeads
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import Batch, Outcome, poisoned_memory, step
from tests.remat.products import Flops
from tests.tiles.rig import FAMILIES, LAYERS, assert_step, assert_was_tiled, attached, small

CASES = [
    *((16, (2, 33), 0.3, 2), (5, (1, 33), 1.0, 4), (23, (1, 71), 0.0, 1), (64, (2, 71), 0.3, 4)),
    *((16, (1, 71), 1.0, 1), (5, (1, 33), 0.0, 2), (23, (2, 33), 0.3, 4), (64, (1, 71), 1.0, 2)),
    *((16, (1, 33), 0.0, 4), (5, (1, 33), 0.3, 1), (23, (1, 33), 1.0, 2), (64, (2, 33), 0.0, 1)),
]
"""Tile length, (batch, length), alpha and groups: every pair of these. No tile length divides a length. Each family runs one."""


@functools.cache
def model(name: str, heads: int) -> torch.nn.Module:
    return small(name, heads=heads)


@functools.cache
def stock(name: str, heads: int, shape: tuple[int, int]) -> Outcome:
    return step(model(name, heads), Batch.random(*shape))


def run(name: str, tile: int, shape: tuple[int, int], alpha: float, groups: int) -> dict[str, Any]:
    """Run two steps under one handle: the first analyses, the second follows the recipes. Check both."""
    heads = max(2, groups)
    want, batch = stock(name, heads, shape), Batch.random(*shape)
    with attached(model(name, heads), tile=tile, alpha=alpha, groups=groups) as handle:
        for _ in range(2):
            with poisoned_memory():
                got = step(model(name, heads), batch)
            assert_step(got, want)
        return handle.report()


def assert_did_no_more(report: dict[str, Any], tile: int, shape: tuple[int, int], alpha: float) -> None:
    """Check that memo did what it was configured to do."""
    tiles = len(spans(*shape, tile))
    assert report["frames"] == 2 * LAYERS * (tiles + 1 if tiles > 1 else 1)
    assert 0 < report["bytes_to_host"] <= report["bytes_from_host"] <= 2 * report["bytes_to_host"]  # a backward reads tiles twice
    if tiles > 1:
        assert_was_tiled(report)
    recomputed = report["gemm_flops_recomputed_fraction"]
    assert recomputed == 0 if alpha == 1 else recomputed > 0.3 * (1 - alpha)


@pytest.mark.parametrize("name, case", [*zip(FAMILIES, CASES, strict=True)], ids=str)
def test_same_as_stock(name: str, case: tuple) -> None:
    tile, shape, alpha, groups = case
    assert_did_no_more(run(name, tile, shape, alpha, groups), tile, shape, alpha)


@pytest.mark.parametrize("shape, tile", [((5, 17), 64), ((9, 9), 9)], ids=str)
def test_tiles_of_several_sequences(shape: tuple[int, int], tile: int) -> None:
    """Whole sequences make a tile, and the last tile has fewer of them. Batch and length may be equal."""
    name = "llama" if shape[0] % 5 else "plain"
    assert_did_no_more(run(name, tile, shape, 0.3, 2), tile, shape, 0.3)


def in_bf16(name: str, shape: tuple[int, int], **settings: Any) -> tuple[dict[str, torch.Tensor], Outcome, Outcome]:
    """Return a model's gradients in float32, stock's step in bfloat16, and the second one in tiles."""
    rounded, exact = small(name, torch.bfloat16), small(name)
    for weight, value in zip(exact.parameters(), rounded.parameters(), strict=True):
        weight.data.copy_(value.data)
    batch = Batch.random(*shape, torch.bfloat16)
    want, stocks = step(exact, Batch(batch.embeds.float(), batch.labels)), step(rounded, batch)
    with attached(rounded, groups=2, **settings) as handle:
        for _ in range(2):
            ours = step(rounded, batch)
        assert_was_tiled(handle.report())
    unused = {parameter for parameter, gradient in want.grads.items() if gradient is None}
    assert all(ours.grads[parameter] is None for parameter in unused)
    torch.testing.assert_close(ours.loss, stocks.loss, rtol=1e-2, atol=0)
    return {parameter: want.grads[parameter] for parameter in want.grads.keys() - unused}, stocks, ours


def test_as_exact_as_stock_in_bf16() -> None:
    """Tiles round a bias's gradient more often than stock does, and a norm's less."""
    exact, stocks, ours = in_bf16("plain", (2, 33))
    for parameter, gradient in exact.items():
        our_error, stock_error = (float((o.grads[parameter].double() - gradient).norm()) for o in (ours, stocks))
        assert our_error <= 1.5 * stock_error, parameter


# ---- what is computed


def executed(name: str, **settings: Any) -> Flops:
    """Return what the second step runs, in tiles or (no settings) stock."""
    tiled, batch = small(name), Batch.random(2, 33)
    if not settings:
        with Flops() as seen:
            step(tiled, batch)
        return seen
    with attached(tiled, **settings):
        step(tiled, batch)
        with Flops() as seen:
            step(tiled, batch)
    return seen


@pytest.mark.parametrize("name", everyday(["llama", "gpt2"], ["llama"]))
def test_at_alpha_1_no_product_and_no_attention_runs_twice(name: str) -> None:
    ours, stocks = executed(name, alpha=1.0), executed(name)
    assert ours.attention == stocks.attention == LAYERS
    assert ours.total == stocks.total


def test_at_alpha_0_products_run_again_and_attention_does_not() -> None:
    ours, stocks = executed("llama", alpha=0.0, groups=2), executed("llama")
    assert ours.attention == stocks.attention == LAYERS
    assert stocks.total < ours.total < stocks.total * 4 / 3 + 1


def test_attention_runs_backward_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    note = lambda right, *args: seen.append((args[2].number, args[2].groups)) or right(*args)  # noqa: E731
    put_in(monkeypatch, SupplyHeads, "__init__", note)
    run("gpt2", 16, (1, 33), 0.3, groups=4)
    assert seen == [(number, 4) for number in range(4)] * LAYERS * 2


def test_groups_that_do_not_divide_the_heads_are_named() -> None:
    tiled, batch = small("llama", heads=4), Batch.random(2, 33)
    want = step(small("llama", heads=4), batch)
    with attached(tiled, quiet=True, groups=3) as handle:
        assert_step(step(tiled, batch), want)
        (warning,) = handle.report()["warnings"]
        assert "3 groups are not used" in warning and "4 key-value heads" in warning


# ---- what is kept


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_bytes_to_the_host_are_those_of_the_whole_layer(alpha: float) -> None:
    seen = []
    for tile in (0, 64):
        with attached(tiled := small("mixtral"), tile=tile, alpha=alpha) as handle:
            step(tiled, Batch.random(1, 71))
            seen.append(handle.report()["bytes_to_host"])
    assert seen[0] == seen[1]


def test_as_many_tiles_are_stored_as_alpha_says() -> None:
    """Alpha 0.3 stores none of three tiles, 0.4 and 0.6 one, 0.7 two; the bytes grow by whole tiles."""
    by_alpha = {}
    for alpha in (0.0, 0.3, 0.4, 0.6, 0.7, 1.0):
        with attached(tiled := small("plain"), tile=11, alpha=alpha) as handle:
            step(tiled, Batch.random(1, 33))
            by_alpha[alpha] = handle.report()["bytes_to_host"]
    least, tile = by_alpha[0.0], (by_alpha[1.0] - by_alpha[0.0]) / 3
    assert [(nbytes - least) / tile for nbytes in by_alpha.values()] == [0, 0, 1, 1, 2, 3]
