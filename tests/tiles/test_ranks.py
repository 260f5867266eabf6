"""Tiles under torch's DistributedDataParallel: gradients are reduced once, whatever the ranks' numbers of tiles."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ds_memo
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.models import Batch, step
from tests.tiles.rig import assert_step, assert_was_tiled, config, small

pytestmark = pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")

LENGTHS = (23, 40)
"""Four and six tiles of two sequences."""


class TestDDP(DistributedTest):
    world_size = 2

    def test_gradients_are_stocks(self) -> None:
        for attach_first in (True, False):
            self.check(attach_first)

    def check(self, attach_first: bool) -> None:
        model, rank = small("llama"), torch.distributed.get_rank()
        model.get_input_embeddings().requires_grad_(False)  # the batch has embeddings: this weight would be waited for
        stock = DistributedDataParallel(copy.deepcopy(model))
        if attach_first:
            handle = ds_memo.attach(model, config())
        wrapped = DistributedDataParallel(model)
        if not attach_first:
            handle = ds_memo.attach(wrapped, config())
        for number in range(3):
            batch = Batch.random(2, LENGTHS[(rank + number) % 2], seed=2 * number + rank)
            got = step(wrapped, batch)
            assert_step(got, step(stock, batch))
            for name, gradient in got.grads.items():
                if gradient is not None and name != "the input":
                    total = gradient.clone()
                    torch.distributed.all_reduce(total)
                    assert torch.equal(total, 2 * gradient), f"{name}: ranks have different gradients"
        assert_was_tiled(handle.report())
