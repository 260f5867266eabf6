"""Layers that compute their inputs, under ZeRO: losses and gradients are those without memo, and ranks meet in the same gathers.

A backward gathers the layers below out of turn, while ZeRO-3 gathers ahead in the order that it has learned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch.distributed.distributed_c10d import _set_pg_timeout

import ds_memo
from ds_memo.autotune import tuner
from ds_memo.deepspeed import gather_again
from ds_memo.placement import PlacementKind
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.solver import judged
from ds_memo.tiles import layer, tiling
from ds_memo.tiles.groups import Member
from ds_memo.tiles.layer import TiledCall
from tests.deepspeed.test_whole_layers import counted_gathers
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.faults import put_in
from tests.inside import inside
from tests.models import VOCAB, build
from tests.tiles.rig import assert_within, layers_of, lora

pytestmark = pytest.mark.skipif(not ON_CPU, reason="CPU ranks")

LAYERS, LENGTH, STEPS = 6, 23, 5
"""ZeRO-3 knows the order of a pass after two, and gathers ahead from the third on."""
MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 0, "tile_tokens": 10, "input_every": 3, "plan": {"enabled": False}}
NOTHING_STAYS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 1000}
AT_ONCE = NOTHING_STAYS | {"stage3_prefetch_bucket_size": 0}
AHEAD = NOTHING_STAYS | {"stage3_prefetch_bucket_size": 15_000}
"""By a part of a layer."""
SMALL_STAY = AHEAD | {"stage3_param_persistence_threshold": 100}
"""Norms' weights stay gathered."""
OFFLOADED = AHEAD | {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
UNDER_WAY = "waited for"


def start(
    zero: dict[str, Any], memo: dict[str, Any] | None, micro_batches: int = 1, adapters: bool = False, frozen: int = 0
) -> Any:
    model = build("llama", num_hidden_layers=LAYERS)
    if adapters:
        model = lora(model, 0.0, ["q_proj", "o_proj", "down_proj"])
    for part in (model.get_input_embeddings(), *layers_of(model)[:frozen]) if frozen else ():
        part.requires_grad_(False)
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


def backward(engine: Any, number: int, length: int = LENGTH) -> float:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    tokens = torch.randint(VOCAB, (2, length), generator=generator)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    return loss.item()


def train(
    engine: Any, micro_batches: int = 1, steps: int = STEPS, length: int = LENGTH
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses, and the gradients of the last step."""
    losses, grads = [], {}
    for number in range(steps * micro_batches):
        losses.append(backward(engine, number, length))
        if number == steps * micro_batches - 1:
            named = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
            grads = {name: deepspeed.utils.safe_get_full_grad(parameter).clone() for name, parameter in named}
        engine.step()
    return losses, grads


def order_of(engine: Any) -> PartitionedParameterCoordinator:
    return engine.optimizer.parameter_offload.get_param_coordinator()


def available(engine: Any) -> int:
    """Return ZeRO-3's count of the numbers that it has gathered."""
    return order_of(engine)._PartitionedParameterCoordinator__n_available_params


def watch(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count posts that run again, and parameters that are waited for, from here on."""
    seen: Counter[str] = Counter()

    def under_way(right: Any, module: Any) -> Any:
        seen[UNDER_WAY] += sum(parameter.ds_status.name == "INFLIGHT" for parameter in module.parameters())
        return right(module)

    put_in(patch, gather_again, "partitioned", under_way)
    put_in(patch, TiledCall, "run_posts_again", lambda right, *args, **named: (seen.update(posts=1), right(*args, **named))[1])
    return seen


def compare(
    patch: pytest.MonkeyPatch,
    zero: dict[str, Any],
    micro_batches: int = 1,
    adapters: bool = False,
    frozen: int = 0,
    change: Callable[[Any], None] = lambda engine: None,
) -> tuple[Counter[str], dict[str, Any]]:
    """Train with memo and without. Return what was seen with memo, and its report.

    Args:
        change: of an engine with memo, before it trains.
    """
    stock = start(zero, None, micro_batches, adapters, frozen)
    want, left = train(stock, micro_batches), stock.zero_optimization_stage() == 3 and available(stock)
    with patch.context() as inner:
        seen = watch(inner)
        engine = start(zero, MEMO, micro_batches, adapters, frozen)
        change(engine)
        got = train(engine, micro_batches)
    report = engine.memo.report()
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert_within(got[1], want[1], 1e-5)
    if zero["stage"] == 3:
        assert order_of(engine).is_complete_trace(), "ZeRO-3 has seen the order that it knows"
        assert not getattr(order_of(engine), gather_again.UNDER_WAY) and available(engine) == left
    engine.memo.detach()
    engine.destroy()
    stock.destroy()
    return seen, report


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
            (AHEAD, {"frozen": 2}, True),
            (AHEAD | {"zero_hpz_partition_size": 2}, {}, True),
        ],
        ids=["all stays", "at once", "ahead", "small stay", "offloaded", "adapters", "frozen", "second copies"],
    )
    def test_same_as_without_memo(self, zero, more, waits, monkeypatch):
        seen, report = compare(monkeypatch, {"stage": 3, **zero}, **more)
        assert report["tiles"]["not_tiled"] == {} and not report["warnings"]
        computed = 3 - bool(more.get("frozen"))
        assert seen["posts"] == computed * STEPS * more.get("micro_batches", 1), "layers 1, 3 and 4 compute their inputs"
        assert bool(seen[UNDER_WAY]) == waits, seen

    @pytest.mark.world_size(1)
    def test_one_rank(self, monkeypatch):
        assert compare(monkeypatch, {"stage": 3, **AHEAD})[0][UNDER_WAY]

    @pytest.mark.parametrize("zero, again", [(AT_ONCE, {0, 2, 3}), (AHEAD, set())], ids=["at once", "ahead"])
    def test_gathers(self, zero, again, monkeypatch):
        """Each layer is gathered for its forward and its backward, and once more if it is below one that computes its input. What
        is gathered ahead serves for both."""
        engine = start({"stage": 3, **zero}, MEMO)
        train(engine, steps=3)
        counts = counted_gathers(engine)
        backward(engine, 3)
        assert {int(name.partition(".")[0]) for name, count in counts.items() if count > 2} == again, counts
        assert max(counts.values()) <= 3

    def test_faults_are_seen(self, monkeypatch):
        zero = {"stage": 3, **AHEAD}
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            put_in(patch, gather_again, "wait_for_parameters", lambda right, *args: None)
            train(start(zero, MEMO))
        with monkeypatch.context() as patch, pytest.raises(AssertionError):  # what ZeRO-3 has gathered is released, too
            put_in(patch, gather_again, "partitioned", lambda right, module: list(module.parameters()))
            self.test_gathers(AHEAD, set(), patch)

    def test_another_deepspeed(self, monkeypatch):
        monkeypatch.setattr(gather_again, "UNDER_WAY", "_PartitionedParameterCoordinator__renamed")
        engine = start({"stage": 3, **AHEAD}, MEMO)
        with pytest.warns(ds_memo.MemoWarning, match="cannot gather them for the layer above") as warned:
            train(engine, steps=2)
        assert sum("for the layer above" in str(one.message) for one in warned) == 1


DEPARTURES = {
    "changes an output in place": lambda layers, memo: layers[2].register_forward_hook(lambda *given: given[-1].mul_(1.0)),
    "copies an output": lambda layers, memo: layers[3].register_forward_hook(lambda *given: given[-1].clone()),
    "runs a layer whole that computes its input": lambda layers, memo: layers[3].mlp.register_forward_hook(lambda *given: None),
    "runs a layer whole below": lambda layers, memo: layers[2].mlp.register_forward_hook(lambda *given: None),
    "runs a layer whole above": lambda layers, memo: layers[4].mlp.register_forward_hook(lambda *given: None),
    "has no room": lambda layers, memo: setattr(inside(memo).policy, "has_room", lambda nbytes, planned=True: False),
}
"""By what one rank does alone."""


class TestBelowZero3(DistributedTest):
    world_size = 2
    exec_timeout = 120

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_same_as_without_memo(self, stage, monkeypatch):
        """Gradients of two micro-batches are summed before ranks reduce them."""
        seen, report = compare(monkeypatch, {"stage": stage, "reduce_bucket_size": 1000}, micro_batches=2)
        assert report["tiles"]["not_tiled"] == {} and not report["warnings"]
        assert seen["posts"] == 6 * STEPS


class TestSolved(DistributedTest):
    world_size = 2
    exec_timeout = 120

    def test_ranks_that_solve_for_other_layers(self, monkeypatch):
        """They store all inputs."""
        solve = tuner.solve_pass
        requests = []

        def other(request, *args):
            requests.append(request)
            kinds = [*place(LAYERS, 0)]
            if request.may_compute_inputs and not dist.get_rank():
                kinds[4] = PlacementKind.SWAPPED_WITHOUT_INPUT
            run = solve(request, *args)[1]
            return judged(run, 0.5, tuple(kinds), "as the test wants it"), run

        zero = {"stage": 3, **AHEAD}
        memo = MEMO | {"tile_tokens": 64}
        del memo["resident_layers"]
        engine = start(zero, None)
        want = train(engine, steps=2, length=128)[0]
        engine.destroy()
        monkeypatch.setattr(tuner, "solve_pass", other)
        engine = start(zero, memo)
        assert train(engine, steps=2, length=128)[0] == pytest.approx(want, rel=1e-6)
        assert {request.may_compute_inputs for request in requests} == {False, True}
        assert engine.memo.report()["layers_without_input"] == [] and engine.memo.report()["tiles"]["layers"]


class TestOneRankDeparts(DistributedTest):
    world_size = 2
    exec_timeout = 120

    @pytest.mark.parametrize("departure", DEPARTURES)
    def test_under_zero3(self, departure, monkeypatch):
        """The others compute their inputs."""

        def change(engine: Any) -> None:
            if dist.get_rank():
                DEPARTURES[departure](layers_of(engine.module), engine.memo)

        seen, report = compare(monkeypatch, {"stage": 3, **AHEAD}, change=change)
        most = 3 * STEPS
        assert seen["posts"] < most if dist.get_rank() else seen["posts"] == most
        assert bool(report["warnings"]) == bool(dist.get_rank()), report["warnings"]

    def test_control(self, monkeypatch):
        """Without the other rank in its gathers, a rank waits, or gathers something else."""
        _set_pg_timeout(timedelta(seconds=5), torch.distributed.group.WORLD)
        engine = start({"stage": 3, **AT_ONCE}, MEMO)
        if dist.get_rank():
            DEPARTURES["copies an output"](layers_of(engine.module), engine.memo)

        def alone(right: Any, member: Member, gathering: Any) -> None:
            if (call := member.call()) is not None and call.below is not None:
                right(member, gathering)

        for module in (layer, tiling):
            put_in(monkeypatch, module, "compute_inputs", alone)
        with pytest.raises(RuntimeError):
            train(engine)
        dist.destroy_process_group()
