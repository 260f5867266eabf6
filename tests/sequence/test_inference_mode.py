"""An evaluation under torch.inference_mode before training leaves no tensor of that mode behind: autograd may not save it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.sequence import exchange, kernels, mixers
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.sequence.whole_and_parts import GRADIENTS, Batch, gradients, make, mean_loss, memo

LENGTHS = ((17, 27), (44,))
FAMILIES = ("llama", "gemma2", "gpt_oss", "qwen3_next", "nemotron_h", "jamba", "falcon_h1", "recurrent_gemma", "lfm2", "minimax")
"""Attention by torch and by one op, convolutions, scans, and mixers that run whole."""
HOW = ((2, None), (1, memo(0.5)), (2, memo(0.5, tile_tokens=11)))


def left_behind(evaluate: Callable[[], Any], model: nn.Module) -> list[tuple[int, ...]]:
    """Evaluate, and return the shapes of inference tensors that stay alive, but for what the model puts into attributes."""

    def alive() -> list[torch.Tensor]:
        gc.collect()
        return [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and found.is_inference()]

    before = alive()
    with torch.inference_mode():
        evaluate()
    own = [value for module in model.modules() for value in vars(module).values()]
    known = {id(value) for value in (*before, *own)}
    for _ in range(100):
        if not (left := [tuple(tensor.shape) for tensor in alive() if id(tensor) not in known]):
            break
        time.sleep(0.1)  # gloo's thread still holds what it sent
    return left


def batch_of(name: str, model: nn.Module) -> Batch:
    return Batch(LENGTHS if name != "minimax" else ((44,), (44,)), vocabulary=model.config.get_text_config().vocab_size)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    largest = max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= GRADIENTS * max(float(gradient.norm()), 1e-3 * largest), name


CASES = [(name, (11, 0)[number % 2]) for number, name in enumerate(FAMILIES)]


@pytest.mark.parametrize("name, tile", everyday(CASES, [("gpt_oss", 11), ("gemma2", 0)]))
def test_one_rank(name: str, tile: int) -> None:
    model = make(name).train()
    batch = batch_of(name, model)
    given = {"input_ids": batch.tokens, "position_ids": batch.positions, "use_cache": False}

    def trained() -> dict[str, torch.Tensor]:
        mean_loss(model(**given).logits, batch.labels).backward()
        return gradients(model)

    want = trained()
    for made in (exchange.index, kernels._sequences, mixers._borders, mixers._numbers):
        made.cache_clear()
    handle = ds_memo.attach(model, memo(0.5, tile_tokens=tile))
    for mode in (False, True):
        assert not left_behind(lambda: mean_loss(model(**given).logits, batch.labels), model.train(mode))
    assert_close(trained(), want)
    handle.detach()


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "name, how", [("llama", 2), ("gemma2", 0), ("qwen3_next", 1), ("nemotron_h", 2), ("minimax", 0), ("one key head", 1)]
    )
    def test_parts(self, name, how):
        ulysses, settings = HOW[how]
        model = make(name)
        batch = batch_of(name, model)
        want = batch.apart(model).grads
        sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
        if settings is not None:
            ds_memo.attach(model.train(), settings)
        assert not left_behind(lambda: batch.forward(model), model)
        assert_close(batch.in_parts(model).grads, want)


@pytest.mark.parametrize(
    "make, given",
    [
        (exchange.index, ((3, 1, 4),)),
        (kernels._sequences, (((0, 3, 14), (0, 1, 5)),)),
        (mixers._borders, (((0, 3),), 14, 1)),
        (mixers._numbers, (((0, 3),), 14, 1)),
    ],
)
def test_cached_tensors(make, given):
    """What kernels on GPUs are given, too."""
    with torch.inference_mode():
        made = make(*given, torch.device("cpu"))
    tensors = [x for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, torch.Tensor)]
    assert tensors and not any(tensor.is_inference() for tensor in tensors)
