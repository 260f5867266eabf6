"""Layers that compute their input: gradients are stock's, and the inputs are the forward's to the bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.tiles.attention import TiledAttention
from tests.everyday import everyday
from tests.models import BF16, Batch, Block, Outcome, gradients, poisoned_memory, step
from tests.tiles import test_chain as chain
from tests.tiles.grouped import LAYERS, compare, inputs_compared
from tests.tiles.rig import BATCH, FAMILIES, assert_step, assert_was_tiled, attached, drive, lora, small, toy
from tests.tiles.test_modes import CHANGES, drive_changing
from tests.tiles.test_random_numbers import slope

SHAPE = 2, 33
TABLE = [*itertools.product(FAMILIES, (2, 3, 6), (5, 16, 64), (0.0, 1.0))]
ONE_EACH = [(name, (2, 3, 6)[i % 3], (5, 16, 64)[i // 3 % 3], float(i % 2)) for i, name in enumerate(FAMILIES)]
DAILY = [ONE_EACH[FAMILIES.index(name)] for name in ("llama", "gemma3", "plain")]


@functools.cache
def model(name: str) -> nn.Module:
    return small(name, layers=6)


@functools.cache
def stock(name: str) -> Outcome:
    return step(model(name), Batch.random(*SHAPE))


@pytest.mark.parametrize("name, every, tile, alpha", everyday(TABLE, DAILY, ONE_EACH))
def test_families(name: str, every: int, tile: int, alpha: float) -> None:
    want, batch = stock(name), Batch.random(*SHAPE)
    with attached(model(name), tile=tile, alpha=alpha, input_every=every) as handle, inputs_compared() as names:
        for _ in range(2):
            with poisoned_memory():
                got = step(model(name), batch)
            assert_step(got, want)
        assert_was_tiled(handle.report(), 6)
        computed = handle.report()["layers_without_input"]
    assert computed == {2: [2, 4], 3: [1, 3, 4], 6: [1, 3, 4]}[every] and len(set(names)) == len(computed)


# ---- layers without attention

HYBRIDS: dict[str, dict[str, Any]] = {
    "nemotron_h": {},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {"num_hidden_layers": 4},
    "in_a_row": {"num_hidden_layers": 4},
}
HYBRIDS |= {name: {} for name in chain.FAMILIES if name not in HYBRIDS}
CHAINS = [*itertools.product(HYBRIDS, (5, 16, 64), (0.0, 1.0))]
SLOW_CHAINS = [(name, (5, 16)[i % 2], float(i // 2 % 2)) for i, name in enumerate(HYBRIDS)]
SLOW_CHAINS = [case for case in SLOW_CHAINS if case[0] not in ("bailing_hybrid", "kimi_linear")]  # these take a minute


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, tile, alpha", everyday(CHAINS, SLOW_CHAINS[:2], SLOW_CHAINS))
def test_convolutions_and_scans(name: str, tile: int, alpha: float) -> None:
    """What tiles carry is kept. Mixers beside attention run before it and behind it."""
    with inputs_compared() as names:
        report = chain.check(name, tile, alpha, settings={"input_every": 3}, own=HYBRIDS[name])
    chain.assert_was_tiled(report)
    assert len(set(names)) == len(report["layers_without_input"]) > 0


# ---- experts, adapters, dropout, frozen layers, precision


def frozen(model: nn.Module, *layers: int) -> nn.Module:
    for index in layers:
        model.blocks[index].requires_grad_(False)
    return model


def without_embeddings(model: nn.Module, number: int) -> Outcome:
    """Take a step in which the first layer's input needs no gradient."""
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    loss.backward()
    return Outcome(loss.detach(), gradients(model))


def in_autocast(model: nn.Module, number: int) -> Outcome:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number != 1):
        return drive(model, number)


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "experts": lambda: {"model": small("mixtral", layers=LAYERS)},
    "more experts": lambda: {"model": small("qwen3_moe", layers=LAYERS), "alpha": 1.0},
    "adapters": lambda: {"model": lora(toy(layers=LAYERS), 0.0, ["qkv", "up", "down"])},
    "frozen layers in the middle": lambda: {"model": frozen(toy(layers=LAYERS), 1, 2)},
    "a frozen last layer": lambda: {"model": frozen(toy(layers=LAYERS), 3)},
    "the lowest layer is frozen": lambda: {
        "model": frozen(toy(layers=5), 0),
        "drive": without_embeddings,
        "computed": 2,
    },
    "autocast": lambda: {"model": small("llama", layers=LAYERS), "drive": in_autocast, "steps": 3, "tolerance": BF16},
    "experts in autocast": lambda: {"model": small("mixtral", layers=LAYERS), "drive": in_autocast, "tolerance": BF16},
    "two tiles for four sequences": lambda: {
        "model": toy(layers=LAYERS),
        "drive": lambda model, number: step(model, Batch.random(5, 17)),
        "tile": 64,
    },
}


@pytest.mark.parametrize("name", everyday(MODELS, ["experts", "frozen layers in the middle", "autocast"]))
def test_models(name: str) -> None:
    compare(**MODELS[name]())


def steps_in_tiles(model: nn.Module, drive: Callable[[nn.Module, int], Outcome], **settings: Any) -> list[Outcome]:
    with attached(model, **settings) as handle:
        found = [drive(model, number) for number in range(2)]
        assert handle.report()["tiles"]["not_tiled"] == {}
    return found


def in_bf16(model: nn.Module, number: int) -> Outcome:
    return step(model, Batch.random(*SHAPE, torch.bfloat16))


ALIKE: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module, int], Outcome]]]] = {
    "bf16": lambda: (small("llama", torch.bfloat16, layers=LAYERS), in_bf16),
    "experts in bf16": lambda: (small("qwen3_moe", torch.bfloat16, layers=LAYERS), in_bf16),
    "dropout": lambda: (toy(lambda: Block(dropout=0.2), layers=LAYERS), drive),
    "adapters' dropout": lambda: (lora(toy(layers=LAYERS), 0.2, ["qkv", "up", "down"]), drive),
}


def in_alike(name: str, alpha: float) -> None:
    """Check steps against those in the same tiles whose inputs are stored."""
    model, drive = ALIKE[name]()
    want, got = (steps_in_tiles(model, drive, alpha=alpha, input_every=every) for every in (1, 3))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.loss, b.loss) and torch.equal(a.generator, b.generator)
        trained = {name: gradient for name, gradient in b.grads.items() if gradient is not None}
        assert [name for name, gradient in trained.items() if not torch.equal(a.grads[name], gradient)] == []


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("name", everyday(ALIKE, ["bf16", "dropout"]))
def test_to_the_bit_as_with_inputs_that_are_stored(name: str, alpha: float) -> None:
    """Tiles round otherwise than stock in bfloat16, and draw other random numbers."""
    with inputs_compared() as names:
        in_alike(name, alpha)
    assert len(set(names)) == 2


@pytest.mark.parametrize("adapted", everyday([False, True], [False]))
def test_the_forwards_dropout(adapted: bool) -> None:
    model = lora(toy(layers=LAYERS), 0.2, ["qkv", "up"]) if adapted else toy(lambda: Block(dropout=0.2), layers=LAYERS)
    with attached(model.double(), alpha=0.5, input_every=3), inputs_compared() as names:
        by_gradients, by_values = slope(model, BATCH, seed=1)
    assert len(set(names)) == 2 and by_gradients == pytest.approx(by_values, rel=1e-5)


@pytest.mark.parametrize("block", everyday(CHANGES, CHANGES[:1]))
def test_a_call_that_does_other_work_than_the_recipe(block: type[Block]) -> None:
    compare(toy(block, layers=LAYERS), drive_changing, steps=3, alpha=0.5)


@pytest.mark.parametrize("name, alpha", everyday([("llama", 0.0), ("mixtral", 0.5), ("falcon_h1", 0.0)], [("llama", 0.0)]))
@pytest.mark.filterwarnings("ignore")
def test_where_attentions_result_is_made_again(name: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Ulysses: no kernel's output is attention's result."""
    monkeypatch.setattr(TiledAttention, "_is_result", lambda self, value, result: False)
    if name == "falcon_h1":
        with inputs_compared() as names:
            chain.check(name, 16, alpha, settings={"input_every": 3}, own=HYBRIDS[name])
        assert len(set(names)) == 2
    else:
        compare(small(name, layers=LAYERS), alpha=alpha, steps=3)


# ---- whole layers, layers on the device

PLACED = [({"tile": None, "alpha": 0.0}, LAYERS, 2), ({"tile": None, "alpha": 0.6}, LAYERS, 2)]
PLACED += [({"tile": tile, "alpha": 0.5, "resident_layers": 3, "input_every": 4}, 8, 3) for tile in (None, 16)]


@pytest.mark.parametrize("settings, layers, computed", PLACED, ids=str)
def test_placements(settings: dict[str, Any], layers: int, computed: int) -> None:
    """Without a tile's length a layer is one tile. A layer on the device may be in a group, too."""
    model = small("llama", layers=layers)
    with inputs_compared() as names, attached(model, **{"input_every": 3, **settings}) as handle:
        want = step(small("llama", layers=layers), BATCH)
        for _ in range(2):
            assert_step(step(model, BATCH), want)
        report = handle.report()
    assert_was_tiled(report, layers)
    without = report["layers_without_input"]
    assert len(set(names)) == len(without) == computed
    assert "resident_layers" not in settings or any(layer - 1 in report["layers_on_device"] for layer in without)
    assert settings["tile"] or len(names) == 2 * computed


# ---- graphs


def states_and_parts(model: nn.Module, number: int) -> Outcome:
    """Ask for hidden states, run backward from the middle, for upper layers alone, twice, and for what comes in."""
    x = BATCH.embeds.clone().requires_grad_()
    out = model(inputs_embeds=x, labels=BATCH.labels, output_hidden_states=True)
    upper = torch.autograd.grad(out.loss, [*model.model.layers[2].parameters()], retain_graph=True)
    out.hidden_states[2].pow(2).mean().backward(retain_graph=True)
    out.loss.backward(retain_graph=True)
    inner = torch.autograd.grad(out.loss, [x, *out.hidden_states[1:4]], retain_graph=True)
    out.hidden_states[3].abs().mean().backward()
    parts = {f"part {i}": part for i, part in enumerate([*upper, *inner, *(state.detach() for state in out.hidden_states)])}
    return Outcome(out.loss.detach(), {**gradients(model), **parts, "x": x.grad})


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_parts_of_backwards_in_any_order(alpha: float) -> None:
    compare(small("llama", layers=LAYERS), states_and_parts, alpha=alpha)
