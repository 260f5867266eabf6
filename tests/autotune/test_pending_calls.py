"""Layers that are called several times before their backward: all calls are solved for, each has a placement of its own."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.autotune.pending_calls import CallsInFlight
from ds_memo.profile import run
from ds_memo.profile.live import LiveBytes
from ds_memo.runtime.handle import MemoHandle
from tests.everyday import everyday
from tests.inside import inside
from tests.models import Batch, Toy, assert_same_grads, build, gradients

HEAD = 600 << 10
"""Bytes of logits and loss of one forward, which only a log of planned addresses would show."""
BATCH = Batch.random(2, 512)
ROUNDING = 1e-4
"""Rows that are computed apart differ in their last bits."""


class Shared(Toy):
    """All blocks, several times over, as ALBERT does."""

    calls = 1

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> types.SimpleNamespace:
        x = inputs_embeds
        for _ in range(self.calls):
            for block in self.blocks:
                x = block(x)
        return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def shared(layers: int, calls: int) -> Shared:
    torch.manual_seed(0)
    model = Shared(layers=layers)
    model.calls = calls
    return model


def attached(model: nn.Module, cache: Path, **memo: Any) -> MemoHandle:
    return ds_memo.attach(model, {"enabled": True, "plan": {"enabled": False}, "cache_dir": str(cache), **memo})


def steps(model: nn.Module, count: int, forwards: int = 1) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Return the most bytes alive in each step, and the gradients of so many forwards with one backward."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    for _ in range(count):
        model.zero_grad()
        with LiveBytes("cpu") as live:
            sum(model(BATCH.embeds, BATCH.labels).loss for _ in range(forwards)).backward()
        optimizer.step()
        seen.append((live.peak, gradients(model)))
    return seen


CASES = [(*case, device_mib) for case in ((1, 8, 1), (2, 3, 1), (4, 1, 3)) for device_mib in (5, 9, 40)]


@pytest.mark.parametrize("layers, calls, forwards, device_mib", everyday(CASES, [], slow=CASES[::4]))
def test_all_calls_are_solved_for(layers: int, calls: int, forwards: int, device_mib: int, tmp_path: Path) -> None:
    """From the second step on: gradients are stock's, and what is predicted is what is there."""
    model = shared(layers, calls)
    want = steps(copy.deepcopy(model), 1, forwards)[0][1]
    handle = attached(model, tmp_path, device_memory_gib=device_mib / 1024)
    before = handle.report()["host"]["peak_used"]
    for number, (peak, got) in enumerate(steps(model, 3, forwards)):
        assert_same_grads(got, want, ROUNDING)
        if number:
            report = handle.report()
            assert report["profile"]["calls"] == calls * forwards
            assert peak <= report["predicted"]["device_bytes"] + forwards * HEAD
            assert report["host"]["peak_used"] - before == pytest.approx(report["predicted"]["host_bytes"], rel=0.02)
    handle.detach()


def test_a_host_that_one_forward_fills(tmp_path: Path, times_by_flops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step it is not known that a second one comes: what the first has left of the host is not enough for it."""
    monkeypatch.setattr(run.CopyBench, "rate", lambda *args: 1e11)  # copies hide
    model = build("plain")
    want = steps(copy.deepcopy(model), 1, forwards=2)[0][1]
    handle = attached(model, tmp_path, resident_layers=0, host_memory_gib=8 / 1024)
    held = []
    for _, got in steps(model, 3, forwards=2):
        assert_same_grads(got, want)
        held.append(handle.report()["host"]["peak_used"])
    report = handle.report()
    assert held[0] > 5 << 20, "more than its half"
    assert 5 << 20 < report["predicted"]["host_bytes"] <= held[-1] <= 8 << 20, "both have a share"
    assert not report["warnings"]
    handle.detach()


def test_calls_that_nobody_expected_are_not_beside_the_layers(tmp_path: Path) -> None:
    """The first pass is solved for one of each: the others' frames are in its log, and are solved for from then on."""
    model = shared(3, 2)
    handle = attached(model, tmp_path, device_memory_gib=30 / 1024, plan={})
    steps(model, 2)
    run = inside(handle).policy.pass_solution.run
    handle.detach()
    assert run.forward_bytes == 0 and max(run.backward_bytes) == 0 and run.head_bytes > HEAD


def test_fewer_calls_count_after_some_steps() -> None:
    calls, weight = CallsInFlight(), torch.ones((), requires_grad=True)

    def forward(count: int) -> torch.Tensor:
        calls.forward_begins()
        assert [calls.number(0) - calls.earlier for _ in range(count)] == list(range(count))
        output = weight * 1
        calls.forward_ended({"loss": output})
        return output

    first, second = forward(3), forward(1)
    forward(1)  # and no backward follows
    third = forward(2)
    assert calls.earlier == 4 and calls.most == (6, 3)
    (first + third).backward()
    forward(1)
    assert calls.earlier == 1  # the second one's
    del second
    for _ in range(8):
        assert calls.most == (6, 3)
        calls.stepped()
        forward(1)
        assert calls.earlier == 0
    assert calls.most == (1, 1)


def test_what_else_is_checkpointed_beside_the_layers(tmp_path: Path) -> None:
    """The head goes through ds_memo.checkpoint, the blocks were found."""

    class Headed(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> types.SimpleNamespace:
            x = self.run_blocks(inputs_embeds)
            logits = ds_memo.checkpoint(self.head, x) if self.checkpoints else self.head(x)
            return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    model = Headed(layers=3)
    model.checkpoints = False
    want = steps(copy.deepcopy(model), 1)[0][1]
    model.checkpoints = True
    handle = attached(model, tmp_path, device_memory_gib=5 / 1024)
    with pytest.warns(ds_memo.MemoWarning, match="Linear is not among the 3 layers that were solved for"):
        seen = steps(model, 3)
    for _, got in seen:
        assert_same_grads(got, want, ROUNDING)
    assert handle.report()["stored_bytes_per_layer"][3] > 0
    handle.detach()


def test_a_model_of_which_only_parts_are_called(tmp_path: Path) -> None:
    """The loss is worked out from inner parts: nothing is solved for, and that is said."""
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = Batch.random(2, 33)

    def inner(model: nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad()
        hidden = model.model(inputs_embeds=batch.embeds).last_hidden_state
        F.cross_entropy(model.lm_head(hidden).flatten(0, 1), batch.labels.flatten()).backward()
        return gradients(model)

    got = inner(model)
    with pytest.warns(ds_memo.MemoWarning, match="a training forward of LlamaForCausalLM itself never did"):
        optimizer.step()
    assert_same_grads(got, inner(stock), ROUNDING)
    assert handle.report()["tokens_per_s"] is None
    handle.detach()


def test_a_parameter_that_is_handed_out() -> None:
    """As CLIP's temperature: it outlives the forward, and so would what hangs on it."""
    calls, scale = CallsInFlight(), nn.Parameter(torch.ones(()))
    for _ in range(3):
        calls.forward_begins()
        output = torch.ones(2) * scale, scale
        calls.forward_ended(output)
        assert len(calls._forwards) == 1
        output[0].sum().backward()
        del output
    assert not calls._forwards and not scale._backward_hooks and calls.most.forwards == 1
