"""Gradients stay stock's whatever training does around the layers: randomness, batches, graphs."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.profile.live import LiveBytes
from ds_memo.remat import recorded
from tests.everyday import everyday
from tests.faults import put_in
from tests.inside import inside
from tests.models import (
    BF16,
    HIDDEN,
    LAYERS,
    VOCAB,
    Batch,
    Block,
    Outcome,
    build,
    compare_with_stock,
    every_config,
    gradients,
    step,
)
from tests.remat.products import Flops
from tests.remat.situations import (
    BATCH,
    IN_TILES,
    WAYS,
    Lines,
    Log,
    assert_in_way,
    assert_nothing_leaked,
    compare,
    drive,
    every_way,
    toy,
)

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")

# ---- randomness, precision, parameters


@every_config
@pytest.mark.parametrize("more", [{"resid_pdrop": 0.2, "embd_pdrop": 0.2}, {"attn_pdrop": 0.2}], ids=["around", "inside"])
def test_dropout(config: dict, more: dict) -> None:
    compare_with_stock(build("gpt2", **more), lambda model, number: step(model, BATCH, seed=number), config)


@every_config
def test_lora(config: dict) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(build("llama"), lora).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)  # starts as zeros, which would hide lora_A
    report = compare_with_stock(model, lambda model, number: step(model, BATCH, seed=number), config)
    assert report["frames"] == 3 * LAYERS


@every_way()
def test_frozen_first_layers(way: str) -> None:
    """They train in the third step."""

    def thaw(model: nn.Module, number: int) -> Outcome:
        model.blocks[:2].requires_grad_(number == 2)
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    compare(toy(), thaw, way)


@every_config
def test_replaced_parameters(config: dict) -> None:
    """Each step replaces weights that memo read when it attached, and freezes another of them."""

    class Chain(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.c(F.gelu(self.b(F.gelu(self.a(x)))))

    def replace(model: nn.Module, number: int) -> Outcome:
        for layer in model.blocks:
            layer.a.weight = nn.Parameter(layer.a.weight.data.clone(), requires_grad=number % 2 == 0)
            layer.b.weight = nn.Parameter(layer.b.weight.data.clone(), requires_grad=number % 2 == 1)
        return drive(model, number)

    compare_with_stock(toy(Chain), replace, config, steps=4)


CAST = [("plain", "compiled"), ("mixtral", "mixed"), ("mixtral", "recomputed")]
CAST += [("llama", way) for way in WAYS if way != "compiled"]


@pytest.mark.parametrize("name, way", everyday(CAST, [("llama", "tiles"), ("mixtral", "mixed")]))
def test_autocast_but_in_the_second_step(name: str, way: str) -> None:
    def cast(model: nn.Module, number: int) -> Outcome:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number != 1):
            return drive(model, number)

    compare(build(name), cast, way, tolerance=BF16)


@every_config
def test_mixture_of_experts_in_a_python_loop(config: dict) -> None:
    """An expert's number of tokens differs from step to step, so no recipe can be followed."""
    model = build("mixtral", experts_implementation="eager")
    compare_with_stock(model, lambda model, number: step(model, Batch.random(2, 17, seed=number)), config, steps=5)


@every_config
def test_dropout_of_a_product_that_the_replay_leaves_out(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the mask is made like the product but does not depend on it: the first call's recipe is followed."""
    analyses: list[int] = []
    put_in(monkeypatch, recorded, "Analyse", lambda right, *args: analyses.append(1) or right(*args))
    compare_with_stock(toy(lambda: Block(dropout=0.2)), drive, config, steps=4)
    assert len(analyses) == LAYERS


@every_config
def test_work_that_settles_is_analysed_no_more(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's first calls, and one later call, each differ from the call before."""
    unlike = [0, 1, 2, 3, 1, 2, 3] + [0] * 6 + [1] + [0] * 3
    analyses: list[int] = []
    put_in(monkeypatch, recorded, "Analyse", lambda right, *args: analyses.append(number) or right(*args))

    class Varies(Lines):
        def forward(self, x: torch.Tensor, products: int) -> torch.Tensor:
            y = F.gelu(self.a(self.norm(x)))
            for _ in range(products):
                y = F.gelu(self.c(y))
            return x + self.b(y)

    def varied(model: nn.Module, step_number: int) -> Outcome:
        nonlocal number
        number = step_number
        return step(model, BATCH, products=unlike[number])

    number = 0
    compare_with_stock(toy(Varies, layers=1), varied, config | {"resident_layers": 0}, steps=len(unlike))
    # Calls 1, 3 and 5 leave recipes. From 6 on all are analysed, until three in a row equal the one before. Call 13 leaves one.
    assert analyses == [0, 2, 4, *range(6, 11), 14], analyses


def test_gemms_behind_a_departure_are_counted() -> None:
    """Every other call leaves the recipe at its second product."""

    class Turns(Lines):
        def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
            y = torch.tanh(self.a(self.norm(x)))
            return x + torch.tanh(self.b(torch.tanh(y @ self.c.weight[:, :32] @ self.b.weight[:32] if other else self.c(y))))

    model, forward, backward = toy(Turns), 0, 0
    handle = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": LAYERS})
    for number in range(6):
        with Flops() as mode:
            loss = model(BATCH.embeds, BATCH.labels, other=number % 2 == 1).loss
        forward += mode.total - 2 * BATCH.labels.numel() * HIDDEN * VOCAB
        with Flops() as mode:
            loss.backward()
        backward += mode.total - 4 * BATCH.labels.numel() * HIDDEN * VOCAB
    share = handle.report()["gemm_flops_recomputed_fraction"]
    handle.detach()
    assert share == pytest.approx((backward - 2 * forward) / forward) and share > 0


@every_config
def test_router_logits_and_their_loss(config: dict) -> None:
    """Hooks take the logits out of the layer, and a second loss runs backward through them."""
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    compare_with_stock(model, drive, config)


# ---- batches


@every_way("compiled")
def test_changing_batch_and_length(way: str) -> None:
    shapes = [(2, 17), (1, 64), (2, 17), (3, 5), (2, 33), (5, 14)]
    compare(build("llama"), lambda model, number: step(model, Batch.random(*shapes[number])), way, steps=6)


@every_way("compiled")
def test_packed_position_ids(way: str) -> None:
    """Hugging Face models do not detect packing if they have a cache. Memo gives them none, so stock gets none either."""
    positions = torch.cat([torch.arange(5), torch.arange(9), torch.arange(3)]).expand(2, -1)
    compare(build("llama"), lambda model, number: step(model, BATCH, position_ids=positions, use_cache=False), way)


@every_way("compiled")
def test_padding_mask(way: str) -> None:
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, :6] = 0
    masks = [mask, None, mask]
    compare(build("llama"), lambda model, number: step(model, BATCH, attention_mask=masks[number]), way)


# ---- graphs


@every_way("compiled")
def test_three_backwards_of_one_graph(way: str) -> None:
    """Each replay draws the forward's random numbers. tests/swap/test_whole_models.py has other orders."""

    def thrice(model: nn.Module, number: int) -> Outcome:
        torch.manual_seed(number)
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare(toy(lambda: Block(dropout=0.0 if way in IN_TILES else 0.2)), thrice, way)  # tiles draw other numbers than stock


@every_way()
def test_several_forwards_before_a_backward(way: str) -> None:
    lengths = (17, 17, 17) if way == "compiled" else (17, 71, 9)  # each new one is compiled again
    batches = [Batch.random(2, length, seed=length + index) for index, length in enumerate(lengths)]

    def several(model: nn.Module, number: int) -> Outcome:
        losses = [model(inputs_embeds=batch.embeds, labels=batch.labels).loss for batch in batches]
        for index in (1, 2, 0):
            losses[index].backward()
        return Outcome(sum(losses).detach(), gradients(model))

    compare(toy(), several, way, steps=2)


@every_config
def test_backwards_from_the_middle(config: dict) -> None:
    """With losses on hidden states, the upper layers are replayed once and the lower ones twice. The states stay as they were."""

    def middle(model: nn.Module, number: int) -> Outcome:
        out = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels, output_hidden_states=True)
        out.hidden_states[2].pow(2).mean().backward(retain_graph=True)
        out.loss.backward(retain_graph=True)
        out.hidden_states[1].abs().mean().backward()
        states = {f"state {i}": state.detach() for i, state in enumerate(out.hidden_states)}
        return Outcome(out.loss.detach(), gradients(model) | states)

    compare_with_stock(build("llama"), middle, config)


@every_way()
def test_eval_between_forward_and_backward(way: str) -> None:
    def evaluate(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        for mode in (torch.no_grad, *([] if way == "compiled" else [torch.inference_mode])):
            with mode():
                model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        model.eval()
        with torch.no_grad():
            model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        model.train()
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare(toy() if way in (*IN_TILES, "compiled") else build("llama"), evaluate, way)


@every_config
def test_eval_with_gradients(config: dict) -> None:
    def evaluate(model: nn.Module, number: int) -> Outcome:
        return drive(model.train(number != 1), number)

    compare_with_stock(toy(lambda: Block(dropout=0.2)), evaluate, config)


@every_way("recomputed", "compiled")
def test_a_graph_dropped_without_a_backward(way: str, frames: Any) -> None:
    stock = step(build("llama"), BATCH)
    handle = ds_memo.attach(model := build("llama"), WAYS[way])
    for _ in range(5):
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        assert inside(handle).slab.used > 0
        del loss
    assert_nothing_leaked(handle, frames)
    assert inside(handle).slab.size == inside(handle).slab.peak_used  # later steps took the blocks of the first
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    torch.autograd.grad(loss, next(model.model.layers[-1].parameters()))  # a part of a backward
    del loss
    assert_nothing_leaked(handle, frames)
    assert_in_way(way, step(model, BATCH), stock)
    assert_nothing_leaked(handle, frames)


# ---- tensors are freed after their last use, without garbage collection


@pytest.fixture
def run():
    """Run three steps of a small model without garbage collection. Return bytes after each forward, each step, and the slab's."""

    def steps(**memo) -> dict[str, list[int]]:
        model = build("llama")
        handle = ds_memo.attach(model, {"enabled": True, **memo})
        tokens = torch.randint(0, 32, (1, 64))
        held = {"forward": [], "step": [], "slab": []}
        gc.collect()
        gc.disable()
        try:
            with LiveBytes() as count:
                for _ in range(3):  # the first is analysed, the others follow the recipe
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    held["forward"].append(count.live)
                    loss.backward()
                    model.zero_grad()
                    del loss
                    held["step"].append(count.live)
                    held["slab"].append(handle.report()["host"]["slab"])
        finally:
            gc.enable()
            handle.detach()
        return held

    return steps


TILES = {"resident_layers": 0, "tile_tokens": 16}


@pytest.mark.parametrize("more", [{"resident_layers": 0}, {"resident_layers": 2}, TILES, TILES | {"input_every": 3}])
def test_nothing_waits_for_the_garbage_collector(run, more):
    held = run(alpha=0.5, **more)
    assert len(set(held["step"])) == 1, held
    assert len(set(held["slab"])) == 1, held


def test_the_first_step_holds_no_more_than_the_next(run):
    held = run(alpha=0.0, resident_layers=0)
    assert len(set(held["forward"])) == 1, held


# ---- observers are told which layer runs


@every_config
def test_each_layer_begins_ends_and_replays_once(config: dict) -> None:
    """In the step that analyses the layers, and in the one that follows their recipes."""
    model = toy()
    handle = ds_memo.attach(model, config)
    inside(handle).remat.host.observers = (*inside(handle).remat.host.observers, log := Log())
    for _ in range(2):
        step(model, BATCH)
        forward = [(what, layer) for layer in range(LAYERS) for what in ("begins", "ends")]
        assert log == [*forward, *(("replays", layer) for layer in reversed(range(LAYERS)))]
        log.clear()


def test_a_refusal_rises_out_of_no_mode() -> None:
    """Alpha is decided when the first layer has run. Its frame is freed, and observers are told that the pass is over."""
    model = toy()
    handle = ds_memo.attach(model, {"resident_layers": 0, "alpha": 0.5, "host_memory_gib": 1e-5})
    inside(handle).remat.host.observers = (*inside(handle).remat.host.observers, log := Log())
    with pytest.raises(ds_memo.MemoError, match=r"even memo\.alpha 0 does not fit") as refusal:
        step(model, BATCH)
    assert log == [("begins", 0), "interrupted"]
    assert "__exit__" not in [line.name for line in traceback.extract_tb(refusal.tb)]
    assert inside(handle).slab.used == 0 and [layer.recipes for layer in inside(handle).layers] == [{}] * LAYERS
