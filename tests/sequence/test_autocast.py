"""Models with weights in float32 in parts under torch.autocast, as a Trainer's bf16=True runs them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import ds_memo
from ds_memo.deepspeed import sequence
from tests import architectures
from tests.distributed_harness.common import DistributedTest
from tests.sequence.whole_and_parts import OWN, Batch, gradients, make, mean_loss, memo, summed_gradients

OWN["one head of Mamba-2"] = functools.partial(architectures.build, "nemotron_h", mamba_num_heads=1, n_groups=1)
FAMILIES = (*("llama", "gemma2", "deepseek_v3", "qwen3_next", "one head of Mamba-2", "minimax"),)
"""Kernels with caps and without, keys and values of two sizes; convolutions, scans, a mixer on all tokens."""
HOW = ((2, None), (1, memo(0.5)), (2, memo(0.5, tile_tokens=11)))
ROUNDING = 1.5
"""Largest distance from gradients in float32, in that of stock under autocast: roundings differ, as kernels do."""


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("name, how", [(name, number % 3) for number, name in enumerate(FAMILIES)])
    def test_gradients_are_rounded_as_stocks(self, name, how):
        ulysses, settings = HOW[how]
        model, autocast = make(name), torch.autocast("cpu", torch.bfloat16)
        lengths = ((67,), (67,)) if name == "minimax" else ((20, 27, 20), (1, 66))
        batch = Batch(lengths, vocabulary=model.config.get_text_config().vocab_size)
        exact = batch.apart(model).grads
        with autocast:
            logits = batch.apart_logits(model)
        mean_loss(logits, batch.labels).backward()
        stock = gradients(model)
        sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
        if settings is not None:
            ds_memo.attach(model.train(), settings)
        with autocast:
            _, loss = batch.forward(model)
        loss.backward()
        assert distance(summed_gradients(model), exact) <= ROUNDING * distance(stock, exact)


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(got[name] - gradient).flatten() for name, gradient in want.items()]).norm())
