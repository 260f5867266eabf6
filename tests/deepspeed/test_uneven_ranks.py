"""Ranks whose batches have different lengths: each solves for its own, and all of them meet where they must."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.linear import LoRAConfig
from deepspeed.linear.optimized_linear import OptimizedLinear
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout

import ds_memo
from ds_memo.autotune import model_profile
from ds_memo.autotune.tuner import Tuner
from ds_memo.deepspeed import initialize as integration
from ds_memo.deepspeed import sequence
from ds_memo.distributed import agree, lost_ranks
from ds_memo.profile import run
from ds_memo.runtime import ranks_alike
from ds_memo.runtime.sequence import decoders
from ds_memo.solve import headroom
from ds_memo.solve.placement_kinds import place
from ds_memo.solve.refusals import NothingFits
from ds_memo.solve.solver import Solution, judged
from ds_memo.swap import pinned_segments
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.inside import inside
from tests.models import HIDDEN, LAYERS, VOCAB, Batch, Block, Toy, assert_same, build, step
from tests.placements import sets

pytestmark = pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")

SHORT, LONG = 24, 240
ONLY_SHORT, NOTHING_LONG = 5e-3, 2e-3
"""GiB of a device that holds a pass without checkpointing of the short length alone, and no long pass at all."""


def start(stage: int, make: Callable[..., tuple] = ds_memo.initialize, **memo: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "memo": {"enabled": bool(memo), **memo},
    }
    return make(model=build("llama"), config=config)[0]


def train(engine: Any, lengths: list[int], first: int = 0, rows: int = 2) -> list[float]:
    losses = []
    for number, length in enumerate(lengths, first):
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        tokens = torch.randint(VOCAB, (rows, length), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def passes_without_recompute(engine: Any, what: Callable[[Solution], Any] = lambda solution: solution.no_recompute) -> list[Any]:
    """Has, from here on, whether each pass does without checkpointing, or what else its solution tells."""
    passes = []
    solve = inside(engine.memo).tuner.solve

    def spy(*args: Any) -> Any:
        solved = solve(*args)
        passes.append(what(solved.solution))
        return solved

    inside(engine.memo).tuner.solve = spy
    return passes


class Exchanging(Block):
    """Ranks meet in it, as where each has some of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.allreduce = False  # so DeepSpeed marks an expert's

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        total = self.up(x).mean().detach()
        dist.all_reduce(total)
        return super().feed(x) * (1 + 10 * total)


class Gathering(Block):
    """Each rank holds a piece of a frozen weight, which DeepSpeed's linear layer gathers whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = OptimizedLinear(HIDDEN, 2 * HIDDEN, lora_config=LoRAConfig(base_weight_sharding=2), dtype=torch.float32)
        nn.init.normal_(self.up.lora_weight_2.weight, std=0.02)


class Towered(Toy):
    """A tower before blocks that exchange, or behind them; a batch with an image goes through it."""

    def __init__(self, behind: bool) -> None:
        super().__init__(Exchanging, 6)
        self.tower = nn.ModuleList(Block() for _ in range(3))
        self.layers = [*self.blocks, *self.tower] if behind else [*self.tower, *self.blocks]

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor, image: torch.Tensor | None = None) -> Any:
        x = inputs_embeds
        for block in self.layers:
            if image is not None or isinstance(block, Exchanging):
                x = block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class TestUnevenRanks(DistributedTest):
    world_size = 2
    exec_timeout = 60

    @pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
    def test_only_one_rank_could_do_without_checkpointing(self, stage: int) -> None:
        """A replay under ZeRO 3 gathers parameters: each rank in it, or none."""
        ours, theirs = [SHORT, LONG, SHORT, SHORT, SHORT, LONG], [LONG, SHORT, SHORT, SHORT, LONG, LONG]
        lengths = theirs if dist.get_rank() else ours
        want = train(start(stage), lengths)
        engine = start(stage, device_memory_gib=ONLY_SHORT, kernels={"cross_entropy": "whole"})
        passes = passes_without_recompute(engine)
        assert train(engine, lengths) == pytest.approx(want, rel=1e-6)
        assert not passes[0]  # it shows what the head takes
        if stage == 3:
            assert passes[1:] == [mine == other == SHORT for mine, other in zip(ours, theirs, strict=True)][1:]
        else:
            assert passes[1:] == [length == SHORT for length in lengths][1:]

    def test_layers_without_recompute_are_those_of_all_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where ranks would have other numbers of them, one would replay, and gather, what the other does not."""

        def decided(run: Any, alpha: Any, residents: Any, may_skip_recompute: bool, **_: Any) -> Solution:
            short = run.layers[0].outputs[0].nbytes < 2 * 2 * SHORT * HIDDEN * 4
            return judged(run, 1.0, place(LAYERS, 0, (2 if short else 1) * may_skip_recompute), "as the test wants it")

        lengths = [(SHORT, SHORT), (SHORT, SHORT), (SHORT, LONG), (LONG, LONG), (LONG, SHORT), (SHORT, SHORT)]
        mine = [pair[dist.get_rank()] for pair in lengths]
        want = train(start(3), mine)
        monkeypatch.setattr(headroom, "solve", decided)
        engine = start(3, enabled=True)
        passes = passes_without_recompute(engine, lambda solution: len(sets(solution).no_recompute))
        assert train(engine, mine) == pytest.approx(want, rel=1e-6)
        assert passes == [0, 2, 0, 1, 0, 2]  # the first shows what the head takes

    def test_a_length_that_is_new_to_one_rank(self) -> None:
        lengths = [LONG, LONG, LONG, LONG] if dist.get_rank() else [LONG, SHORT, SHORT + 1, LONG]
        want = train(start(3), lengths)
        engine = start(3, device_memory_gib=ONLY_SHORT)
        assert train(engine, lengths) == pytest.approx(want, rel=1e-6)

    def test_unequal_numbers_of_tiles(self) -> None:
        """One rank has ten, where the other has two, or one, which runs whole."""
        lengths = [LONG, LONG, SHORT, LONG] if dist.get_rank() else [2 * SHORT, LONG, LONG, SHORT]
        want = train(start(3), lengths)
        engine = start(3, alpha=0.5, resident_layers=1, tile_tokens=2 * SHORT)
        assert train(engine, lengths) == pytest.approx(want, rel=1e-6)
        assert engine.memo.report()["tiles"]["layers"] == [0, 1, 2, 3] and not engine.memo.report()["warnings"]

    def test_inputs_that_do_not_show_their_length(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forward is probed, which gathers the embedding, on both ranks if it is on one."""
        monkeypatch.setattr("ds_memo.autotune.probe_forward.hidden_shape", lambda shapes, hidden, others: None)
        self.test_a_length_that_is_new_to_one_rank()

    def test_nothing_fits_one_rank(self) -> None:
        """The other is told, and does not wait for it."""
        engine = start(3, device_memory_gib=NOTHING_LONG)
        assert train(engine, [SHORT])
        rank = dist.get_rank()
        with pytest.raises(NothingFits, match="^rank 1: device memory" if rank == 0 else "^device memory"):
            train(engine, [LONG if rank else SHORT])
        assert train(engine, [SHORT, SHORT])

    def test_experts_and_weights_on_other_ranks(self) -> None:
        """A replay trades tokens, or gathers weights: each rank in it, or none."""
        for block in (Exchanging, Gathering):
            torch.manual_seed(0)
            model = Toy(block)
            stock = copy.deepcopy(model)
            handle = ds_memo.attach(model, {"device_memory_gib": ONLY_SHORT, "plan": {"enabled": False}})
            for ours, theirs in ((SHORT, LONG), (LONG, SHORT), (SHORT, SHORT), (SHORT, LONG)):
                batch = Batch.random(2, theirs if dist.get_rank() else ours)
                assert_same(step(model, batch), step(stock, batch))
                assert handle.report()["checkpointing"] is not (ours == theirs == SHORT), block
            handle.detach()

    def test_experts_and_a_tower_that_one_rank_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It solves for other layers than the other rank, which may have as many without recompute, and not the same. A tower
        that not all ranks call in the first pass is recomputed. All ranks probe up to the same layer."""

        def decided(run: Any, alpha: Any, residents: Any, may_skip_recompute: bool, **_: Any) -> Solution:
            return judged(run, 1.0, place(len(run.layers), 0, 3 * may_skip_recompute), "as the test wants it")

        monkeypatch.setattr(headroom, "solve", decided)
        for behind, first in ((False, (1, 1)), (False, (1, 0)), (True, (1, 0)), (True, (0, 0))):
            torch.manual_seed(0)
            model = Towered(behind)
            stock = copy.deepcopy(model)
            handle = ds_memo.attach(model, {"plan": {"enabled": False}}, layers=model.layers)
            for images in (first, (0, 0), (1, 1), (1, 0), (0, 1), (1, 0)):
                more = {"image": torch.ones(1, 64, 2)} if images[dist.get_rank()] else {}
                batch = Batch.random(2, 64, seed=1 + dist.get_rank())
                assert_same(step(model, batch, **more), step(stock, batch, **more))
            handle.detach()

    def test_stalls_are_looked_at_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After as many optimizer steps on every rank, however many kinds of passes each has seen."""
        comparable: list[bool] = []
        monkeypatch.setattr(Tuner, "_learn", lambda tuner, window, one_kind: comparable.append(one_kind))
        engine = start(2, device_memory_gib=ONLY_SHORT)
        train(engine, [LONG + (number // 3 if dist.get_rank() else 0) for number in range(16)])
        assert comparable == [dist.get_rank() == 0] * 3


@contextmanager
def frozen_store() -> Iterator[torch.distributed.TCPStore]:
    """A client of a store in a process that does not run."""
    port, said = os.pipe()
    if (process := os.fork()) == 0:
        server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(said, b"%d" % server.port)
        time.sleep(60)
        os._exit(0)
    try:
        client = torch.distributed.TCPStore("127.0.0.1", int(os.read(port, 9)), is_master=False)
        os.kill(process, signal.SIGSTOP)
        yield client
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


class TestMissingRanks(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_a_rank_that_does_not_run_under_memo_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would be waited for, without a reason."""
        monkeypatch.setattr(ranks_alike, "ARRIVAL_S", 0.5)
        _set_pg_timeout(timedelta(seconds=2), torch.distributed.group.WORLD)
        if dist.get_rank() == 0:
            late = r"waits in ds_memo.initialize, and ranks \[1\] have not come there for 0.5 s"
            ended = r"^rank 1 has not come for 2 s: look for an error"
            with pytest.warns(ds_memo.MemoWarning, match=late), pytest.raises(ds_memo.MemoError, match=ended):
                start(2, alpha=0.5)
            agree.store.tell("ended", "")
        else:
            assert agree.store.heard(["ended"], 30) == [""]
        dist.destroy_process_group()

    def test_a_store_in_a_frozen_rank_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agree.store, "ANSWER_S", 0.1)
        _set_pg_timeout(timedelta(seconds=1), torch.distributed.group.WORLD)
        with frozen_store() as client, monkeypatch.context() as patch:
            patch.setattr(distributed_c10d, "_get_default_store", lambda: client)
            with pytest.raises(lost_ranks.LostRank, match=r"the process group's store has not answered for 1 s"):
                start(2, alpha=0.5)

    def test_a_rank_without_memo_ends_all(self) -> None:
        """At once, where both would wait for each other until their time-out."""
        with pytest.raises(
            ds_memo.MemoError,
            match=r"^the configuration differs between ranks, .* memo.enabled: True on rank 0, False on rank 1$",
        ):
            start(2, **({} if dist.get_rank() else {"alpha": 0.5}))

    def test_what_differs_ends_all(self) -> None:
        """Before DeepSpeed exchanges anything, with one line on every rank."""
        one, other = {"alpha": 0.5, "resident_layers": 0}, {"ablation": "full_recompute", "resident_layers": 0}
        for first, second, told in (
            ({"memo": one}, {"memo": {"enabled": True}}, ["memo.alpha: 0.5", "None", "memo.resident_layers: 0", "None"]),
            ({"memo": one}, {"memo": other}, ["memo.ablation: None", "'full_recompute'", "memo.alpha: 0.5", "None"]),
            ({"memo": one}, {"memo": one | {"ulysses_size": 2}}, ["memo.ulysses_size: None", "2"]),
            ({"memo": one | {"input_every": 2}}, {"memo": one}, ["memo.input_every: 2", "None"]),
            ({"sequence_parallel_size": 2}, {}, ["sequence_parallel_size: 2", "1"]),
            ({"zero": 1}, {"zero": 3}, ["zero_optimization.stage: 1", "3"]),
            ({"memo": {"plan": {"enabled": False}}}, {"memo": {"cache_dir": "x"}}, ["memo.plan.enabled: False", "True"]),
            ({"layers": 2}, {"layers": 3}, ["its layers: 2", "3", "its parameters: 21", "30"]),
            ({"dtype": torch.bfloat16}, {}, ["its types: ['torch.bfloat16']", "['torch.float32']"]),
            ({}, {"memo": {"alpha": 2}}, None),
            ({}, {"sequence_parallel_size": 0}, None),
        ):
            mine = {"memo": one, "zero": 0, "layers": 2, "dtype": torch.float32} | (second if dist.get_rank() else first)
            model = build("llama", mine.pop("dtype"), num_hidden_layers=mine.pop("layers"))
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": mine.pop("zero")},
                **mine,
                "memo": {"enabled": True, **mine["memo"]},
            }
            with pytest.raises(ds_memo.MemoError) as caught:
                ds_memo.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            if told is None:  # refused on rank 1 alone
                assert re.match(r"(rank 1: MemoConfigError: )?(memo|sequence)\S+: got \d; allowed", str(caught.value))
                assert str(caught.value).startswith("rank 1") == (dist.get_rank() == 0)
                continue
            pairs = "; ".join(f"{mine} on rank 0, {theirs} on rank 1" for mine, theirs in zip(told[::2], told[1::2], strict=True))
            assert (
                str(caught.value)
                == f"the configuration differs between ranks, and all must work alike. Give all ranks the same: {pairs}"
            )

    @pytest.mark.parametrize("of_node, ulysses", [((2, 2), 2), ((2, 1), 1)])
    def test_ranks_trade_heads_by_all_ranks_nodes(
        self, of_node: tuple[int, int], ulysses: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each rank's environment tells of its own node. Ranks that choose by it alone make groups that do not meet."""
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_node[dist.get_rank()]))
        model = build("llama")
        sequence.set_up(model, 2)
        assert decoders[model].ranks.ulysses == ulysses

    def test_a_rank_that_ends_is_named_with_its_error(self) -> None:
        engine = start(1, alpha=0.5, resident_layers=0)
        train(engine, [SHORT])
        if dist.get_rank() == 1:
            engine.module.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError if dist.get_rank() else lost_ranks.LostRank) as caught:
            train(engine, [SHORT])
        if dist.get_rank() == 0:
            assert re.fullmatch(
                r"rank 0 lost the other ranks in (the reduction of gradients|a backward) \(.*\): "
                "rank 1 ended with ZeroDivisionError: division by zero",
                str(caught.value),
            )
        dist.destroy_process_group()

    def test_ranks_that_do_other_things_are_told_so(self) -> None:
        """No rank has failed: each waits for the other somewhere else."""
        _set_pg_timeout(timedelta(seconds=2), torch.distributed.group.WORLD)
        engine = start(1, alpha=0.5, resident_layers=0)
        with pytest.raises(lost_ranks.LostRank, match=r"no rank says what it failed with.*as many forwards, backwards and steps"):
            train(engine, [SHORT]) if dist.get_rank() else agree.from_all_ranks(0)
        dist.destroy_process_group()

    def test_no_group_waits_longer_than_the_default_one(self) -> None:
        """Torch gives those of gloo half an hour, DeepSpeed's among them."""
        wait = timedelta(seconds=30)
        _set_pg_timeout(wait, torch.distributed.group.WORLD)
        before = set(distributed_c10d._world.pg_map)
        start(3, alpha=0.5)
        made = set(distributed_c10d._world.pg_map) - before
        assert made and {group._get_backend(torch.device("cpu")).options._timeout for group in made} == {wait}
        assert distributed_c10d._get_default_timeout("gloo") > wait  # others are made as before

    def test_attaching_takes_one_collective(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranks that come are not missed."""
        made, attach, c10d = [], integration.attach_engine, torch.distributed.ProcessGroup
        kinds = ("allreduce", "allgather", "_allgather_base", "broadcast", "reduce", "gather", "scatter", "barrier")

        def attach_and_count(*args: Any) -> Any:
            with monkeypatch.context() as patch:
                for kind in kinds:
                    real = getattr(c10d, kind)
                    patch.setattr(c10d, kind, lambda *a, kind=kind, real=real, **k: made.append(kind) or real(*a, **k))
                return attach(*args)

        monkeypatch.setattr(integration, "attach_engine", attach_and_count)
        engine = start(2, alpha=0.5)
        assert made == ["allreduce"]
        assert agree.announce("here") == ["here"] * 2 and engine.memo.report()["warnings"] == []


class TestRefusedMemory(DistributedTest):
    world_size = 2

    def test_what_one_ranks_system_refuses_is_solved_for_on_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That rank recomputes layer calls meanwhile. The refusal comes after the first steps, with longer batches."""
        memo, lengths = {"resident_layers": 0, "device_memory_gib": 0.05, "plan": {"enabled": False}}, [SHORT] * 2 + [LONG] * 8
        want = train(start(2), lengths)
        engine = start(2, **memo)
        train(engine, lengths[:3])
        most, mapped = engine.memo.report()["host"]["peak_used"] // 2, pinned_segments.map_pages
        engine.memo.detach()

        def refuse(nbytes: int) -> Any:
            if pool.size + nbytes > most:
                raise ds_memo.MemoError("no more")
            return mapped(nbytes)

        engine = start(2, **memo)
        pool = inside(engine.memo).slab.pool
        if dist.get_rank():
            monkeypatch.setattr(pinned_segments, "map_pages", refuse)
        assert train(engine, lengths) == pytest.approx(want, rel=1e-5)
        report = engine.memo.report()
        budgets = agree.from_all_ranks(report["profile"]["host_budget"])
        assert budgets[0] == budgets[1] <= most and report["bytes_to_host"] > 0
        assert any(change.endswith("the system refused more: no more") for change in report["profile"]["changes"])
        told = [warning for warning in report["warnings"] if warning.startswith("layer calls are recomputed")]
        assert len(told) == dist.get_rank()


class TestShortFirst(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_layers_are_measured_again_once_batches_are_long(self, stage: int, tmp_path: Path) -> None:
        """By each rank itself, or where they meet in layers once all of them have long batches."""
        run.SHORTEST = model_profile.SHORTEST = 128
        lengths = [[16, 240, 16, 240, 240, 16], [16, 16, 240, 240, 16, 240]][dist.get_rank()]
        want = train(start(stage), lengths)
        engine = start(stage, plan={"enabled": False}, cache_dir=str(tmp_path), device_memory_gib=0.05)
        measured, step = [], engine.step

        def step_and_look() -> None:
            step()
            measured.append(sum("again, with 240 tokens" in change for change in engine.memo.report()["profile"]["changes"]))

        engine.step = step_and_look
        assert train(engine, lengths) == pytest.approx(want, rel=1e-5)
        alone = [0, 1, 1, 1, 1, 1] if dist.get_rank() == 0 else [0, 0, 1, 1, 1, 1]
        assert measured == ([0, 0, 0, 1, 1, 1] if stage == 3 else alone), measured
        engine.memo.detach()
