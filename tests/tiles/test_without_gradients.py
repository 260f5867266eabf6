"""Calls without gradients (evaluation, a reference pass, generation) in tiles keep nothing. Norms beside the layers, too."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ds_memo
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.tiles import norms
from tests.models import HIDDEN, Batch, Block, Different, Outcome, build, poisoned_memory, step
from tests.tiles.rig import assert_step, assert_within, attached, compare, layers_of, reasons, small, strict, tiled_layers, toy

LENGTH, TILE = 256, 64
BATCH = Batch.random(1, LENGTH)
WAYS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Sizes(TorchDispatchMode):
    """Sizes of the tensors that ops make, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[int] = []

    @property
    def largest(self) -> int:
        return max(self.all)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensor_leaves((args, kwargs))}
        self.all += [tensor.numel() for tensor in tensor_leaves(out) if tensor.untyped_storage()._cdata not in given]
        return out


def evaluate(model: nn.Module, batch: Batch = BATCH, way: str = "no_grad") -> torch.Tensor:
    """Return the logits."""
    no_cache = {"use_cache": False} if hasattr(model, "config") else {}
    with WAYS[way]():
        return model(inputs_embeds=batch.embeds, labels=batch.labels, **no_cache).logits.clone()


@contextmanager
def watched(modules: Iterable[nn.Module]) -> Iterator[Sizes]:
    """See what is made inside some modules: the output head's tensors are large, too."""
    sizes, hooks = Sizes(), []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(lambda *_: sizes.__enter__() and None))
        hooks.append(module.register_forward_hook(lambda *_: sizes.__exit__(None, None, None)))
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


CASES = [("llama", way, when) for way in WAYS for when in ("first", "behind training")]


@pytest.mark.parametrize("name, way, when", [*CASES, ("plain", "no_grad", "first"), ("mixtral", "no_grad", "behind training")])
def test_same_as_stock_and_no_tensor_larger_than_attention_needs(name: str, way: str, when: str) -> None:
    model, stock = small(name).eval(), small(name).eval()
    want = evaluate(stock, way=way)
    with watched(layers_of(stock)) as whole, FlopCounterMode(display=False) as stocks:
        evaluate(stock, way=way)
    with attached(model, tile=TILE) as handle:
        if when != "first":
            step(model.train(), BATCH)
        before = handle.report()
        with poisoned_memory():
            got = [evaluate(model.eval(), way=way)]
        with watched(layers_of(model)) as in_tiles, FlopCounterMode(display=False) as flops:
            got.append(evaluate(model, way=way))
        for logits in got:
            torch.testing.assert_close(logits, want, rtol=2e-6, atol=2e-6)
            assert logits.is_inference() == want.is_inference()
        after = handle.report()
        assert tiled_layers(handle) == [0, 1] and not reasons(handle)
        for kept in ("frames", "bytes_to_host", "stored_bytes_per_layer"):
            assert after[kept] == before[kept]
    assert whole.largest >= LENGTH * 2 * HIDDEN  # the MLP
    assert in_tiles.largest == max(LENGTH * HIDDEN, whole.largest * TILE // LENGTH)  # the output and the queries, or a tile's MLP
    if way == "no_grad" and name != "mixtral":  # else what the post needs is not known, and the pre runs twice
        assert flops.get_total_flops() == stocks.get_total_flops()


def test_a_model_that_is_solved_for_is_evaluated_in_the_tiles_of_its_training() -> None:
    model, stock = small("llama"), small("llama").eval()
    want = evaluate(stock)
    with strict():
        handle = ds_memo.attach(model, {"tile_tokens": TILE, "plan": {"enabled": False}})
    step(model, BATCH)
    step(model, Batch.random(1, TILE))  # shorter than a tile: whole
    with watched(layers_of(model.eval())) as in_tiles:
        torch.testing.assert_close(evaluate(model), want, rtol=2e-6, atol=2e-6)
    assert in_tiles.largest == LENGTH * HIDDEN
    handle.detach()
    assert all("forward" not in vars(layer) for layer in layers_of(model))
    with watched(layers_of(model)) as whole:
        evaluate(model)
    assert whole.largest > LENGTH * HIDDEN


def test_a_reference_pass_between_forward_and_backward() -> None:
    """As DPO's: the same model, without gradients, while the frames of a pass are alive. Training does not notice."""

    def drive(model: nn.Module) -> Any:
        torch.manual_seed(1)
        embeds = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=embeds, labels=BATCH.labels).loss
        reference = evaluate(model, Batch.random(1, LENGTH, seed=5))
        (loss + reference.mean()).backward()
        return step(model, BATCH), reference

    want, reference = drive(small("llama"))
    model = small("llama")
    with attached(model, tile=TILE, alpha=0.5) as handle:
        for _ in range(2):
            got, found = drive(model)
            assert_step(got, want)
            torch.testing.assert_close(found, reference, rtol=2e-6, atol=2e-6)
            for parameter in model.parameters():
                parameter.grad = None
        assert handle.report()["bytes_to_host"]


def test_training_after_an_evaluation_came_first() -> None:
    """What an evaluation finds out about layers does not stand for training, where they drop."""
    model = toy(lambda: Block(dropout=0.1))
    outcomes = []
    for first in (False, True):
        own = copy.deepcopy(model)
        with attached(own, tile=TILE):
            if first:
                evaluate(own.eval())
            outcomes.append([step(own.train(), BATCH) for _ in range(2)])
    for got, want in zip(*outcomes, strict=True):
        assert_step(got, want)


def test_a_first_pass_without_gradients_in_training_mode() -> None:
    """The check runs the layer with gradients, and Transformers would take such a call to memo again."""
    model, stock = small("llama"), small("llama")
    with attached(model, tile=TILE) as handle:
        torch.testing.assert_close(evaluate(model), evaluate(stock), rtol=2e-6, atol=2e-6)
        assert tiled_layers(handle) == [0, 1] and handle.report()["frames"] == 0


@pytest.mark.parametrize("training", [False, True])
def test_random_numbers(training: bool) -> None:
    """Layers that draw run whole, with stock's numbers. In evaluation they draw none and run in tiles."""
    model = toy(lambda: Block(dropout=0.1))
    stock = copy.deepcopy(model)
    with attached(model, tile=TILE):
        step(model, BATCH)
        torch.manual_seed(3)
        want, state = evaluate(stock.train(training)), torch.get_rng_state()
        torch.manual_seed(3)
        with watched(layers_of(model.train(training))) as seen:
            torch.testing.assert_close(evaluate(model), want, rtol=2e-6, atol=2e-6)
        assert torch.equal(torch.get_rng_state(), state)
        assert (seen.largest == LENGTH * HIDDEN) != training


def test_norms_beside_the_layers() -> None:
    model = small("llama").eval()
    with attached(model, tile=TILE):
        evaluate(model)
        with watched([model.model.norm]) as sizes:
            evaluate(model)
    assert sum(size > TILE * HIDDEN for size in sizes.all) == 1  # the output


def test_a_cache_of_keys_and_values_is_the_models_own() -> None:
    """Generation from a prompt of several tiles: layers run whole, which one warning says, and no check writes to the cache."""
    ids = torch.randint(1, 96, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = build("llama").eval().generate(ids, max_new_tokens=6, do_sample=False)
        model = build("llama").eval()
        with attached(model, tile=32, quiet=True) as handle:
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), want)
            (reason,) = reasons(handle)
    assert "DynamicCache" in reason and "use_cache=False" in reason


def test_a_reentrant_checkpoint_runs_alike_twice() -> None:
    """Its forward has no gradients. Its second run cannot be in tiles, so the first is not."""
    model = toy()
    with attached(model, tile=TILE, quiet=True):
        step(model, BATCH)
        with watched(layers_of(model)) as seen:
            checkpoint(model.blocks[0], BATCH.embeds.clone().requires_grad_(), use_reentrant=True).sum().backward()
    assert seen.largest > LENGTH * HIDDEN


@pytest.mark.parametrize("settings", [{"tile_tokens": 0}, {"alpha": 0.5, "resident_layers": 0}])
def test_where_training_has_no_tiles_evaluation_has_none(settings: dict[str, Any]) -> None:
    model = toy()
    ds_memo.attach(model, {**settings, "plan": {"enabled": False}})
    step(model, BATCH)
    with watched(layers_of(model.eval())) as seen:
        evaluate(model)
    assert seen.largest > LENGTH * HIDDEN


# ---- norms beside the layers


TOKENS = 35


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, Batch.random(2, TOKENS, seed=number))


class OverTokens(nn.Module):
    """Divides each feature by its spread over the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(1, keepdim=True) + 0.1).sqrt()


class Counts(nn.LayerNorm):
    """A norm by tokens with a buffer that counts its calls: it must be called as often as in stock."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_the_last_norm_runs_in_tiles() -> None:
    model, lengths, seen = small("llama"), [], []
    stock = drive(model, 1)
    model.model.norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    inner = model.model.norm.forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        lengths.append(x.shape[1])
        return inner(x)

    model.model.norm.forward = watched
    with attached(model, tile=16):
        drive(model, 0)
        lengths.clear(), seen.clear()
        assert_within(drive(model, 1).grads, stock.grads)
    assert lengths == [12, 12, 11] * 4, "two rows, forward and backward"
    assert seen == [TOKENS], "hooks see the whole"


@pytest.mark.parametrize("norm", (OverTokens, Counts))
def test_a_module_that_is_no_norm_of_tokens_runs_whole(norm: type[nn.Module]) -> None:
    model = small("llama")
    model.model.norm = norm(model.config.hidden_size)
    warned = compare(model, drive, quiet=True)["warnings"]
    assert [norm.__name__ in line and "beside the layers runs whole" in line for line in warned] == [True]


def test_without_the_check_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms.compare, "is_by_token", lambda *_: True)
    model = small("llama")
    model.model.norm = OverTokens(model.config.hidden_size)
    with pytest.raises((Different, AssertionError)):
        compare(model, drive)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_long_evaluation_with_labels_fills_no_cache(adapted: bool) -> None:
    """As Trainer.evaluate runs it. Layers that fill a cache run whole; a caller that asks for the cache gets it."""
    ids = torch.randint(1, 96, (1, 4200), generator=torch.Generator().manual_seed(0))
    model = build("llama", use_cache=True, max_position_embeddings=4200).eval()
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    with torch.no_grad():
        want = model(input_ids=ids, labels=ids)
        handle = ds_memo.attach(model, {"enabled": True})
        got = model(input_ids=ids, labels=ids)
        assert handle.report()["tiles"]["not_tiled"] == {}
        with pytest.warns(ds_memo.MemoWarning, match="DynamicCache"):
            asked = model(input_ids=ids, labels=ids, use_cache=True)
    handle.detach()
    assert want.past_key_values is not None and got.past_key_values is None and asked.past_key_values is not None
    torch.testing.assert_close(got.loss, want.loss, rtol=2e-6, atol=0)
