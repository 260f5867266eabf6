"""Side effects of layers: buffers and attributes that they write have the values that stock leaves."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ds_memo
from ds_memo.remat import op_policy
from tests.inside import gemms_of, inside
from tests.models import HIDDEN, Batch, Block, every_config, poisoned_memory, step
from tests.remat.situations import BATCH, Lines, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class Parallel(Block):
    """Attention and MLP in parallel, as in NeoX: nothing saved depends on attention's output, but statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor, counts: bool = True) -> torch.Tensor:
        a = self.attend(x)
        if counts:
            with torch.no_grad():
                self.count(a.mean((0, 1)))
        return x + a + self.feed(x)

    def count(self, mean: torch.Tensor) -> None:
        self.mean.mul_(0.5).add_(mean, alpha=0.5)


class Rebinds(Parallel):
    def count(self, mean: torch.Tensor) -> None:
        self.mean = self.mean * 0.5 + mean * 0.5


class RebindsAttribute(Parallel):
    def count(self, mean: torch.Tensor) -> None:
        self.latest = mean.clone()


class Overwrites(Parallel):
    """Writes into a part, through a view, and by copying."""

    def count(self, mean: torch.Tensor) -> None:
        self.mean.view(2, -1)[1].copy_(mean[HIDDEN // 2 :])


def states(blocks: Any) -> list[torch.Tensor]:
    return [getattr(block, "latest", block.mean) for block in blocks]


@every_config
@pytest.mark.parametrize(
    "block, from_step", [(Parallel, 0), (Rebinds, 0), (RebindsAttribute, 0), (Overwrites, 0), (Parallel, 2), (Overwrites, 2)]
)
def test_statistics_of_a_product_that_nothing_saved_needs(config: dict, block: type, from_step: int) -> None:
    """They are right even if only later calls, which follow the recipe of the first, write them."""
    model = toy(block)
    reference = copy.deepcopy(model)
    ds_memo.attach(model, config)
    for number in range(4):
        batch = Batch.random(2, 17, seed=number)
        step(reference, batch, counts=number >= from_step)
        with poisoned_memory():
            step(model, batch, counts=number >= from_step)
        for got, want in zip(states(model.blocks), states(reference.blocks), strict=True):
            torch.testing.assert_close(got, want)


def test_without_statistics_the_product_is_left_out() -> None:
    model = toy(Parallel)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    for counts, expected in ((False, [True, False, True, False]), (True, [True, True, True, False])):
        for _ in range(2):  # a call that begins to count leaves the recipe; the next one is analysed
            step(model, BATCH, counts=counts)
        assert [op.wanted for op in gemms_of(handle)] == expected


@every_config
@pytest.mark.parametrize("from_step", [0, 2])
def test_an_assertion_about_a_product_that_nothing_saved_needs(config: dict, from_step: int) -> None:
    class Asserts(Lines):
        def forward(self, x: torch.Tensor, asserts: bool) -> torch.Tensor:
            y = self.a(x)
            if asserts:
                torch._assert_async(y.detach().isfinite().all())
            return x + y + self.b(F.gelu(self.c(x)))

    model = toy(Asserts)
    ds_memo.attach(model, config)
    for number in range(4):
        with poisoned_memory():
            step(model, BATCH, asserts=number >= from_step)


def test_what_goes_to_the_host_is_looked_at() -> None:
    to_host, elsewhere = torch.ops.aten._to_copy.default, torch.empty(1, device="meta")
    cpu = torch.device("cpu")
    assert op_policy.reads_values(to_host, (elsewhere,), {"device": cpu})
    assert not op_policy.reads_values(to_host, (torch.empty(1),), {"device": cpu})
    assert not op_policy.reads_values(to_host, (elsewhere,), {"dtype": torch.float16})
    assert not op_policy.reads_values(torch.ops.aten._foreach_add_.Scalar, ([elsewhere], 1), {})  # returns nothing, but writes


def test_a_graph_does_not_hold_arguments(frames: Any) -> None:
    """The mode drops its arguments at the end of a forward, so a swapped layer's hidden states can leave the device."""
    model = toy(layers=3)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
    step(model, BATCH)
    inputs: list[weakref.ref] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))
    loss = model(BATCH.embeds * 1.0, BATCH.labels).loss
    inside(handle).engine.free_failed_graphs()
    assert [ref() is None for ref in inputs[:2]] == [True, True]
    loss.backward()
