"""Planned addresses in training: requests of 64 KiB and more have theirs from the third iteration on, and nothing changes."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.ops import library
from ds_memo.ops.allocator import MIN_BYTES, Allocator
from ds_memo.planned_alloc import runtime as addresses
from ds_memo.remat import follower
from tests.everyday import everyday
from tests.inside import inside
from tests.models import Batch, Toy, build, step
from tests.planned_alloc.planned import BARE, BATCH, CONFIG, CPU, Counting, bit_equal, outcomes

pytestmark = pytest.mark.usefixtures("nothing_stays_planned")


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Receives each setting of whether the device's blocks are kept whole."""
    found: list[bool] = []
    monkeypatch.setattr(addresses, "keep_blocks_whole", lambda device, on: found.append(on))
    return found


# ---- the bar


@pytest.mark.parametrize("name", everyday(["llama", "gpt2", "gemma2", "mixtral", "plain"], ["llama"]))
def test_from_the_third_iteration_on(name: str) -> None:
    model = build(name)
    want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 5)
    with Counting(model) as counting:
        for number in range(5):
            bit_equal(step(model, BATCH), want[number])
            if number >= 2:
                counting.assert_followed()
                report = counting.report()
                assert report["arena"] == report["peak"] == report["lower_bound"] > 0 and report["proven"]


@pytest.mark.slow
def test_passes_without_recompute_between_planned_ones(whole: list[bool]) -> None:
    """Everything fits at one length and not at another. Passes without recompute are not logged, and the plan survives them, even
    if the arena was freed meanwhile as on CUDA. Blocks are kept whole in logged passes only."""
    model, long, short = build("llama"), BATCH, Batch.random(4, 16)
    with Counting(model, {"enabled": True, "device_memory_gib": 0.006}) as counting:
        optimizer, passes = torch.optim.SGD(model.parameters(), lr=0.0), []
        batches = [long, short, long, short, short, long, short, long, short, long]
        for batch in batches:
            step(model, batch)
            optimizer.step()
            passes.append((counting.handle.report()["checkpointing"], CPU.mode))
            assert whole[-1] == (CPU.mode == "profile")
            if batch is short:
                assert not CPU.requests()
                counting.handle.release_arena()
                counting.counts()
        assert [checkpointing for checkpointing, _ in passes] == [batch is long for batch in batches]
        assert {mode for checkpointing, mode in passes if not checkpointing} == {"off"}
        assert passes[-1] == (True, "plan")
        counting.assert_followed()
        whole.append(True)
    assert not whole[-1]  # once detached


def test_the_bar_notices_a_size_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Allocator.load_plan

    def one_off(self: Allocator, key: int, visits: list[tuple[str, list[tuple[int, int]]]], spare: int) -> None:
        visits[2][1][0] = (visits[2][1][0][0] + 512, visits[2][1][0][1])
        load(self, key, visits, spare)

    monkeypatch.setattr(Allocator, "load_plan", one_off)
    with pytest.raises(AssertionError, match="'size': 1, 'abandoned'"):
        test_from_the_third_iteration_on("plain")


# ---- training loops


def train(model: nn.Module, number: int, optimizer: torch.optim.Optimizer, micro: int, late_zero: bool) -> list[float]:
    losses = []
    if not late_zero:
        optimizer.zero_grad()
    for m in range(micro):
        batch = Batch.random(4, 128, seed=10 * number + m)
        loss = model(inputs_embeds=batch.embeds, labels=batch.labels).loss
        if late_zero and m == 0:
            optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return losses


@pytest.mark.parametrize("micro, late_zero", everyday([(1, False), (1, True), (3, True)], [(1, False), (1, True)]))
def test_an_optimizer_and_accumulation(micro: int, late_zero: bool) -> None:
    losses = []
    for config in (BARE, CONFIG):
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = ds_memo.attach(model, config)
        losses.append([])
        for number in range(7):
            before = handle.report()["plan"]
            losses[-1] += train(model, number, optimizer, micro, late_zero)
            after = handle.report()["plan"]
            # Without an engine it shows with the first step that there are several forwards to each.
            if after and number >= (2 if micro == 1 else 4):
                hits = after["hits"] - before["hits"]
                missed = sum(after["misses"].values()) - sum(before["misses"].values())
                assert hits >= 0.99 * (hits + missed), (number, before, after)
        handle.detach()
        assert inside(handle).policy.alpha_used == 0.5
    assert losses[0] == losses[1]


# ---- where the kept tensors are


def test_kept_outputs_leave_from_where_they_were_born_and_come_back_to_planned_addresses() -> None:
    """No staging copy: copies begin and end at the planned addresses themselves."""
    model = build("llama")
    config = {"alpha": 1.0, "resident_layers": 0}
    with Counting(model, config) as counting:
        for _ in range(3):
            step(model, BATCH)
        streams, seen = inside(counting.handle).engine.streams, {"d2h": [], "h2d": []}
        copy_ = streams.copy

        def watch(stream: str, dst: torch.Tensor, src: torch.Tensor, *where: int) -> None:
            storage = (src if stream == "d2h" else dst).untyped_storage()
            if storage.nbytes() >= MIN_BYTES["cpu"]:
                seen[stream].append(CPU.owns(storage.data_ptr()))
            copy_(stream, dst, src, *where)

        streams.copy = watch
        step(model, BATCH)
        counting.assert_followed()
        for name, planned in seen.items():
            assert len(planned) >= 4 * 5, name
            assert planned.count(False) <= (name == "d2h"), name  # the first layer's input is the user's own tensor


# ---- what may go wrong


@pytest.mark.slow
def test_a_tensor_kept_across_steps_stays_what_it_is() -> None:
    model, kept = build("llama"), []
    with Counting(model) as counting:
        for _ in range(2):
            step(model, BATCH)
        hook = model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda m, i, o: kept.append(o.detach()))
        step(model, BATCH)
        hook.remove()
        values = [tensor.clone() for tensor in kept]
        want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]
        counting.counts()
        bit_equal(step(model, BATCH), want)
        hits, misses = counting.counts()
        assert hits and misses["overlap"] >= 1
        for _ in range(12):  # planned again, in vain; requests that fit still follow the plan
            bit_equal(step(model, BATCH), want)
        assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
        counting.counts()
        step(model, BATCH)
        hits, misses = counting.counts()
        assert hits > 10 * sum(misses.values()) > 0
        kept.clear()
        step(model, BATCH)
        counting.assert_followed()


@pytest.mark.parametrize("backward, when", [(False, 1), (False, 2), (False, 3), (True, 3)])
def test_an_exception_in_a_pass(backward: bool, when: int) -> None:
    """Inside a layer's forward, or in the backward, of which torch itself holds the failed graph for one more step."""
    model = build("llama")
    want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]

    def boom(*args: Any) -> None:
        raise RuntimeError("boom")

    with Counting(model) as counting:
        for _ in range(when):
            step(model, BATCH)
        mlp = model.model.layers[2].mlp
        hook = mlp.down_proj.weight.register_hook(boom) if backward else mlp.register_forward_pre_hook(boom)
        with pytest.raises(RuntimeError, match="boom"):
            step(model, BATCH)
        hook.remove()
        model.zero_grad()
        for _ in range(2):
            bit_equal(step(model, BATCH), want)
        assert CPU.live_blocks == 0
        counting.counts()
        bit_equal(step(model, BATCH), want)
        counting.assert_followed()


class Uneven(Toy):
    """A layer that requests another size each time."""

    calls = 0

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        scratch = [torch.zeros(1 << 16 + (self.calls + i) % 5) for i in range(20)]
        out = super().forward(inputs_embeds, labels, **kwargs)
        return types.SimpleNamespace(loss=out.loss + sum(s[0] for s in scratch), logits=out.logits)


def test_requests_that_never_repeat_are_left_alone(whole: list[bool]) -> None:
    torch.manual_seed(0)
    model = Uneven()
    want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]
    with Counting(model) as counting:
        for _ in range(6):
            bit_equal(step(model, BATCH), want)
        assert counting.counts()[0] == 0 and counting.report()["plans"] == 0
        assert whole == [True] * 4 + [False] * 2


def test_blocks_are_kept_whole_in_the_first_passes_without_a_plan(whole: list[bool]) -> None:
    """Planned passes in between give no new patience: each switch splits and joins the blocks of all passes."""
    model = build("llama")
    with Counting(model):
        for batch in [BATCH] * 3 + [batch for rows in (3, 5, 6, 7) for batch in (Batch.random(rows, 14 * rows), BATCH)]:
            step(model, batch)
        assert whole == [True] * 2 + [False] + [True, False] * 2 + [False, False] * 2


def test_blocks_are_kept_whole_for_a_profile_only_where_one_will_be_made(tmp_path: Path, whole: list[bool]) -> None:
    """Switching empties the device's cache, so it must not happen in every pass of a run without a profile."""
    model = build("llama")
    handle = ds_memo.attach(model, {"cache_dir": str(tmp_path)})
    inside(handle).tuner.gave_up = True
    for _ in range(6):
        step(model, BATCH)
    assert handle.report()["profile"] is None and handle.report()["plan"]["hits"] > 0
    assert whole == [True] * 2 + [False] * 4
    handle.detach()


@pytest.mark.processes
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tests/test_compiled.py has each fault of a build."""
    monkeypatch.setattr(library, "_loaded", {})
    for name in ("library", "why"):
        monkeypatch.setattr(follower._Followed, name, None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build("plain")
    with pytest.warns(ds_memo.MemoWarning, match=r"record and replay run in Python, .*\(memo_ops_cpu is not available: no C"):
        want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]
    with pytest.warns(ds_memo.MemoWarning, match="not planned: memo_ops_cpu is not available"):
        handle = ds_memo.attach(model, CONFIG)
    bit_equal(step(model, BATCH), want)
    report = handle.report()
    assert report["host"]["record_and_replay"]["way"] == "Python"
    assert report["plan"] is None and "no C++ compiler" in report["warnings"][0]
    handle.detach()


def test_no_room_for_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Allocator.reserve

    def full(self: Allocator, nbytes: int) -> None:
        if nbytes:
            raise torch.OutOfMemoryError("the device is full")
        reserve(self, nbytes)

    monkeypatch.setattr(Allocator, "reserve", full)
    model = build("plain")
    want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]
    with Counting(model) as counting, pytest.warns(ds_memo.MemoWarning, match="no room for an arena .*the device is full"):
        for _ in range(4):
            bit_equal(step(model, BATCH), want)
        assert counting.counts() == (0, {})


def test_what_outlives_its_pass_is_left_native() -> None:
    model = build("plain")
    with Counting(model) as counting:
        held = []
        for _ in range(4):
            held = [step(model, BATCH), *held[:1]]  # the gradient of the input, into the pass after the next
            hits, misses = counting.counts()
        assert hits and misses == {"native": 1}
