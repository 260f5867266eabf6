"""Tiled layers whose attention is recomputed, or whose attention's result is made again of what its kernel returned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ds_memo.autotune.policy import PlacementPolicy
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.swap.streams import ThreadStreams
from ds_memo.tiles import attention
from ds_memo.tiles.attention import TiledAttention
from tests.everyday import everyday, pairs
from tests.models import Batch, Outcome, step
from tests.swap import scenarios
from tests.swap.conftest import alone  # noqa: F401  a fixture
from tests.swap.delayed import DelayedStreams
from tests.swap.ordered import OrderedStreams
from tests.swap.races import tell
from tests.swap.schedules import differing
from tests.tiles.rig import BATCH, LAYERS, assert_step, assert_was_tiled, attached, compare, small, toy

SWAPPED, AGAIN = PlacementKind.SWAPPED, PlacementKind.SWAPPED_ATTENTION_RECOMPUTED
ON_DEVICE, ON_DEVICE_AGAIN = PlacementKind.GEMMS_RECOMPUTED, PlacementKind.FULL_RECOMPUTE

pytestmark = pytest.mark.filterwarnings("ignore:memo.head_groups")


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives every layer call a placement."""

    def place(kind: PlacementKind, alpha: float = 0.0, tile: int = 16, groups: int = 1) -> None:
        placement = Placement(kind, alpha, tiles=Tiles(tile, groups))
        monkeypatch.setattr(PlacementPolicy, "placement", lambda self, layer: placement)

    return place


@pytest.fixture
def differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no kernel's output be attention's result, as under Ulysses."""
    monkeypatch.setattr(TiledAttention, "_is_result", lambda self, value, result: False)


def assert_steps(model: Any, batch: Batch, steps: int = 3) -> dict[str, Any]:
    return compare(model, lambda model, number: step(model, batch, seed=number), steps)


# ---- recomputed


FEW = ("llama", "gpt2", "gemma3", "mixtral")
"""Rotary embeddings, positions as parameters, a window in some layers, experts."""
RECOMPUTED = pairs(FEW, (1, 2), (AGAIN, ON_DEVICE_AGAIN))


@pytest.mark.parametrize("name, groups, kind", everyday(RECOMPUTED, [case for case in RECOMPUTED if case[0] == "llama"]))
def test_gradients_where_attention_is_recomputed(placed: Any, name: str, groups: int, kind: PlacementKind) -> None:
    placed(kind, groups=groups)
    report = assert_steps(small(name), BATCH)
    assert report["tiles"]["layers"] == [0, 1] and report["tiles"]["not_tiled"] == {}
    assert report["attention_recomputed"] == 3 * LAYERS


def test_only_inputs_are_stored(placed: Any) -> None:
    model = small("llama")
    placed(AGAIN)
    report = assert_steps(model, BATCH)
    hidden = 4 * model.config.hidden_size * 2 * 23
    assert all(hidden <= nbytes <= hidden + 4 * 4096 for nbytes in report["stored_bytes_per_layer"])
    placed(SWAPPED)
    assert min(assert_steps(small("llama"), BATCH)["stored_bytes_per_layer"]) > 1.5 * hidden


def noisy() -> Any:
    """Build a model whose attention function draws random numbers."""
    AttentionInterface.register("noisy", drop_and_attend)
    model = small("llama")
    model.config._attn_implementation = "noisy"
    return model


def drop_and_attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, F.dropout(query, 0.2), *args, **kwargs)


@pytest.mark.parametrize("kind", [AGAIN, ON_DEVICE_AGAIN])
def test_attention_draws_the_same(placed: Any, kind: PlacementKind) -> None:
    placed(kind)
    assert_runs_backward_alike(noisy())


def test_without_the_forwards_generators_it_would_not(placed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def as_they_are(states: Any, device: Any) -> Iterator[None]:
        yield

    placed(AGAIN)
    monkeypatch.setattr(attention, "drawing_from", as_they_are)
    with pytest.raises(AssertionError):
        assert_runs_backward_alike(noisy())


def assert_runs_backward_alike(model: Any) -> None:
    """Check steps against those that keep what attention's backward needs, in the same tiles."""
    want = in_tiles(model, ON_DEVICE)
    with attached(model):
        for _ in range(2):
            assert_step(step(model, BATCH), want, 1e-5)


def in_tiles(model: Any, kind: PlacementKind) -> Outcome:
    with pytest.MonkeyPatch.context() as patch, attached(model):
        patch.setattr(PlacementPolicy, "placement", lambda self, layer: Placement(kind, 0.0, tiles=Tiles(16)))
        return step(model, BATCH)


# ---- the result is made again


MADE_AGAIN = pairs(FEW, (0.0, 0.5), (SWAPPED, ON_DEVICE, PlacementKind.ON_DEVICE))


@pytest.mark.usefixtures("differs")
@pytest.mark.parametrize("name, alpha, kind", everyday(MADE_AGAIN, [case for case in MADE_AGAIN if case[0] == "llama"]))
def test_gradients_where_the_result_is_made_again(placed: Any, name: str, alpha: float, kind: PlacementKind) -> None:
    placed(kind, alpha)
    report = assert_steps(small(name), BATCH)
    assert_was_tiled(report)


@pytest.mark.usefixtures("differs")
def test_the_result_is_not_stored_twice(placed: Any) -> None:
    placed(SWAPPED)
    first, later = (assert_steps(small("llama"), BATCH, steps)["stored_bytes_per_layer"][1] for steps in (1, 3))
    assert later < 0.8 * first, "the first call does not know yet"


# ---- backward twice, late copies


@pytest.mark.parametrize("kind", [AGAIN, ON_DEVICE_AGAIN])
def test_a_graph_runs_backward_twice(placed: Any, kind: PlacementKind) -> None:
    placed(kind)
    model = toy()
    stock = copy.deepcopy(model)

    def twice(model: Any) -> list[torch.Tensor]:
        loss = model(inputs_embeds=BATCH.embeds.clone().requires_grad_(), labels=BATCH.labels).loss
        return [gradient for _ in range(2) for gradient in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]

    with attached(model):
        for got, want in zip(twice(model), twice(stock), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("differing_result", [False, True])
@pytest.mark.parametrize("kind", [SWAPPED, AGAIN])
def test_late_copies_and_memory_that_loses_its_value(
    placed: Any, monkeypatch: pytest.MonkeyPatch, kind: PlacementKind, differing_result: bool
) -> None:
    if differing_result:
        monkeypatch.setattr(TiledAttention, "_is_result", lambda self, value, result: False)
    placed(kind, 0.5 if kind is SWAPPED else 0.0)
    want = tell(scenarios.train, ThreadStreams())
    checker = OrderedStreams()
    assert not differing(tell(scenarios.train, checker), want)
    assert checker.checked > 100 and not checker.violations
    assert not differing(tell(scenarios.train, DelayedStreams(0)), want)
