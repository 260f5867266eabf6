"""Dropout drawn from the named random states of DeepSpeed and Megatron, as their tensor-parallel layers do."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

import ds_memo
from ds_memo.remat import op_policy as keep
from ds_memo.remat import random_states
from ds_memo.remat.replay import Replay
from tests.faults import put_in
from tests.models import HEADS, HIDDEN, Batch, Block, Different, Outcome, Toy, compare_with_stock, every_config, gradients

BATCH = Batch.random(2, 17)
NAME = "model-parallel-rng"


@pytest.fixture(autouse=True)
def known_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "ATTENTION_NAMES", {*keep.ATTENTION_NAMES, "ds_memo_tests::dropping_attention"})


@pytest.fixture(params=random_states._MODULES)
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    assert get_accelerator()._name == "cpu"
    module = checkpointing
    if request.param != checkpointing.__name__:  # Megatron's has the same interface
        module = types.ModuleType(request.param)
        monkeypatch.setitem(sys.modules, request.param, module)
        module._CUDA_RNG_STATE_TRACKER = checkpointing.CudaRNGStatesTracker()
    yield module._CUDA_RNG_STATE_TRACKER
    module._CUDA_RNG_STATE_TRACKER.reset()


@torch.library.custom_op("ds_memo_tests::dropping_attention", mutates_args=(), device_types="cpu")
def dropping_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention like flash-attn's: it draws from the generator, and returns that state for the backward."""
    state = torch.get_rng_state()
    lse = torch.logsumexp(q @ k.mT, dim=-1)
    return _dropped(q, k, v, torch.rand_like(q)), lse, state


def _dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, dim=-1) @ v * (draws > 0.3)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[2])


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    *inputs, state = ctx.saved_tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    generator = torch.Generator().set_state(state.clone())  # which reads a view from where its storage begins
    draws = torch.rand(grad.shape, generator=generator)
    with torch.enable_grad():
        return torch.autograd.grad(_dropped(*inputs, draws), inputs, grad)


dropping_attention.register_autograd(_backward, setup_context=_save)


def parallel_toy(tracker: Any) -> nn.Module:
    class Parallel(Block):
        def __init__(self) -> None:
            super().__init__(dropout=0.3)

        def __deepcopy__(self, memo: Any) -> Parallel:
            other = Parallel()
            other.load_state_dict(self.state_dict())
            return other

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            b, s, _ = x.shape
            with tracker.fork():  # behind attention, the state that is supplied with it would hide one that was not put back
                x = self.dropout(self.norm1(x))
            q, k, v = self.qkv(x).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            with tracker.fork():
                out = dropping_attention(q, k, v)[0]
                return self.dropout(self.o(out.transpose(1, 2).reshape(b, s, HIDDEN)))

    torch.manual_seed(0)
    return Toy(Parallel)


def drive(tracker: Any) -> Any:
    def step(model: nn.Module, number: int) -> Outcome:
        torch.manual_seed(number)
        tracker.reset()
        tracker.add(NAME, 100 + number)
        embeds = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=embeds, labels=BATCH.labels).loss
        loss.backward()
        states = torch.cat([torch.get_rng_state(), tracker.get_states()[NAME]])
        return Outcome(loss.detach(), {**gradients(model), "the input": embeds.grad}, states)

    return step


@every_config
def test_named_states_are_put_back_for_a_replay(config: dict, tracker: Any) -> None:
    report = compare_with_stock(parallel_toy(tracker), drive(tracker), config)
    assert report["attention_recomputed"] == 0


def test_the_profile_leaves_named_states_as_they_are(tracker: Any, tmp_path: Path) -> None:
    config = {"enabled": True, "device_memory_gib": 0.001, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}
    report = compare_with_stock(parallel_toy(tracker), drive(tracker), config)
    assert report["profile"] is not None


def test_the_same_graph_twice(tracker: Any) -> None:
    """A second backward also draws the same numbers."""
    model = parallel_toy(tracker)
    tracker.add(NAME, 3)
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    twice = []
    for _ in range(2):
        loss.backward(retain_graph=True)
        twice.append(gradients(model))
    del loss
    assert all(torch.equal(twice[0][name], twice[1][name]) for name in twice[0])


def test_gradients_differ_if_they_are_not_put_back(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_states, "_MODULES", ())
    with pytest.raises(Different):
        compare_with_stock(parallel_toy(tracker), drive(tracker), {"alpha": 0.5, "resident_layers": 1})


def test_attention_that_is_supplied_leaves_the_state_behind_it(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that state, later draws in the replay differ."""
    put_in(monkeypatch, Replay, "_supplied", lambda right, *args: args[0].call.rng_after.clear() or right(*args))
    with pytest.raises(Different):
        compare_with_stock(parallel_toy(tracker), drive(tracker), {"alpha": 0.5, "resident_layers": 1})


def test_generators_that_graphs_share_are_refused(tracker: Any) -> None:
    model = parallel_toy(tracker)
    tracker.states_[NAME] = torch.Generator()
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    with pytest.raises(ds_memo.MemoError, match="use_cudagraphable_rng"):
        model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
