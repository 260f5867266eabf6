"""Budgets: what head and loss take is seen in the first step, and solved for from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.autotune import budgets
from ds_memo.planned_alloc.runtime import Addresses
from ds_memo.solve.memory import bytes_of_layers, device_bytes
from ds_memo.solve.solver import solve
from tests.inside import inside
from tests.models import build

pytestmark = pytest.mark.usefixtures("own_cache")


def trained(memory_gib: float, steps: int = 6, accumulate: int = 1, **memo: Any) -> Any:
    """A model whose logits are larger than everything its layers keep."""
    model = build("gpt2", vocab_size=8000, n_positions=300)
    tokens = torch.randint(0, 8000, (2, 300), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"enabled": True, "device_memory_gib": memory_gib, "kernels": {"cross_entropy": "whole"}, **memo}
    handle = ds_memo.attach(model, settings)
    plain = []
    for _ in range(steps):
        for _ in range(accumulate):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        plain.append(not handle.report()["checkpointing"])
    return handle, plain


def test_head_and_loss_are_seen_in_the_first_step() -> None:
    """The first step checkpoints, however much there seems to be; from then on the peak is known, within 2 %."""
    handle, plain = trained(0.062)
    report, solved = handle.report(), inside(handle).policy.pass_solution
    run, solution = solved.run, solved.solution
    handle.detach()
    assert plain == [False] * 6
    assert report["predicted"]["device_bytes"] == pytest.approx(report["plan"]["arena"], rel=0.02)
    without = device_bytes(run.layers_alone(), solution.kinds, solution.alpha)
    assert without < 0.2 * report["plan"]["arena"]  # as it would be predicted otherwise
    assert solve(run.layers_alone()).no_recompute  # and done


@pytest.mark.slow
def test_a_first_step_that_follows_a_plan() -> None:
    """Many passes come before it, and the plan is there for the last of them: those that were logged are of the same kind."""
    handle, _ = trained(0.062, steps=2)
    want = inside(handle).policy.pass_solution.run
    handle.detach()
    handle, plain = trained(0.062, steps=2, accumulate=4)
    run, hits = inside(handle).policy.pass_solution.run, handle.report()["plan"]["hits"]
    handle.detach()
    assert plain == [False] * 2 and hits > 100
    assert (run.head_bytes, run.forward_bytes) == (want.head_bytes, want.forward_bytes)
    tied = 8000 * 64 * 4  # the head's part of the embedding's gradient becomes the gradient, or waits until it is added to that
    assert set(run.backward_bytes) == {tied} and set(want.backward_bytes) <= {0, tied}


@pytest.mark.slow
def test_where_nothing_was_logged_the_arena_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's peak tells then, of which the device says that all of the arena is still there."""
    known: list[int] = []
    monkeypatch.setattr(Addresses, "non_layer_memory", lambda *args: None)
    monkeypatch.setattr(budgets, "most_beyond", lambda device, nbytes: known.append(nbytes))
    handle, _ = trained(0.062, steps=1, accumulate=4)
    solved, arena = inside(handle).policy.pass_solution, handle.report()["plan"]["arena"]
    handle.detach()
    assert arena > 0 and known == [bytes_of_layers(solved.run, solved.solution.kinds, solved.solution.alpha)[1] - arena]


def test_from_the_second_step_on_all_may_stay_on_the_device() -> None:
    handle, plain = trained(0.09, steps=3)
    handle.detach()
    assert plain == [False, True, True]


def test_a_head_that_no_setting_has_room_for() -> None:
    """Nothing that ds_memo decides would help, so the run goes on, and is told."""
    with pytest.warns(ds_memo.MemoWarning, match="600 tokens take .* for head, loss and .* A smaller"):
        handle, plain = trained(0.05, steps=3)
    assert plain == [False] * 3 and handle.report()["resident_layers"] == 0
    handle.detach()
