"""DeepSpeed's AutoTP: products are summed over ranks in place, inside the layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.distributed.topology import meet_in_layers, talk_in_layers
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.models import VOCAB, build

pytestmark = pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")


def start(**memo: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "memo": {"enabled": bool(memo), **memo},
    }
    return ds_memo.initialize(model=copy.deepcopy(build("llama")), config=config)[0]


def train(engine: Any) -> list[torch.Tensor]:
    """Return the losses and all gradients of four steps."""
    seen = []
    for number in range(4):
        tokens = torch.randint(VOCAB, (2, 60), generator=torch.Generator().manual_seed(number))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        seen += [loss.detach(), *(parameter.grad.clone() for parameter in engine.module.parameters())]
        engine.step()
    return seen


class TestAutoTP(DistributedTest):
    world_size = 2

    def test_gradients_are_stocks_and_no_product_runs_again(self) -> None:
        want = train(start())
        for tiles in ({}, {"tile_tokens": 16}):
            engine = start(alpha=0.5, resident_layers=1, **tiles)
            assert talk_in_layers(engine.module) and not meet_in_layers(engine.module)
            for ours, stocks in zip(train(engine), want, strict=True):
                torch.testing.assert_close(ours, stocks, rtol=1e-4, atol=1e-5)  # float32; products by rows sum in another order
            report = ds_memo.report(engine)
            assert report["warnings"] == []
            assert report["attention_recomputed"] == 0
            assert not tiles or report["tiles"]["layers"] == [0, 1, 2, 3]
            assert report["gemm_flops_recomputed_fraction"] <= 0.5 * 3 / 4 + 0.01
            engine.destroy()
