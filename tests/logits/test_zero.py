"""Lazy logits under ZeRO 1, 2 and 3 on two ranks, with gradient accumulation, against torch alone.

The change of a parameter under SGD is its gradient times the learning rate. Two micro-batches a step, so that the accumulation's
division is in it; ranks see different data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.logits.rig import MEMO, TILE, VOCAB, Witness, causal, lazy_calls, lora, tokens
from tests.models import assert_same_grads

pytestmark = pytest.mark.skipif(not ON_CPU, reason="CPU ranks")
MICRO = 2
LR = 1024.0
"""The change then drowns the parameter: little is lost to rounding."""
TOLERANCE = 2e-5
"""In float32, for gradients of weights in steep layers."""
Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def of_labels(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss


def of_logits(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    return loss + 0.01 * logits.logsumexp(-1).pow(2).mean()


def read_by_one_rank(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Reading takes no collective: another rank need not read."""
    outputs = model(input_ids=ids, labels=labels)
    if dist.get_rank() == 0:
        assert not outputs.logits.detach().argmax(-1).eq(-1).any()
    return outputs.loss


def plain(**more: Any) -> nn.Module:
    return causal(dtype=torch.float32, **more)


def adapted() -> nn.Module:
    return lora(causal(), target_modules=["q_proj", "lm_head"]).float()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "labels": (plain, of_labels),
    "own loss": (plain, of_logits),
    "tied": (lambda: plain(tie_word_embeddings=True), of_logits),
    "soft cap": (lambda: plain(kind="Gemma2", final_logit_softcapping=3.0, attn_implementation="eager"), of_labels),
    "LoRA on the head": (adapted, of_logits),
    "rank 0 reads": (plain, read_by_one_rank),
}


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tokens(seed=MICRO * rank + number) for number in range(MICRO)]


def stock_gradients(model: nn.Module, loss: Loss) -> dict[str, torch.Tensor]:
    """Return gradients of the mean loss over all ranks' micro-batches, in float64."""
    every = [batch for rank in range(dist.get_world_size()) for batch in batches(rank)]
    for batch in every:
        (loss(model, *batch) / len(every)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def gathered(model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}


def start(model: nn.Module, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**5},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "memo": MEMO,
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return ds_memo.initialize(model=model, optimizer=optimizer, config=config)[0]


def end(engine: Any) -> None:
    engine.memo.detach()
    engine.destroy()


def trained(model: nn.Module, loss: Loss, stage: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of one step, and the most rows of logits that were alive in one tensor."""
    before = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
    engine = start(model, stage)
    with Witness() as witness:
        for batch in batches(dist.get_rank()):
            engine.backward(loss(engine, *batch))
            if stage == 3:
                weight = model.get_output_embeddings().weight
                assert weight.ds_status.name == "NOT_AVAILABLE", "the head stays gathered"
            engine.step()
    assert lazy_calls(engine.memo) == MICRO
    after = gathered(engine.module, stage)
    end(engine)
    return {name: (before[name] - after[name]) / LR for name in before}, witness.rows


class TestZero(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_gives_the_stock_gradients(self, stage):
        for name, (build, loss) in CASES.items():
            model = build()
            want = stock_gradients(copy.deepcopy(model).double(), loss)
            got, most_rows = trained(model, loss, stage)
            print(f"stage {stage}, {name}: {most_rows} rows", flush=True)
            assert_same_grads(got, want, TOLERANCE)
            assert most_rows <= TILE, f"stage {stage}, {name}: {most_rows} rows of logits were alive in one tensor"

    @pytest.mark.parametrize("stage", [2, 3])
    def test_logits_read_after_a_step_are_of_the_weights_before(self, stage):
        model = plain()
        every = batches(dist.get_rank())
        with torch.no_grad():
            want = [model(input_ids=ids).logits.logsumexp(-1) for ids, _ in every]
        engine, kept = start(model, stage), []
        for batch in every:
            kept.append(engine(input_ids=batch[0]).logits)
            engine.backward(F.cross_entropy(kept[-1][:, :-1].flatten(0, 1), batch[1][:, 1:].flatten()))
            engine.step()
        if dist.get_rank() == 0:  # the other rank need not
            for logits, before in zip(kept, want, strict=True):
                torch.testing.assert_close(logits.detach().logsumexp(-1), before, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            assert not torch.allclose(engine(input_ids=every[0][0]).logits.logsumexp(-1), want[0], rtol=1e-2)
        end(engine)
