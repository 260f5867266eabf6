"""Planned addresses of layers in tiles, where batches have other lengths: each has its number of tiles, and so of requests."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ds_memo.plan import bilevel, verify
from ds_memo.planned_alloc import plans_by_pass as plans
from ds_memo.shapes import PassKind
from tests.models import Batch, build, step
from tests.planned_alloc.planned import Counting, bit_equal, outcomes

pytestmark = [pytest.mark.usefixtures("nothing_stays_planned"), pytest.mark.slow]
TILED = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": 256, "head_groups": 2}
BARE = {**TILED, "plan": {"enabled": False}}
LENGTHS = [1024, 1024, 1024, 1536, 1180, 1536, 1180, 1536, 1180, 1024]
"""In 4, 6 and 5 tiles; the last of 1,180 tokens has 156."""


def missed(model: nn.Module, lengths: list[int], want: list[Any]) -> list[tuple[int, int]]:
    """Train with these lengths and compare each step. Returns hits and misses of each."""
    found = []
    with Counting(model, TILED) as counting:
        for length, outcome in zip(lengths, want, strict=True):
            bit_equal(step(model, Batch.random(1, length)), outcome)
            hits, misses = counting.counts()
            found.append((hits, sum(misses.values())))
            assert counting.report()["peak"] <= 1.02 * counting.report()["lower_bound"]
    return found


def test_lengths_with_other_numbers_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length is logged twice and follows its plan from the third pass on."""
    model = build("llama")
    want = outcomes(model, BARE, lambda m, i: step(m, Batch.random(1, LENGTHS[i])), len(LENGTHS))
    found = missed(model, LENGTHS, want)
    assert [misses for _, misses in found] == [0] * len(LENGTHS)
    assert [hits > 1000 for hits, _ in found] == [False, False, True] + [False] * 4 + [True] * 3

    def one_plan(self: plans.Plans, kind: PassKind, of: Any = plans.Plans.of) -> plans.PassPlan:
        planned = [known for known in self.known.values() if known.plan is not None]
        return planned[0] if planned else of(self, kind)

    monkeypatch.setattr(plans.Plans, "of", one_plan)  # a negative control: with one plan for all, requests miss
    assert sum(misses for _, misses in missed(build("llama"), LENGTHS, want)) > 100


def test_one_tile_is_planned_and_all_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bilevel, "_MANY", 1000)
    model, lengths = build("llama"), [2048 + 100] * 4
    want = outcomes(model, BARE, lambda m, i: step(m, Batch.random(1, lengths[i])), len(lengths))
    with Counting(model, TILED) as counting:
        for outcome in want:
            counting.counts()
            bit_equal(step(model, Batch.random(1, lengths[0])), outcome)
        counting.assert_followed()
        plan = counting.handle.plan
    assert "copies of the same requests are planned as one" in plan.notes[0] and plan.peak <= 1.02 * plan.lower_bound
    buffers, offsets = [slot.buffer() for slot in plan.slots], [slot.offset for slot in plan.slots]
    assert verify.check(buffers, offsets, lower_bound=plan.lower_bound, capacity=plan.peak, alignment=512) is None
