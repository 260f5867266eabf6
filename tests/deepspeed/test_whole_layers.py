"""Tiles under ZeRO-3 that the solver chose: layers become whole to ZeRO once they run in tiles, and on all ranks at once."""

from __future__ import annotations

import collections
import functools
from typing import Any

import deepspeed.comm as dist
import pytest
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import z3_leaf_module
from torch import nn

import ds_memo
from ds_memo.distributed.topology import gathers_by_module
from ds_memo.placement import Tiles
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.placement_kinds import place
from ds_memo.units import GIB
from tests.deepspeed import test_uneven_ranks as uneven
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.inside import inside
from tests.tiles.rig import LAYERS, small

pytestmark = pytest.mark.skipif(not ON_CPU, reason="CPU ranks")

SHORT, LONG, LONGEST = 1024, 2048, 8192
"""SHORT is too short to be measured in tiles."""
PLENTY = 1.0
"""GiB."""
train = functools.partial(uneven.train, rows=1)


def start(name: str = "llama", **memo: Any) -> Any:
    keeps_nothing = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    zero = {"stage": 3, "reduce_bucket_size": 1000, **keeps_nothing}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "memo": {"enabled": bool(memo), "plan": {"enabled": False}, **memo},
    }
    return ds_memo.initialize(model=small(name), config=config)[0]


def for_tiles_alone(length: int) -> float:
    """Return GiB of a device that holds this length in tiles, and not whole."""
    engine = start(device_memory_gib=PLENTY)
    train(engine, [length])
    profile = inside(engine.memo).tuner.profile
    engine.memo.detach()
    engine.destroy()
    tiles, whole = (
        device_bytes(profile.costs([(1, length)], 0, 0, tiles=tiles), place(LAYERS, 0), 0.0) for tiles in (Tiles(128, 2), None)
    )
    assert 1.4 * tiles < whole / 2, "a quarter of the length fits whole"
    budgets = [None] * dist.get_world_size()
    dist.all_gather_object(budgets, whole / 2 / GIB)
    return budgets[0]


def layers_of(engine: Any) -> list[nn.Module]:
    return list(engine.module.model.layers)


def counted_gathers(engine: Any) -> collections.Counter[str]:
    """Count, from here on, how often each parameter of a layer is gathered."""
    counts: collections.Counter[str] = collections.Counter()
    names = {id(parameter): name for name, parameter in engine.module.model.layers.named_parameters()}
    for parameter in engine.module.parameters():

        def gather(params: Any, *args: Any, stock: Any = parameter.all_gather_coalesced, **kwargs: Any) -> Any:
            counts.update(names[id(one)] for one in params if id(one) in names)
            return stock(params, *args, **kwargs)

        parameter.all_gather_coalesced = gather
    return counts


class TestSolved(DistributedTest):
    world_size = 2

    def test_layers_are_gathered_once_for_each_phase(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forgot: list[int] = []
        invalidate = PartitionedParameterCoordinator._invalidate_trace
        monkeypatch.setattr(
            PartitionedParameterCoordinator, "_invalidate_trace", lambda order: (forgot.append(1), invalidate(order))
        )
        want = train(start(), [LONG] * 6)
        engine = start(device_memory_gib=for_tiles_alone(LONG))
        assert all(map(gathers_by_module, layers_of(engine)))
        losses = train(engine, [LONG] * 4)
        report = engine.memo.report()
        assert report["tiles"]["layers"] == [0, 1] and report["tiles"]["not_tiled"] == {}
        assert all(map(z3_leaf_module, layers_of(engine)))
        counts, order = counted_gathers(engine), engine.optimizer.parameter_offload.get_param_coordinator()
        forgot.clear()
        losses += train(engine, [LONG], first=4)
        assert not forgot and order.is_complete_trace(), "ZeRO-3 knows in which order layers come"
        assert set(counts.values()) == {2}, counts
        engine.memo.detach()
        assert not any(map(z3_leaf_module, layers_of(engine))) and all(map(gathers_by_module, layers_of(engine)))
        assert [*losses, *train(engine, [LONG], first=5)] == pytest.approx(want, rel=1e-5)

    def test_layers_that_run_whole_stay_as_they_are(self) -> None:
        engine = start(device_memory_gib=PLENTY)
        train(engine, [LONG, SHORT])
        assert engine.memo.report()["tiles"] is None
        assert not any(map(z3_leaf_module, engine.module.modules())) and all(map(gathers_by_module, layers_of(engine)))


class TestUnevenRanks(DistributedTest):
    world_size = 2
    exec_timeout = 120

    def test_one_rank_has_tiles(self) -> None:
        """The other gathers its layers whole, too: they meet in as many gathers."""
        ours, theirs = [LONG, LONGEST, SHORT], [LONG, LONG, LONGEST]
        lengths = theirs if dist.get_rank() else ours
        want = train(start(), lengths)
        engine = start(device_memory_gib=for_tiles_alone(LONGEST))
        leaves = []
        for number, length in enumerate(lengths):
            assert train(engine, [length], number) == pytest.approx(want[number : number + 1], rel=1e-5)
            leaves.append(all(map(z3_leaf_module, layers_of(engine))))
        assert leaves == [False, True, True]


class TestGivenTiles(DistributedTest):
    world_size = 1

    def test_inputs_without_gradients(self) -> None:
        for name in ("llama", "mixtral"):
            self.check(name)

    def check(self, name: str) -> None:
        """As behind frozen embeddings. Leaf modules of DeepSpeed fail there, so layers without experts are none to it."""
        given = {"alpha": 0.5, "resident_layers": 0, "tile_tokens": 512}
        got = []
        for memo in ({}, given):
            engine = start(name, **memo)
            embeddings = engine.module.get_input_embeddings()
            embeddings.requires_grad_(name == "mixtral")
            got.append(train(engine, [LONG] * 3))
            assert not memo or engine.memo.report()["tiles"]["layers"] == [0, 1]
        assert got[1] == pytest.approx(got[0], rel=1e-5)


class TestNotTiled(DistributedTest):
    world_size = 1

    def test_leaf_modules_inside(self) -> None:
        """DeepSpeed marks blocks of experts."""
        engine = start("mixtral", device_memory_gib=PLENTY)
        train(engine, [LONG])
        (why,) = engine.memo.report()["profile"]["not_tiled"].values()
        assert "is a leaf module of ZeRO-3" in why
