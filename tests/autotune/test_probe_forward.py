"""The look into the first forward, and the profile that is made then, leave no trace."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ds_memo
from ds_memo.runtime.passes import place
from tests.inside import inside
from tests.models import HIDDEN, Batch, Outcome, Toy, assert_same, build, compare_with_stock, gradients, step

PLENTY = 1.0
BATCH = Batch.random(2, 300)


pytestmark = pytest.mark.usefixtures("own_cache")


def attached(model: Any) -> Any:
    return ds_memo.attach(model, {"enabled": True, "plan": {"enabled": False}})


@pytest.mark.parametrize("device_memory_gib", [0.01, PLENTY])
def test_a_checkpoint_around_the_whole_model(device_memory_gib: float) -> None:
    """The profile is taken inside of it, in the first pass, and must not look like the forward's work."""

    def drive(model: Any, number: int) -> Outcome:
        embeds = BATCH.embeds.clone().requires_grad_()
        loss = checkpoint(lambda x: model(inputs_embeds=x, labels=BATCH.labels).loss, embeds, use_reentrant=False)
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    compare_with_stock(
        build("llama"), drive, {"enabled": True, "device_memory_gib": device_memory_gib, "plan": {"enabled": False}}
    )


def test_statistics_before_the_layers_do_not_see_the_profile() -> None:
    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(HIDDEN)

        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(self.norm(inputs_embeds.flatten(0, 1)).view_as(inputs_embeds), labels)

    model = Normed()
    handle = attached(model)
    step(model, BATCH)
    assert handle.report()["profile"] is not None
    assert model.norm.num_batches_tracked == 1
    handle.detach()


def test_what_comes_before_the_layers_happens_once() -> None:
    """The look into the first forward draws no number for good, from Python or NumPy, and changes no input in place."""

    class Masked(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            inputs_embeds.mul_(0.5)
            x = inputs_embeds * np.random.rand() + random.random()
            return super().forward(x, labels)

    def drive(model: Any, number: int) -> Outcome:
        if number == 0:
            random.seed(1)
            np.random.seed(2)
        embeds = BATCH.embeds.clone()
        loss = model(inputs_embeds=embeds, labels=BATCH.labels).loss
        loss.backward()
        drawn = torch.tensor([random.getstate()[1][-1], np.random.get_state()[2]])
        return Outcome(loss.detach(), {**gradients(model), "the input": embeds}, drawn)

    stock = Masked()
    model = copy.deepcopy(stock)
    want = [drive(stock, number) for number in range(3)]
    handle = attached(model)
    for number in range(3):
        assert_same(drive(model, number), want[number])
    assert handle.report()["profile"] is not None
    handle.detach()


def test_nothing_is_left_of_the_measuring() -> None:
    model = build("llama")
    handle = attached(model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    place(inside(handle), model, (), {"inputs_embeds": BATCH.embeds, "labels": BATCH.labels})
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert inside(handle).policy.pass_solution is not None
    assert (inside(handle).slab.used, inside(handle).engine.traffic.frames) == (0, 0)
    handle.detach()
