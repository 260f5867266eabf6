"""Calls that tiles cannot follow run whole, whatever an earlier call of the layer did, and the report shows the latest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ds_memo
from ds_memo.tiles import attention_call
from ds_memo.tiles.check import probe, refuse
from ds_memo.tiles.slices import Arguments
from tests import architectures
from tests.faults import put_in
from tests.models import HEADS, HIDDEN, Block, Outcome, Toy, step
from tests.tiles.rig import BATCH, assert_step, attached, compare, reasons, small, tiled_layers, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")

# ---- a checkpoint inside the layer


class Checkpoints(Block):
    """Runs one of its halves under torch.utils.checkpoint, once `on` is set."""

    half, reentrant, on = "feed", False, True

    def run_half(self, half: str, x: torch.Tensor) -> torch.Tensor:
        run = getattr(super(), half)
        return checkpoint(run, x, use_reentrant=self.reentrant) if self.on and half == self.half else run(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_half("attend", x)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_half("feed", x)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("half", ["attend", "feed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_the_layer(reentrant: bool, half: str, first: int) -> None:
    def drive(model: Any, number: int) -> Outcome:
        for block in model.blocks:
            block.half, block.reentrant, block.on = half, reentrant, number >= first
        return step(model, BATCH)

    report = compare(toy(Checkpoints), drive, steps=3, quiet=True)
    refused = {attention_call.UNDER_A_CHECKPOINT} if first == 0 or half == "attend" or reentrant else set()
    assert set(report["tiles"]["not_tiled"].values()) == refused
    assert report["tiles"]["layers"] == ([] if refused else [0, 1])


# ---- hooks


def test_flops_of_a_step() -> None:
    """FlopCounterMode has hooks of all modules, which PyTorch cannot call in a tile's backward."""
    stock, model = toy(), toy()
    with attached(model, quiet=True) as handle:
        with FlopCounterMode(display=False) as flops:
            got = step(model, BATCH)
        assert reasons(handle) == ["a hook of all modules, as FlopCounterMode has, would run once for each tile"]
        with FlopCounterMode(display=False) as stocks:
            want = step(stock, BATCH)
        assert_step(got, want)
        assert flops.get_total_flops() >= stocks.get_total_flops()
        assert_step(step(model, BATCH), step(stock, BATCH))
        assert tiled_layers(handle) == [0, 1] and not reasons(handle)


@pytest.mark.parametrize("which", ["register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"])
def test_the_report_shows_the_latest_call(which: str) -> None:
    with attached(model := toy(), quiet=True) as handle:
        for hooked in (False, True, False, True):
            seen: list[Any] = []
            hooks = [getattr(block.down, which)(lambda *_, seen=seen: seen.append(1)) for block in model.blocks if hooked]
            step(model, BATCH)
            for hook in hooks:
                hook.remove()
            assert tiled_layers(handle) == ([] if hooked else [0, 1])
            assert reasons(handle) == (["a hook of its down would run once for each tile"] if hooked else [])
            assert len(seen) >= 2 * hooked


def test_hidden_states_that_are_asked_for_once() -> None:
    """Transformers leaves hooks on attention modules after such a call. They collect what a call asks for."""
    stock, model = small("llama"), small("llama")
    with attached(model) as handle:
        for asked in ({}, {"output_hidden_states": True}, {}):
            assert_step(step(model, BATCH, **asked), step(stock, BATCH, **asked))
            assert tiled_layers(handle) == [0, 1] and not reasons(handle)
        assert all(layer.self_attn._forward_hooks for layer in model.model.layers)
        with torch.no_grad():
            got, want = (
                each.eval()(inputs_embeds=BATCH.embeds, output_hidden_states=True, use_cache=False) for each in (model, stock)
            )
        for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
            torch.testing.assert_close(a, b)
        assert_step(step(model.train(), BATCH), step(stock.train(), BATCH))
        assert tiled_layers(handle) == [0, 1] and not handle.report()["warnings"]


def test_router_logits_that_are_asked_for_once() -> None:
    """A recorder's hook holds the router's logits of each layer for a loss. In tiles it would hold those of the last tile."""
    stock, model = small("mixtral"), small("mixtral")
    for each in (stock, model):
        each.router_aux_loss_coef = 10.0
    with attached(model, quiet=True) as handle:
        for asks in (False, True, False):
            asked = {"output_router_logits": True} if asks else {}
            assert_step(step(model, BATCH, **asked), step(stock, BATCH, **asked))
            assert tiled_layers(handle) == ([] if asks else [0, 1])
            assert all("a hook of its" in why for why in reasons(handle)) and bool(reasons(handle)) == asks


def test_idle_hooks_that_are_taken_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refuse, "_is_idle", lambda hook: False)
    with pytest.raises(ds_memo.MemoWarning, match="a hook of its self_attn"):
        test_hidden_states_that_are_asked_for_once()


# ---- arguments that the layer writes to


class WritesToItsState(Block):
    """Keeps the latest token for the next call, as layers do in a generation."""

    def forward(self, x: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        out = super().forward(x) + state[0][:, None]
        state[0].mul_(0.5).add_(x[:, -1])
        return out


class KeepsStates(Toy):
    def run_blocks(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.states = [[torch.ones(x.shape[0], HIDDEN)] for _ in self.blocks]
        for block, state in zip(self.blocks, self.states, strict=True):
            x = block(x, state)
        return x


def evaluated(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(BATCH.embeds, BATCH.labels).logits, *(state for (state,) in model.states)]


def check_states() -> None:
    torch.manual_seed(0)
    model = KeepsStates(WritesToItsState, layers=2)
    want = evaluated(model)
    with attached(model, quiet=True) as handle:
        for _ in range(2):
            torch.testing.assert_close(evaluated(model), want)
        assert reasons(handle) == [f"it writes to an argument of the shape (2, {HIDDEN}), which tiles would do each"]


def test_a_state_that_the_layer_writes_to() -> None:
    check_states()


def test_a_check_on_the_callers_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_given(right: Callable[..., Any], arguments: Any, hidden: torch.Tensor) -> Any:
        return arguments._with_hidden(hidden, *tree_unflatten(arguments._leaves, arguments._spec))

    put_in(monkeypatch, Arguments, "first", as_given)
    with pytest.raises(AssertionError, match="not close"):
        check_states()


@pytest.mark.processes  # Transformers looks for a compiler
def test_rwkv_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers write to lists of states, which a check must not run with. It is known to mix tokens, and is not checked."""
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = architectures.build("rwkv").eval()(input_ids=ids, use_cache=True).logits
    for first in ("known", "checked"):
        if first == "checked":
            monkeypatch.setattr(probe, "WHOLE", frozenset())
        model = architectures.build("rwkv").eval()
        with attached(model, tile=4, quiet=True) as handle, torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model(input_ids=ids, use_cache=True).logits, want)
            assert not tiled_layers(handle) and reasons(handle)


# ---- nested tensors


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_leaves_out_its_padding() -> None:
    """Without gradients PyTorch's encoder gives its layers nested tensors, which have no sizes."""
    model = Encoder().eval()
    padding = torch.zeros(2, 23, dtype=torch.bool)
    padding[1, 15:] = True
    with torch.no_grad():
        want = model(BATCH.embeds, padding)
        with attached(model, layers=["encoder.layers.0", "encoder.layers.1"], quiet=True) as handle:
            torch.testing.assert_close(model(BATCH.embeds, padding), want)
            assert reasons(handle) == ["its first argument is no tensor of hidden states (batch, tokens, hidden)"]
