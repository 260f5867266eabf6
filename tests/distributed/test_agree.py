"""Ranks agree: the most careful answer wins, differences name ranks, and a rank that fails leaves none waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import types
import warnings
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import ds_memo
from ds_memo.distributed import agree
from ds_memo.distributed.agree import Failed, on_all_ranks
from ds_memo.distributed.lost_ranks import naming_lost_ranks
from ds_memo.distributed.topology import meet_in_layers, talk_in_layers
from ds_memo.profile import run
from ds_memo.profile.json_file import from_json, to_json
from ds_memo.profile.merge_ranks import most_careful
from ds_memo.remat import gathered_params
from tests.distributed_harness.common import DistributedTest
from tests.models import Block, Toy
from tests.profile.samples import make_profile

HERE = {"plan": {"enabled": False}, "enabled": True}


# ---- without other ranks


def test_the_most_careful_answer_wins() -> None:
    mine, theirs = make_profile(link=20e9, working=100), make_profile(link=30e9, working=300)
    theirs = dataclasses.replace(theirs, h2d_bytes_per_s=10e9)
    for both in ([mine, theirs], [theirs, mine]):
        agreed = most_careful(both)
        assert (agreed.d2h_bytes_per_s, agreed.h2d_bytes_per_s) == (20e9, 10e9)
        assert [s.working for s in agreed.kinds[0].samples] == [s.working for s in theirs.kinds[0].samples]
        assert from_json(to_json(agreed)) == agreed


@pytest.mark.parametrize("lengths", [(2048, 4096), (4096,)])
def test_a_rank_that_has_measured_at_other_lengths_counts_by_its_lines(lengths: tuple[int, ...]) -> None:
    """A rank whose lines were not trusted has the longer two samples, or only the longest."""
    trusted, not_trusted = make_profile(lengths=(1024, 2048), working=100), make_profile(lengths=lengths, working=300)
    for sample in most_careful([trusted, not_trusted]).kinds[0].samples:
        theirs = not_trusted.kinds[0].costs(sample.batch, sample.length)
        assert sample.working == theirs.working
        assert sample.working.backward > trusted.kinds[0].samples[-1].working.backward / 2


def test_alone() -> None:
    assert on_all_ranks(lambda: 7) == 7
    with pytest.raises(Failed, match="rank 0: ZeroDivisionError") as caught:
        on_all_ranks(lambda: 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_many_lines_is_told_in_one() -> None:
    with pytest.raises(Failed) as caught:
        on_all_ranks(lambda: torch.eye(2).to_sparse().as_strided((1,), (1,)))
    assert "as_strided" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(Failed, match=r"x{1000}"):
        on_all_ranks(lambda: (_ for _ in ()).throw(ds_memo.MemoError("x" * 1000)))


def test_many_problems_are_counted() -> None:
    failed = Failed([f"rank {number}: no" for number in range(9)])
    assert str(failed) == "rank 0: no; rank 1: no; rank 2: no; and 6 more"


# ---- two ranks


class Talking(Block):
    """A layer whose ranks talk to each other, as Ulysses' do; one of them may fail on the way."""

    fails_on: int | None = None

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_on == dist.get_rank():
            raise torch.OutOfMemoryError("injected")
        dist.all_reduce(torch.ones(1))
        return super().feed(x)


class Failing(Block):
    """A layer that fails on one rank in its n-th call, in the middle."""

    fails_on: int | None = None
    left = 3

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_on == dist.get_rank():
            Failing.left -= 1
            if Failing.left == 0:
                raise torch.OutOfMemoryError("injected")
        return super().feed(x)


def batch(length: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {
        "inputs_embeds": torch.randn(2, length, 64, generator=generator),
        "labels": torch.randint(0, 96, (2, length), generator=generator),
    }


def engine(model: nn.Module, stage: int, memo: dict[str, Any] | None) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    if memo is not None:
        config["memo"] = memo
    optimizer = torch.optim.SGD(model.parameters(), lr=1024.0)  # a step is then the gradient, far larger than the parameter
    start = deepspeed.initialize if memo is None else ds_memo.initialize
    return start(model=model, optimizer=optimizer, config=config)[0]


def trained(block: type[nn.Module], stage: int, memo: dict[str, Any] | None, steps: int = 2) -> tuple[dict, Any]:
    """Train some steps; return the parameters and the engine."""
    torch.manual_seed(0)
    model = Toy(block)
    trainer = engine(model, stage, memo)
    for _ in range(steps):
        trainer.backward(trainer(**batch()).loss)
        trainer.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {name: p.detach().clone() for name, p in model.named_parameters()}, trainer


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, reference in want.items():
        assert (got[name] - reference).norm() <= 1e-4 * reference.norm(), name


class TestTwoRanks(DistributedTest):
    world_size = 2
    exec_timeout = 120

    def test_speaking(self) -> None:
        me = dist.get_rank()
        for _ in range(3):
            assert on_all_ranks(lambda: me) == me
            with pytest.raises(Failed, match=r"^rank 1: ValueError: no$"):
                on_all_ranks(lambda: _raise(ValueError("no")) if me == 1 else None)
        with pytest.raises(Failed, match=r"rank 0: .*; rank 1: "):
            on_all_ranks(lambda: _raise(ValueError("no")))
        key = f"ds_memo/{next(agree._meetings) - 3}/{me}"
        assert not agree.store.distributed_c10d._get_default_store().check([key])  # entries that were read are deleted

    def test_no_wait_is_longer_than_the_groups(self) -> None:
        _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
        if dist.get_rank() == 0:
            with pytest.raises(agree.Absent, match=r"^rank 1 has not come for 1 s: it ended with ValueError: no$"):
                on_all_ranks(lambda: None)
            with pytest.raises(ds_memo.MemoError, match=r"rank 0: ValueError: here. Rank 1 has not answered for 1 s"):
                on_all_ranks(lambda: _raise(ValueError("here")))
            agree.store.tell("ended", "")
        else:
            with pytest.raises(ValueError, match="no"), naming_lost_ranks("a test"):
                raise ValueError("no")
            assert agree.store.heard(["ended"], 30) == [""]

    def test_ranks_whose_group_moves_no_host_memory(self, monkeypatch) -> None:
        """As NCCL's. They talk over one group of gloo, so none waits for its device."""
        made, new_group = [], dist.new_group
        only_device = types.SimpleNamespace(_device_types=[torch.device("cuda")])
        monkeypatch.setattr(agree.dist, "group", types.SimpleNamespace(WORLD=only_device))
        monkeypatch.setattr(agree.dist, "new_group", lambda **how: made.append(new_group(**how)) or made[-1])
        me = dist.get_rank()
        with _Collectives() as seen:
            assert agree.greatest([me, -me]) == [1, 0]
        assert agree.from_all_ranks({"rank": me}) == [{"rank": 0}, {"rank": 1}]
        assert len(made) == 1 and dist.get_backend(made[0]) == "gloo" and seen.names == ["c10d::allreduce_"]

    def test_a_network_that_gloo_does_not_find_is_named(self, monkeypatch) -> None:
        only_device = types.SimpleNamespace(_device_types=[torch.device("cuda")])
        monkeypatch.setattr(agree.dist, "group", types.SimpleNamespace(WORLD=only_device))
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        with pytest.raises(ds_memo.MemoError, match=r"cannot connect over gloo.*nowhere0.*set GLOO_SOCKET_IFNAME"):
            agree.greatest([1])

    def test_what_differs_names_the_ranks(self, tmp_path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        me = dist.get_rank()
        for model, memo, message in (
            (Toy(), {"alpha": 0.5 if me else 0.25}, r"memo\.alpha: 0\.25 on rank 0, 0\.5 on rank 1$"),
            (Toy(layers=4 + me), {}, r"the model differs .* layers: 4 on rank 0, 5 on rank 1"),
        ):
            handle = ds_memo.attach(model, HERE | memo)
            with pytest.raises(ds_memo.MemoError, match=message):
                model(**batch())
            handle.detach()

    def test_budgets_and_rates_are_those_of_the_poorer_rank(self, tmp_path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        real = run.CopyBench.rate
        slower = 3.0 if dist.get_rank() else 1.0
        rates: list[float] = []

        def rate(bench: Any, stream: str) -> float:
            rates.append(real(bench, stream) / slower)
            return rates[-1]

        run.CopyBench.rate = rate  # of this process, which ends with the test
        handle = ds_memo.attach(model := Toy(), HERE)
        slab = handle._session.slab
        slab.budget.nbytes = 10**9 - dist.get_rank()
        model(**batch()).loss.backward()
        report = handle.report()["profile"]
        everybodys = agree.from_all_ranks(rates)
        assert report["d2h_bytes_per_s"] == min(rates[0] for rates in everybodys)
        assert report["h2d_bytes_per_s"] == min(rates[1] for rates in everybodys)
        assert report["host_budget"] == 10**9 - 1
        assert len({repr(seen) for seen in agree.from_all_ranks(handle._session.tuner.profile)}) == 1
        handle.detach()

    @pytest.mark.parametrize("stage", [0, 3])
    def test_a_rank_that_fails_alone_makes_all_fall_back(self, stage: int, tmp_path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        want, _ = trained(Block, stage, None)
        Failing.fails_on = 1
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got, trainer = trained(Failing, stage, HERE)
        assert Failing.left <= 0 or dist.get_rank() == 0
        (warning,) = [str(w.message) for w in said if "no profile could be made" in str(w.message)]
        assert "(rank 1: OutOfMemoryError: injected)" in warning
        report = ds_memo.report(trainer)
        assert warning in report["warnings"]
        assert report["profile"] is None and report["checkpointing"] and report["bytes_to_host"] > 0
        assert_close(got, want)

    def test_under_zero3_a_profile_makes_no_collective_in_a_layer(self, tmp_path) -> None:
        """Its sizes are those of training, and parameters are partitioned again."""
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        inside: list[str] = []
        real = run.measure

        def measure(*args: Any) -> Any:
            with _Collectives() as seen:
                sample = real(*args)
            inside.extend(seen.names)
            return sample

        run.measure = measure
        want, _ = trained(Block, 3, None)
        got, trainer = trained(Block, 3, HERE)
        assert inside == []
        assert not ds_memo.report(trainer)["warnings"]
        assert_close(got, want)
        assert all(p.ds_status.name == "NOT_AVAILABLE" for p in trainer.module.parameters())
        run.gathered = lambda module: contextlib.nullcontext()  # the control: ZeRO-3's hooks gather
        os.environ["XDG_CACHE_HOME"] = "/dev/null"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained(Block, 3, HERE, steps=1)
        assert inside

    def test_gathering_counts_as_memory_that_is_needed(self, tmp_path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        _, trainer = trained(Block, 3, HERE, steps=1)
        assert meet_in_layers(trainer.module)
        module = trainer.module.blocks[0]
        assert gathered_params.gathered_bytes(module) == 4 * sum(p.ds_numel for p in module.parameters())
        samples = trainer.memo._session.tuner.profile.kinds[0].samples
        assert all(sample.working.backward > gathered_params.gathered_bytes(module) for sample in samples)

    def test_a_profile_knows_how_many_ranks_share_a_sequence(self, tmp_path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        _, alone = trained(Block, 0, HERE, steps=1)
        assert not talk_in_layers(alone.module)
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
        _, shared = trained(Block, 0, HERE, steps=1)
        assert talk_in_layers(shared.module) and not meet_in_layers(shared.module)
        profiles = [trainer.memo._session.tuner.profile for trainer in (alone, shared)]
        assert [profile.ranks_per_sequence for profile in profiles] == [1, 2]
        assert not shared.memo.report()["profile"]["from_cache"]  # another run's

    def test_layers_that_talk_are_profiled(self, tmp_path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        _, trainer = trained(Talking, 0, HERE, steps=1)
        assert not ds_memo.report(trainer)["warnings"]

    def test_a_rank_that_fails_while_others_wait_for_it_ends(self, tmp_path) -> None:
        """It cannot reach them; its exit ends them."""
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        agree.GRACE_S = 2.0
        Talking.fails_on = 1
        handle = ds_memo.attach(model := Toy(Talking), HERE)
        with pytest.raises(RuntimeError) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**batch())
        if dist.get_rank() == 1:
            assert re.search(r"injected\. Rank 0 has not answered for 2 s.*memo\.alpha", str(caught.value))
            assert isinstance(caught.value, ds_memo.MemoError) and not isinstance(caught.value, Failed)
        handle.detach()
        dist.destroy_process_group()  # as at a process's end: ranks that wait for this one notice at once


class _Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _raise(error: Exception) -> None:
    raise error
