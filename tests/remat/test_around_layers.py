"""Hooks, escapes, and every way a layer can be called and a model attached."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_memo
from tests.models import HIDDEN, LAYERS, Batch, Block, Outcome, Toy, assert_same, compare_with_stock, every_config, step
from tests.remat.products import Flops
from tests.remat.situations import BATCH, Lines, drive, toy
from tests.tiles.rig import assert_step

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")

# ---- hooks and what escapes


@every_config
def test_a_hook_that_holds_what_forwards_and_replays_produce(config: dict) -> None:
    """No copy, reload or replay may overwrite it, in this step or the next: slots of a reload buffer that escape stay."""

    def hold_everything(model: nn.Module, number: int) -> Outcome:
        held = []
        hooks = [
            b.qkv.register_forward_hook(lambda module, args, out: held.append((out, out.detach().clone()))) for b in model.blocks
        ]
        outcome = drive(model, number)
        step(model, Batch.random(2, 17, seed=10 + number))
        assert len(held) >= 2 * len(model.blocks) and all(torch.equal(tensor, value) for tensor, value in held)
        for hook in hooks:
            hook.remove()
        return outcome

    compare_with_stock(toy(), hold_everything, config)


@every_config
def test_backward_hooks(config: dict) -> None:
    """A hook of a layer, one of a part of it, and one of a tensor inside."""

    class Hooked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
            self.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(self.norm2(x))
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 3)
            return self.down(F.gelu(y))

    compare_with_stock(toy(Hooked), drive, config)


# ---- how layers are called


@every_config
def test_arguments_that_share_names_with_ours(config: dict) -> None:
    class Named(Lines):
        def forward(self, x: torch.Tensor, *, fn: Any, layer: int, preserve_rng_state: float) -> torch.Tensor:
            return x + self.b(fn(self.a(x))) * layer * preserve_rng_state

    arguments = {"fn": F.gelu, "layer": 3, "preserve_rng_state": 0.5}
    compare_with_stock(toy(Named), lambda model, number: step(model, BATCH, **arguments), config)


@every_config
def test_layers_that_return_structures(config: dict) -> None:
    class Returns(Block):
        def forward(self, x: torch.Tensor, extra: torch.Tensor | None) -> dict:
            y = super().forward(x)
            more = self.attend(x) if extra is None else extra * 0.5 + self.feed(x)
            return {"out": (y, [more, None, torch.eye(2).to_sparse(), 7]), "same": x}

    class Model(Toy):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            extra = None
            for block in self.blocks:
                returned = block(x, extra)
                x, (extra, *_, seven) = returned["out"]
                x = x + 0.1 * returned["same"] * (seven / 7)
            return x + extra

    torch.manual_seed(0)
    compare_with_stock(Model(Returns), drive, config)


class CallsCheckpoint(Toy):
    """A model that checkpoints its own layers, as models with such a flag do."""

    checkpoint: Any = None
    """The checkpoint function; None: ds_memo's where the model is attached."""

    def run_blocks(self, x: torch.Tensor, how: str = "module") -> torch.Tensor:
        checkpoint = self.checkpoint or (
            ds_memo.checkpoint if self in ds_memo.runtime.attach._attached else lambda fn, *args, **kw: fn(*args)
        )
        x = x
        for block in self.blocks:
            if how == "module":
                x = checkpoint(block, x, use_reentrant=False)
            elif how == "methods":
                x = x + checkpoint(block.attend, x)
                x = x + checkpoint(block.feed, x, use_reentrant=True)
            else:
                x = checkpoint(lambda x, block=block: block(x), x)
        return x


@pytest.mark.parametrize("how", ["module", "methods", "function", "module in tiles"])
def test_checkpoint_called_by_the_model(how: str) -> None:
    torch.manual_seed(0)
    model, config, (how, *in_tiles) = CallsCheckpoint(), {"alpha": 0.5, "resident_layers": 1}, how.split()
    if in_tiles:
        config |= {"tile_tokens": 16, "plan": {"enabled": False}}
    same = assert_step if in_tiles else assert_same
    report = compare_with_stock(model, lambda model, _: step(model, BATCH, how=how), config, steps=5, layers=(), same=same)
    assert report["bytes_to_host"] > 0 and (not in_tiles or report["tiles"]["layers"] == [0, 1, 2, 3])


@every_config
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_several_layers(config: dict, reentrant: bool) -> None:
    class Model(Toy):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            def half(x: torch.Tensor, first: int) -> torch.Tensor:
                for block in self.blocks[first : first + 2]:
                    x = block(x)
                return x

            x = x
            for first in (0, 2):
                x = torch_checkpoint(half, x, first, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    report = compare_with_stock(Model(), drive, config)
    assert report["frames"] == 0 and any("around its layers" in warning for warning in report["warnings"])


def test_checkpoint_around_each_layer() -> None:
    """With nothing configured, memo checkpoints the first pass and not the second: torch's would see other tensors."""

    class Model(Toy):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch_checkpoint(block, x, use_reentrant=False)
            return x

    def stepped(model: nn.Module, number: int) -> Outcome:
        outcome = step(model, BATCH)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        return outcome

    torch.manual_seed(0)
    report = compare_with_stock(Model(), stepped, {"plan": {"enabled": False}}, steps=4)
    assert report["frames"] == 0 and "torch.utils.checkpoint, or its own, around its layers" in report["warnings"][0]


@every_config
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_attention_inside_a_layer(config: dict, reentrant: bool) -> None:
    """It recomputes attention whatever is kept. The report counts that, and a warning comes once."""

    class Checkpoints(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch_checkpoint(self.attend, x, use_reentrant=reentrant)
            return x + self.feed(x)

    model = toy(Checkpoints)
    report = compare_with_stock(model, drive, config, steps=2)
    assert report["attention_recomputed"] == 2 * LAYERS
    assert [warning.split(",")[0] for warning in report["warnings"]] == [
        "layer blocks.0: a part of it runs under torch.utils.checkpoint"
    ]
    assert "50% of its GEMM FLOPs, 1 attention calls" in report["warnings"][0]
    handle = ds_memo.attach(model, config)
    loss = model(BATCH.embeds.clone().requires_grad_(), BATCH.labels).loss
    with Flops() as ran:
        loss.backward()
    assert ran.attention == LAYERS == handle.report()["attention_recomputed"]


def test_two_models_that_call_checkpoint() -> None:
    torch.manual_seed(0)
    models = [CallsCheckpoint(), CallsCheckpoint()]
    stocks = [copy.deepcopy(model) for model in models]
    handles = [ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}, layers=()) for model in models]
    for model, stock in zip(models, stocks, strict=True):
        assert_same(step(model, BATCH), step(stock, BATCH))
    assert all(handle.report()["frames"] == LAYERS for handle in handles)
    with pytest.raises(ds_memo.MemoError, match="2 models attached and none of them in forward"):
        ds_memo.checkpoint(lambda x: models[0].blocks[0](x), BATCH.embeds)


def test_a_model_that_calls_checkpoint_without_memo() -> None:
    """Never attached, detached, or next to an attached one: it calls torch's checkpoint, and a warning comes."""
    torch.manual_seed(0)
    model, other = CallsCheckpoint(), CallsCheckpoint()
    stocks = [copy.deepcopy(model), copy.deepcopy(other)]
    model.checkpoint = other.checkpoint = ds_memo.checkpoint
    with pytest.warns(ds_memo.MemoWarning, match="outside any attached model, so torch.utils.checkpoint does it"):
        assert_same(step(model, BATCH), step(stocks[0], BATCH))
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}, layers=())
    with pytest.warns(ds_memo.MemoWarning, match="outside any attached model"):
        assert_same(step(other, BATCH), step(stocks[1], BATCH))
    assert handle.report()["layers"] == handle.report()["frames"] == 0
    assert_same(step(model, BATCH), step(stocks[0], BATCH))


def test_a_layer_that_checkpoints_a_module_of_no_model() -> None:
    """It is called as the layer calls it, also in the replay, where no model is in its forward."""
    torch.manual_seed(0)
    outside = nn.Linear(HIDDEN, HIDDEN)

    class Calls(Block):
        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return super().feed(ds_memo.checkpoint(outside, x, preserve_rng_state=False))

    class Stock(Block):
        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return super().feed(outside(x))

    model, stock = Toy(Calls), Toy(Stock)
    stock.load_state_dict(model.state_dict())
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ds_memo.checkpoint was called outside")
        for _ in range(2):
            assert_same(step(model, BATCH), step(stock, BATCH))
