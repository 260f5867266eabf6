"""Models that read images, whole and in parts: towers run on every rank, and the text decoder has this rank's tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_memo
from ds_memo.deepspeed import sequence
from tests import models
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.sequence import vision, whole_and_parts
from tests.sequence.whole_and_parts import ROUNDING, SUMS, Outcome, float64, mean_loss, memo, part, summed_gradients

MOVES = 0.02
"""Share of the logits that turning the images over changes, at least."""


def of_whole(name: str, batch: vision.Batch) -> Outcome:
    model = vision.build(name)
    logits = batch.logits(model)
    with torch.no_grad():
        moved = batch.logits(model, pixel_values=-batch.inputs["pixel_values"]) - logits
    assert moved.norm() > MOVES * logits.norm(), f"{name} does not look at its images"
    mean_loss(logits, batch.labels).backward()
    return Outcome(batch.real(logits), whole_and_parts._gradients(model))


def of_parts(model: torch.nn.Module, batch: vision.Batch) -> Outcome:
    logits, labels = batch.logits(model), part(batch.labels)
    sequence.mean_over_ranks(mean_loss(logits, labels), labels, SUMS).backward()
    return Outcome(batch.real(whole_and_parts.whole(logits)), summed_gradients(model))


def distances(
    name: str, ulysses: int, padding: tuple[int, ...], settings: dict[str, Any] | None = None, steps: int = 3
) -> tuple[float, float, str]:
    batch = vision.Batch(name, padding)
    want = of_whole(name, batch)
    model = vision.build(name)
    sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
    handle = None if settings is None else ds_memo.attach(model, settings)
    found = [of_parts(model, batch).off(want) for _ in range(1 if settings is None else steps)]
    if handle is not None:
        handle.detach()
    return max(off for off, *_ in found), *max(found, key=lambda off: off[1])[1:]


def assert_exact(name: str, ulysses: int, padding: tuple[int, ...] = (0, 0), settings: dict[str, Any] | None = None) -> None:
    for dtype, context in ((torch.float32, nullcontext), (torch.float64, float64)):
        most = ROUNDING[dtype]
        with context():
            of_logits, of_gradient, where = distances(name, ulysses, padding, settings)
        if not (of_logits <= most[0] and of_gradient <= most[1]):
            raise models.Different(
                f"{name} in {dtype}: logits are off by {of_logits:.1e}, the gradient of {where} by {of_gradient:.1e}"
            )
