"""Planned addresses where batches have other lengths or sizes: plans are switched, or made from those of other lengths."""

from __future__ import annotations

import pytest
import torch

from ds_memo.planned_alloc import plans_by_pass as plans
from tests.inside import inside
from tests.models import Batch, build, step
from tests.planned_alloc.planned import BARE, BATCH, Counting, bit_equal, outcomes

pytestmark = pytest.mark.usefixtures("nothing_stays_planned")


LENGTHS = [127, 67, 97, 113, 70, 126, 89, 101, 66]  # every tensor is above 64 KiB at all of them, or at none


@pytest.mark.slow
def test_lengths_that_never_repeat() -> None:
    """At most three are profiled; every later length is planned in its first pass."""
    model = build("llama")
    batches = [Batch.random(16, length) for length in LENGTHS]
    want = outcomes(model, BARE, lambda m, i: step(m, batches[i]), len(batches))
    with Counting(model) as counting:
        for number, batch in enumerate(batches):
            bit_equal(step(model, batch), want[number])
            if number >= 3:
                counting.assert_followed()
                report = counting.report()
                assert report["arena"] >= report["peak"] > 0 and report["peak"] <= 1.1 * report["lower_bound"]
            counting.counts()


@pytest.mark.slow
def test_lengths_whose_requests_are_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Misses in three passes, then no more plans are made from other lengths for a while; the values are right all along."""
    monkeypatch.setattr(plans, "_PAUSE", 3)
    model = build("plain")
    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda module, args: torch.empty(args[0].shape[1] ** 3).numel() and None)
    batches = [Batch.random(16, length) for length in LENGTHS]
    want = outcomes(model, BARE, lambda m, i: step(m, batches[i]), len(batches))
    with Counting(model) as counting:
        missed = []
        for number, batch in enumerate(batches):
            bit_equal(step(model, batch), want[number])
            missed.append(sum(counting.counts()[1].values()))
        assert [bool(misses) for misses in missed] == [False] * 2 + [True] * 3 + [False] * 2 + [True] + [False]
        for _ in range(3):  # a length that repeats is planned as usual
            counting.counts()
            step(model, batches[0])
        counting.assert_followed()


def test_a_batch_cut_in_half() -> None:
    model, half = build("llama"), Batch.random(2, 128)
    want = outcomes(model, BARE, lambda m, _: step(m, half), 1)[0]
    with Counting(model) as counting:
        for _ in range(3):
            step(model, BATCH)
        counting.counts()
        arena = counting.report()["arena"]
        bit_equal(step(model, half), want)  # another kind: profiled
        assert counting.counts() == (0, {})
        step(model, BATCH)
        counting.assert_followed()
        assert counting.report()["arena"] == arena


def test_few_kinds_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_KINDS", 2)
    model = build("plain")
    with Counting(model) as counting:
        for length in (64, 64, 96, 96, 128, 128, 128):
            counting.counts()
            step(model, Batch.random(4, length))
        counting.assert_followed()
        assert len(inside(counting.handle).addresses._plans.known) == 2
