"""Layers that compute their inputs, under ZeRO: losses and gradients are those without memo, and ranks meet in the same gathers.

A backward gathers the layers below out of turn, while ZeRO-3 gathers ahead in the order that it has learned.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

import ds_memo
from ds_memo.deepspeed import gather_again
from ds_memo.tiles.layer import TiledCall
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.faults import put_in
from tests.models import VOCAB, build
from tests.tiles.rig import assert_within, layers_of, lora

pytestmark = pytest.mark.skipif(not ON_CPU, reason="CPU ranks")

LAYERS, LENGTH, STEPS = 6, 23, 5
"""ZeRO-3 knows the order of a pass after two, and gathers ahead from the third on."""
MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 0, "tile_tokens": 10, "input_every": 3, "plan": {"enabled": False}}
NOTHING_STAYS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 1000}
AT_ONCE = NOTHING_STAYS | {"stage3_prefetch_bucket_size": 0}
AHEAD = NOTHING_STAYS | {"stage3_prefetch_bucket_size": 40_000}
"""By about two layers."""
SMALL_STAY = AHEAD | {"stage3_param_persistence_threshold": 100}
"""Norms' weights stay gathered."""
OFFLOADED = AHEAD | {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
UNDER_WAY = "waited for"


def start(zero: dict[str, Any], memo: dict[str, Any] | None, micro_batches: int = 1, adapters: bool = False) -> Any:
    model = build("llama", num_hidden_layers=LAYERS)
    if adapters:
        model = lora(model, 0.0, ["q_proj", "o_proj", "down_proj"])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9,
        **({} if memo is None else {"memo": memo}),
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ds_memo.initialize(model=model, model_parameters=trained, config=config)[0]


def backward(engine: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    return loss.item()


def train(engine: Any, micro_batches: int = 1, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses, and the gradients of the last step."""
    losses, grads = [], {}
    for number in range(steps * micro_batches):
        losses.append(backward(engine, number))
        if number == steps * micro_batches - 1:
            named = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
            grads = {name: deepspeed.utils.safe_get_full_grad(parameter).clone() for name, parameter in named}
        engine.step()
    return losses, grads


def order_of(engine: Any) -> PartitionedParameterCoordinator:
    return engine.optimizer.parameter_offload.get_param_coordinator()


def statuses(engine: Any) -> set[str]:
    return {parameter.ds_status.name for layer in layers_of(engine.module) for parameter in layer.parameters()}


def watch(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count posts that run again, and parameters that are waited for, from here on."""
    seen: Counter[str] = Counter()

    def waited(right: Any, order: Any, module: Any) -> None:
        under_way = getattr(order, gather_again.UNDER_WAY)
        seen[UNDER_WAY] += sum(parameter in under_way for parameter in module.parameters())
        right(order, module)

    put_in(patch, gather_again, "wait_for_parameters", waited)
    put_in(patch, TiledCall, "run_posts_again", lambda right, *args, **named: (seen.update(posts=1), right(*args, **named))[1])
    return seen


def compare(patch: pytest.MonkeyPatch, zero: dict[str, Any], micro_batches: int = 1, **more: Any) -> Counter[str]:
    """Train with memo and without. Return what was seen with memo."""
    want = train(start(zero, None, micro_batches, **more), micro_batches)
    with patch.context() as inner:
        seen = watch(inner)
        engine = start(zero, MEMO, micro_batches, **more)
        got = train(engine, micro_batches)
    report = engine.memo.report()
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert_within(got[1], want[1], 1e-5)
    assert report["tiles"]["not_tiled"] == {} and not report["warnings"]
    assert seen["posts"] == 3 * STEPS * micro_batches, "layers 1, 3 and 4 compute their inputs"
    if zero["stage"] == 3:
        assert order_of(engine).is_complete_trace(), "ZeRO-3 has seen the order that it knows"
        assert not getattr(order_of(engine), gather_again.UNDER_WAY)
    engine.memo.detach()
    engine.destroy()
    return seen


class TestZero3(DistributedTest):
    world_size = 2
    exec_timeout = 120

    @pytest.mark.parametrize(
        "zero, more, waits",
        [
            (NOTHING_STAYS, {}, False),  # all that a backward reads is there from the forward on: it is gathered ahead of that
            (AT_ONCE | {"overlap_comm": True}, {}, False),
            (AHEAD | {"overlap_comm": True}, {}, True),
            (SMALL_STAY, {"micro_batches": 2}, True),
            (OFFLOADED, {}, True),
            (SMALL_STAY, {"adapters": True}, True),
        ],
        ids=["all stays", "at once", "ahead", "small stay", "offloaded", "adapters"],
    )
    def test_same_as_without_memo(self, zero, more, waits, monkeypatch):
        seen = compare(monkeypatch, {"stage": 3, **zero}, **more)
        assert bool(seen[UNDER_WAY]) == waits, seen
