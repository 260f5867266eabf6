"""Planned addresses of several models on one device: they take turns, and share the arena."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.planned_alloc import runtime as addresses
from tests.inside import inside
from tests.models import assert_same_grads, build, gradients, step
from tests.planned_alloc.planned import BARE, BATCH, CONFIG, CPU, Counting, bit_equal, outcomes

pytestmark = pytest.mark.usefixtures("nothing_stays_planned")


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss


@pytest.mark.slow
def test_models_that_take_turns_are_both_planned() -> None:
    actor, critic = build("llama"), build("plain")
    want = [outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0] for model in (actor, critic)]
    with Counting(actor) as first, Counting(critic) as second:
        for number in range(6):
            bit_equal(step(actor, BATCH), want[0])
            bit_equal(step(critic, BATCH), want[1])
            if number == 2:  # both are planned
                first.counts(), second.counts()
            elif number > 2:
                first.assert_followed()
                second.assert_followed()
        plans = [counting.report() for counting in (first, second)]
        assert CPU.arena_bytes == plans[0]["arena"] == plans[1]["arena"] == max(plan["peak"] for plan in plans)
        assert all(plan["plans"] == 1 for plan in plans)


def test_a_refused_layer_of_one_that_has_gone_is_no_phase_of_the_other() -> None:
    actor, critic = build("llama"), build("plain")
    with Counting(actor) as first:
        gone = ds_memo.attach(critic, CONFIG)
        step(critic, BATCH)
        gone.detach()

        def intrude(*_: Any) -> None:
            with pytest.raises(ds_memo.MemoError, match="was run after ds_memo was detached"):
                inside(gone).remat.run(inside(gone).layers[0], torch.neg, BATCH.embeds)

        for _ in range(4):
            step(actor, BATCH)
        first.counts()
        step(actor, BATCH)
        alone = first.counts()
        actor.lm_head.register_forward_pre_hook(intrude)
        step(actor, BATCH)
        assert first.counts() == alone


@pytest.mark.parametrize("end", ["detached", "garbage"])
def test_one_that_goes_leaves_the_other_its_plans(end: str) -> None:
    actor = build("llama")
    with Counting(actor) as first:
        critic = build("plain")
        handle = ds_memo.attach(critic, CONFIG)
        for _ in range(4):
            step(actor, BATCH)
            step(critic, BATCH)
        first.counts()
        if end == "detached":
            handle.detach()
        del critic, handle
        gc.collect()
        for _ in range(2):
            step(actor, BATCH)
            first.assert_followed()
    assert not CPU.installed


def test_one_that_comes_later_sees_the_arena_as_free_memory() -> None:
    with Counting(actor := build("llama")) as first:
        for _ in range(4):
            step(actor, BATCH)
        assert CPU.arena_bytes > 0
        critic = build("plain")
        seen = []
        handle = ds_memo.attach(critic, {"device_memory_gib": 1})
        measure = inside(handle).tuner._budgets.measure
        inside(handle).tuner._budgets.measure = lambda *args, **how: (seen.append(CPU.arena_bytes), measure(*args, **how))
        step(critic, BATCH)
        assert seen[0] == 0
        first.counts()
        step(actor, BATCH)
        first.assert_followed()
        assert CPU.arena_bytes > 0
        handle.detach()


@pytest.mark.parametrize("order", ["a sum", "one after the other"])
def test_passes_that_wait_together(order: str) -> None:
    """One model's backward runs inside the other's pass: it gets no planned address, and values stay right."""
    models = [build("llama"), build("plain")]
    stocks = [copy.deepcopy(model) for model in models]
    with Counting(models[0]), Counting(models[1]), warnings.catch_warnings():
        warnings.simplefilter("ignore", ds_memo.MemoWarning)
        for _ in range(8):
            losses = [loss_of(model) for model in models]
            if order == "a sum":
                sum(losses).backward()
            else:
                losses[0].backward()
                losses[1].backward()
            for model, stock in zip(models, stocks, strict=True):
                loss_of(stock).backward()
                assert_same_grads(gradients(model), gradients(stock))
                model.zero_grad()
                stock.zero_grad()


class SlowTurns(weakref.WeakValueDictionary):
    """A table of turns that lets other threads run after every read and every end of a turn."""

    def get(self, *args: Any) -> Any:
        found = super().get(*args)
        time.sleep(0.02)
        return found

    def __delitem__(self, device: torch.device) -> None:
        super().__delitem__(device)
        time.sleep(0.02)


@pytest.mark.slow
def test_turns_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread trains its own model, with host memory of its own. Both begin their passes at once, and one of them ends the
    pass before."""
    monkeypatch.setattr(addresses, "_turns", SlowTurns())
    together = threading.Barrier(2)

    def train(model: nn.Module) -> None:
        for _ in range(8):
            together.wait(20)
            loss_of(model).backward()

    models = [build("llama"), build("plain")]
    stocks = [copy.deepcopy(model) for model in models]
    first, second = (Counting(model, CONFIG | {"host_memory_gib": gib}) for model, gib in zip(models, (0.5, 0.25), strict=True))
    with first, second, warnings.catch_warnings(), ThreadPoolExecutor(2) as threads:
        warnings.simplefilter("ignore", ds_memo.MemoWarning)
        trained = [threads.submit(train, model) for model in models]
        wait(trained)
    failed = [failure for run in trained if (failure := run.exception()) is not None]
    assert failed == []
    for model, stock in zip(models, stocks, strict=True):
        for _ in range(8):
            loss_of(stock).backward()
        assert_same_grads(gradients(model), gradients(stock))


def test_a_child_of_fork_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    holds, done = threading.Event(), threading.Event()

    def hold() -> None:
        with addresses._lock:
            holds.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    if not (child := os.fork()):
        os._exit(not addresses._lock.acquire(timeout=60))
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
