"""What one rank alone finds out (a refusal, a missing compiler, a graph that is still alive) counts for all that exchange tensors
with it inside layers. A hang ends by the process group's time-out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.distributed import agree
from ds_memo.planned_alloc import runtime
from ds_memo.remat.layer_call import CannotTile
from ds_memo.swap.host_budget import HostBudget
from ds_memo.tiles import tiling
from ds_memo.tiles.check import choices, probe
from tests.deepspeed import test_tensor_parallel as tensor_parallel
from tests.deepspeed import test_uneven_ranks as uneven
from tests.deepspeed.test_sequence import IN_TILES, batch, gradients_of_parts, part, whole_gradients
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.inside import inside
from tests.models import FP32, Batch, Block, Toy, assert_same, assert_same_grads, build, step

pytestmark = pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")
REASON = "tiles give other gradients of its parameters than the whole"


def alone(*said: Any) -> list[Any]:
    """Stand in for `agree.meet`: each rank hears itself."""
    return [said[0]] * len(said[1])


def refusing(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Return a function that raises CannotTile on rank 1, in one of its calls."""
    calls = 0

    def refuse(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        out = function(*args)
        if dist.get_rank() == 1 and calls == call:
            raise CannotTile(REASON)
        return out

    return refuse


@contextlib.contextmanager
def in_parts(name: str, memo: dict[str, Any], seconds: float = 20, **shape: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Attach a model that is sequence-parallel; yield it, its handle, and the gradients of whole sequences."""
    _set_pg_timeout(timedelta(seconds=seconds), torch.distributed.group.WORLD)
    want, model = whole_gradients(build(name, **shape)), build(name, **shape)
    sequence.set_up(model, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ds_memo.MemoWarning)
        handle = ds_memo.attach(model, memo)
        yield model, handle, want
        handle.detach()


def assert_tiled(handle: Any, layers: list[int], reason: str = REASON) -> None:
    tiles = handle.report()["tiles"]
    assert tiles["layers"] == layers, tiles
    assert all(reason in why and ("rank 1" in why) != (dist.get_rank() == 1) for why in tiles["not_tiled"].values())
    assert len(tiles["not_tiled"]) == 4 - len(layers)


class TestTilesUnderUlysses(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_one_rank_refuses_a_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the check of its second layer; as its attention runs for the first time; by a hook of its own."""
        memo, shape = IN_TILES | {"head_groups": 2}, {"num_key_value_heads": 4}
        for name in ("llama", "mixtral"):
            monkeypatch.setattr(tiling, "probe", refusing(probe.probe, 2))
            with in_parts(name, memo, **shape) as (model, handle, want):
                for _ in range(2):
                    assert_same_grads(gradients_of_parts(model), want, FP32)
                assert_tiled(handle, [0, 2, 3])
        monkeypatch.undo()
        with monkeypatch.context() as patch, in_parts("llama", memo, **shape) as (model, handle, want):
            patch.setattr(probe.Returned, "only_tensor", refusing(probe.Returned.only_tensor, 3))
            for _ in range(2):
                assert_same_grads(gradients_of_parts(model), want, FP32)
            assert_tiled(handle, [0, 2, 3])
        with in_parts("llama", memo, **shape) as (model, handle, want):
            hook = model.model.layers[3].mlp.register_forward_hook(lambda *_: None) if dist.get_rank() else None
            for _ in range(2):  # it goes, and the layer stays whole
                assert_same_grads(gradients_of_parts(model), want, FP32)
                assert_tiled(handle, [0, 1, 2], "a hook of its mlp")
                if hook is not None:
                    hook.remove()

    def test_one_ranks_router_flips(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two experts have equal scores, and half of rank 1's products are off by their last bit."""
        linear = F.linear

        def inexact(*args: Any) -> torch.Tensor:
            out = linear(*args)
            noise = np.random.default_rng([0, *out.shape])  # a GEMM of another size rounds otherwise
            ups = torch.from_numpy(noise.random(out.shape) < 0.5 * dist.get_rank())
            return torch.where(ups, out * (1 + torch.finfo(out.dtype).eps), out)

        with in_parts("mixtral", IN_TILES) as (model, handle, _):
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.gate.weight[1].copy_(layer.mlp.gate.weight[0])
            with monkeypatch.context() as patch:
                patch.setattr(F, "linear", inexact)
                flipped, are_alike = [], choices.Choices.are_alike

                def counted(choices: Any, *args: Any) -> bool:
                    flipped.append(sum(int((own != given).sum()) for own, given in choices._scores))
                    return are_alike(choices, *args)

                patch.setattr(choices.Choices, "are_alike", counted)
                gradients_of_parts(model)
            assert_tiled(handle, [0, 1, 2, 3])
            assert bool(sum(flipped)) == bool(dist.get_rank()), flipped

    def test_a_mask_on_one_rank(self) -> None:
        """Transformers makes one where documents meet; Ulysses drops it. The first step has none."""
        tokens, positions, labels = batch()
        packed = torch.cat([torch.arange(17), torch.arange(7)]).expand(2, -1)
        whole = build("llama")
        whole(input_ids=tokens, position_ids=packed, labels=labels, use_cache=False).loss.backward()
        with in_parts("llama", IN_TILES) as (model, handle, _):
            for position_ids in (positions, packed, packed):
                model.zero_grad()
                loss = model(input_ids=part(tokens), position_ids=part(position_ids), use_cache=False).logits
                loss.square().mean().backward()
            assert_tiled(handle, [0, 1, 2, 3])

    @pytest.mark.world_size(4)
    def test_each_group_agrees_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each of two groups has sequences of one tile while the other has longer ones. Rank 1 refuses a layer."""
        monkeypatch.setattr(tiling, "probe", refusing(probe.probe, 2))
        rank, place = dist.get_rank(), dist.get_rank() % 2
        with in_parts("llama", IN_TILES | {"tile_tokens": 8}) as (model, handle, _):
            for turn in range(4):
                length = 12 if turn % 2 == rank // 2 else 4
                positions = torch.arange(place * length, (place + 1) * length).expand(2, -1)
                model(input_ids=positions, position_ids=positions, use_cache=False).logits.square().mean().backward()
            assert_tiled(handle, [0, 1, 2, 3] if rank // 2 else [0, 2, 3])

    def test_a_rank_that_refuses_alone_later_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agree, "GRACE_S", 1.0)
        with pytest.raises(RuntimeError) as caught, in_parts("llama", IN_TILES, seconds=10) as (model, _, want):
            assert_same_grads(gradients_of_parts(model), want, FP32)
            if dist.get_rank() == 1:
                model.model.layers[2].mlp.register_forward_hook(lambda *_: None)
            gradients_of_parts(model)
        if dist.get_rank() == 1:
            assert isinstance(caught.value, ds_memo.MemoError)
            assert "layer model.layers.2 runs in tiles on rank 0" in str(caught.value) and "a hook of its mlp" in str(
                caught.value
            )
        dist.destroy_process_group()  # as at a process's end: ranks that wait for this one notice at once

    def test_control(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the agreement, all-to-alls of different tensors meet."""
        monkeypatch.setattr(agree, "meet", alone)
        monkeypatch.setattr(tiling, "probe", refusing(probe.probe, 2))
        with pytest.raises((RuntimeError, AssertionError)), in_parts("llama", IN_TILES, seconds=4) as (model, _, want):
            assert_same_grads(gradients_of_parts(model), want, FP32)
        dist.destroy_process_group()


class TestTilesElsewhere(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_tensor_parallel_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They sum products inside the check, to its end, though one of them has refused."""
        want = tensor_parallel.train(tensor_parallel.start())
        monkeypatch.setattr(probe, "refuse_escapes", refusing(probe.refuse_escapes, 1))
        monkeypatch.setattr(probe, "refuse_others", refusing(probe.refuse_others, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ds_memo.MemoWarning)
            engine = tensor_parallel.start(alpha=0.5, resident_layers=0, tile_tokens=16, input_every=3)
            for ours, stocks in zip(tensor_parallel.train(engine), want, strict=True):
                torch.testing.assert_close(ours, stocks, rtol=1e-4, atol=1e-5)
        assert_tiled(engine.memo, [1, 3])

    def test_ranks_that_only_gather_parameters_need_not_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """ZeRO-3 gathers a layer once, in tiles or whole."""
        lengths = [uneven.LONG] * 3
        want = uneven.train(uneven.start(3), lengths)
        monkeypatch.setattr(tiling, "probe", refusing(probe.probe, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ds_memo.MemoWarning)
            engine = uneven.start(3, alpha=0.5, resident_layers=0, tile_tokens=48, input_every=3)
            assert uneven.train(engine, lengths) == pytest.approx(want, rel=1e-6)
        assert engine.memo.report()["tiles"]["layers"] == [0, *([] if dist.get_rank() else [1]), 2, 3]

    def test_ranks_that_trade_tokens_have_as_many_tiles(self) -> None:
        class Trading(Block):
            def __init__(self) -> None:
                super().__init__()
                self.up.weight.allreduce = False  # so DeepSpeed marks an expert's

            def feed(self, x: torch.Tensor) -> torch.Tensor:
                dist.all_reduce(torch.ones(1))
                return super().feed(x)

        _set_pg_timeout(timedelta(seconds=20), torch.distributed.group.WORLD)
        torch.manual_seed(0)
        model, stock = Toy(Trading), Toy(Trading)
        stock.load_state_dict(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ds_memo.MemoWarning)
            handle = ds_memo.attach(model, IN_TILES | {"resident_layers": 0, "tile_tokens": 8, "input_every": 3})
            for ours, theirs in ((23, 40), (23, 23), (16, 23), (40, 40)):  # layers that run whole store their inputs
                sizes = Batch.random(2, theirs if dist.get_rank() else ours)
                assert_same(step(model, sizes), step(stock, sizes))
                layers, why = handle.report()["tiles"]["layers"], handle.report()["tiles"]["not_tiled"]
                assert bool(why) == (ours != theirs) and (ours != theirs or layers == [0, 1, 2, 3])


ONE_FORWARD = 8e-4
"""GiB of a device that holds a forward without checkpointing, and no two."""


class TestSolutions(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def run(self, model: nn.Module, handle: Any, want: dict[str, Any], steps: int = 1) -> list[Any]:
        """Take steps; return what this rank's layers do in each, once the ranks are seen to do the same."""
        done = []
        for _ in range(steps):
            assert_same_grads(gradients_of_parts(model), want, FP32)
            policy = inside(handle).policy
            done.append([kind.name for kind in policy.pass_solution.solution.kinds])
            assert (
                agree.from_all_ranks((done[-1], policy.alpha_used, policy.in_flight.earlier)).count(
                    (done[-1], policy.alpha_used, policy.in_flight.earlier)
                )
                == 2
            )
        return done

    @pytest.mark.parametrize("lacks", ["Allocator", "install"])
    def test_one_rank_has_no_planned_addresses(self, lacks: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a compiler; or something else has the allocator, as the first pass shows. No optimizer step comes."""

        def refuse(*_: Any) -> None:
            raise RuntimeError("no C++ compiler")

        if dist.get_rank() == 1:
            monkeypatch.setattr(*((runtime, lacks) if lacks == "Allocator" else (runtime.Addresses, "_install")), refuse)
        memo = {"device_memory_gib": 1.0, "cache_dir": str(tmp_path)}
        with in_parts("llama", memo) as (model, handle, want):
            kinds = self.run(model, handle, want, steps=3)
            assert kinds[-1] == ["NO_RECOMPUTE"] * 4  # the first step shows what the head takes only where addresses are planned
            report = handle.report()
            assert report["plan"] is None
            (why,) = [warning for warning in report["warnings"] if "not planned" in warning]
            assert ("rank 1: no C++ compiler" in why) == (dist.get_rank() == 0)

    def test_other_room_and_other_graphs(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rank 1 has less of the host, and holds a graph that rank 0 has dropped."""
        memo = {"device_memory_gib": ONE_FORWARD, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}
        with in_parts("llama", memo) as (model, handle, want):
            assert self.run(model, handle, want) == [["NO_RECOMPUTE"] * 4]
            tokens, positions, _ = map(part, batch())
            graph = model(input_ids=tokens, position_ids=positions, use_cache=False)
            if dist.get_rank() == 0:
                del graph
            (kinds,) = self.run(model, handle, want)
            assert len(kinds) == 8 and "SWAPPED" in kinds
        room = property(lambda _: 90_000 if dist.get_rank() else 200_000)
        monkeypatch.setattr(HostBudget, "reservation", room)
        with in_parts("llama", memo | {"device_memory_gib": 1.0, "resident_layers": 0}) as (model, handle, want):
            self.run(model, handle, want)

    def test_control(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agree, "meet", alone)
        if dist.get_rank() == 1:
            monkeypatch.setattr(runtime.Addresses, "_built", lambda *_: None)
        memo = {"device_memory_gib": 1.0, "cache_dir": str(tmp_path)}
        with pytest.raises((RuntimeError, AssertionError)), in_parts("llama", memo, seconds=4) as (model, _, want):
            assert_same_grads(gradients_of_parts(model), want, FP32)
        dist.destroy_process_group()
