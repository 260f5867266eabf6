"""Batches in which no label counts: the loss may be NaN, gradients are stock's, which are 0."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.logits import nodes
from ds_memo.tiles import weight_gradients
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.logits.rig import BATCH, IDS, LENGTH, SINGLE, VOCAB, attached, causal, lazy_calls, logits_of, step
from tests.models import Different, assert_same_grads

NONE = torch.full((BATCH, LENGTH), -100)
SOME = torch.where(torch.arange(LENGTH) < 250, -100, IDS)
WEIGHTS = torch.rand(VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
Of = Callable[[nn.Module], torch.Tensor]


def loss_of(model: nn.Module, labels: torch.Tensor = NONE, **how: object) -> torch.Tensor:
    return F.cross_entropy(logits_of(model)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].flatten(), **how)


def of_two_rows(model: nn.Module) -> torch.Tensor:
    logits = logits_of(model)
    return F.cross_entropy(logits[0], NONE[0]).nan_to_num() + F.cross_entropy(logits[1], IDS[1])


LOSSES: dict[str, Of] = {
    "labels": lambda model: model(input_ids=IDS, labels=NONE).loss,
    "labels, 0 items": lambda model: model(input_ids=IDS, labels=NONE, num_items_in_batch=torch.tensor(0)).loss,
    "mean": loss_of,
    "mean, guarded": lambda model: loss_of(model).nan_to_num(),
    "mean, weights": lambda model: loss_of(model, weight=WEIGHTS),
    "mean, smoothing": lambda model: loss_of(model, label_smoothing=0.1),
    "sum / 0": lambda model: loss_of(model, reduction="sum") / 0,
    "none * 0": lambda model: (loss_of(model, reduction="none") * 0).sum(),
    "none, mean of none": lambda model: loss_of(model, reduction="none")[:0].mean(),
    "beside one that counts": lambda model: loss_of(model, SOME) + loss_of(model).nan_to_num(),
    "a row of two": of_two_rows,
    "no rows": lambda model: F.cross_entropy(logits_of(model)[NONE > 0], NONE[NONE > 0]),
    "nll_loss": lambda model: F.nll_loss(logits_of(model).log_softmax(-1).view(-1, VOCAB), NONE.view(-1)),
    "infinite, times 0": lambda model: F.cross_entropy(
        logits_of(model).masked_fill(torch.arange(VOCAB) == 5, -torch.inf).view(-1, VOCAB), torch.full((BATCH * LENGTH,), 5)
    ) * 0,
    "some count, times infinity": lambda model: loss_of(model, SOME) * torch.inf,
}  # fmt: skip


def compare_steps(loss: Of) -> None:
    model = causal()
    want = step(model, loss)
    with attached(model, warns="") as handle:
        got = step(model, loss)
        assert lazy_calls(handle)
    for found in (got, want):
        for name, value in found.items():
            found[name] = value.nan_to_num(7.0, 7.0, 7.0)  # what is not finite is the same
    assert_same_grads(got, want, SINGLE)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_stocks(name: str) -> None:
    compare_steps(LOSSES[name])


@pytest.mark.parametrize("name", ["labels", "mean, guarded", "sum / 0"])
def test_a_factor_that_meets_sums_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nodes, weight_gradients):
        monkeypatch.setattr(module, "times", lambda tensor, factor: tensor * factor)
    with pytest.raises(Different):
        compare_steps(LOSSES[name])


@pytest.mark.skipif(not ON_CPU, reason="CPU ranks")
class TestRanks(DistributedTest):
    world_size = 2

    def test_a_part_that_is_all_prompt(self):
        model = causal(dtype=torch.float32)
        ids, rank = IDS.view(1, -1), torch.distributed.get_rank()
        half = slice(rank * LENGTH, (rank + 1) * LENGTH)
        labels = ids.roll(-1, 1)
        labels[:, :LENGTH] = -100
        stock = copy.deepcopy(model).double()
        positions = torch.arange(2 * LENGTH)[None]
        F.cross_entropy(stock(input_ids=ids, position_ids=positions).logits.view(-1, VOCAB), labels.view(-1)).backward()
        config = {
            "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
            "zero_optimization": {"stage": 1}, "sequence_parallel_size": 2, "gradient_clipping": 0.0,
            "memo": {"enabled": True, "alpha": 1.0, "resident_layers": 0, "device_memory_gib": 1e-2, "plan": {"enabled": False}},
        }  # fmt: skip
        before = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        engine = ds_memo.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=1024.0))[0]
        logits = engine(input_ids=ids[:, half], position_ids=positions[:, half], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, half].flatten())
        assert bool(loss.isnan()) == (rank == 0)
        engine.backward(sequence.mean_over_ranks(loss, labels[:, half], engine))
        engine.step()
        assert lazy_calls(engine.memo)
        got = {name: (before[name] - parameter.detach().double()) / 1024 for name, parameter in engine.module.named_parameters()}
        assert_same_grads(got, {name: parameter.grad for name, parameter in stock.named_parameters()}, 2e-5)
        engine.memo.detach()
        engine.destroy()
