"""Planned addresses of a model that is evaluated in between, detached, dropped or changed."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ds_memo
from tests.inside import inside
from tests.models import Outcome, build, gradients, step
from tests.planned_alloc.planned import BARE, BATCH, CONFIG, CPU, Counting, bit_equal, outcomes

pytestmark = pytest.mark.usefixtures("nothing_stays_planned")


def assert_followed(drive: Callable[[nn.Module, int], Outcome]) -> None:
    """Check that profiled passes, and passes that follow the plan, equal stock bitwise."""
    model = build("llama")
    want = outcomes(model, BARE, drive, 4)
    with Counting(model) as counting:
        for number in range(4):
            counting.counts()
            bit_equal(drive(model, number), want[number])
        counting.assert_followed()


def test_evaluation_in_between_and_the_arena_given_back() -> None:
    model = build("llama")
    want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]
    with Counting(model) as counting:
        for _ in range(3):
            step(model, BATCH)
        arena = counting.report()["arena"]
        counting.counts()
        model.eval()
        with torch.no_grad():
            model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        assert counting.counts() == (0, {})
        assert counting.handle.release_arena() == arena
        assert counting.report()["arena"] == 0
        assert counting.handle.release_arena() == 0
        model.train()
        bit_equal(step(model, BATCH), want)
        counting.assert_followed()
        assert counting.report()["arena"] == arena


def test_evaluation_between_a_forward_and_its_backward() -> None:
    def drive(m: nn.Module, _: int) -> Outcome:
        torch.manual_seed(7)
        loss = m(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        with torch.no_grad():
            m(inputs_embeds=BATCH.embeds[:2], labels=BATCH.labels[:2])
        loss.backward()
        return Outcome(loss.detach(), gradients(m))

    assert_followed(drive)


def test_detaching_while_blocks_are_alive() -> None:
    model = build("llama")
    with Counting(model):
        for _ in range(3):
            step(model, BATCH)
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        assert CPU.live_blocks > 10
    assert CPU.mode == "off" and CPU.arena_bytes == 0 and CPU.retired_arenas == 1
    torch.full((1 << 22,), float("nan"))
    del loss
    gc.collect()
    assert CPU.retired_arenas == 0


def test_a_model_that_is_dropped_without_detach() -> None:
    model = build("plain")
    handle = ds_memo.attach(model, CONFIG)
    for _ in range(3):
        step(model, BATCH)
    assert CPU.arena_bytes
    del model, handle
    gc.collect()
    assert not CPU.installed and not CPU.arena_bytes


def test_a_layer_that_is_frozen_later_is_planned_anew() -> None:
    model = build("llama")
    with Counting(model) as counting:
        for _ in range(3):
            step(model, BATCH)
        for parameter in model.model.layers[0].parameters():
            parameter.requires_grad_(False)
        want = outcomes(model, BARE, lambda m, _: step(m, BATCH), 1)[0]
        for _ in range(5):
            bit_equal(step(model, BATCH), want)
        counting.counts()
        bit_equal(step(model, BATCH), want)
        counting.assert_followed()


def test_a_model_that_is_only_evaluated_leaves_them_to_the_one_that_trains() -> None:
    """Like DPO's reference, which is attached first and whose layers run in between."""
    reference, trained = build("llama"), build("plain")
    other = ds_memo.attach(reference, CONFIG)
    with Counting(trained) as counting:
        for _ in range(4):
            counting.counts()
            reference.eval()
            with torch.no_grad():
                reference(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
            step(trained, BATCH)
        counting.assert_followed()
    assert other.report()["plan"]["hits"] == 0 and other.report()["warnings"] == []
    other.detach()


def test_switched_off() -> None:
    model = build("plain")
    handle = ds_memo.attach(model, BARE)
    assert not inside(handle).addresses.planned and not CPU.installed
    step(model, BATCH)
    assert handle.report()["plan"] is None and handle.release_arena() == 0
    handle.detach()
