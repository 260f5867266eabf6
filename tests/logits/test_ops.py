"""What losses and metrics do with logits: values and gradients as with whole logits, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.logits.tensor import LazyLogits
from tests.everyday import everyday
from tests.logits.rig import (
    BATCH,
    EXACT,
    IDS,
    LABELS,
    LENGTH,
    TILE,
    UPSTREAM,
    VOCAB,
    Witness,
    attached,
    causal,
    compare,
    logits_of,
    step,
)
from tests.models import assert_same_grads

_DRAWN = torch.Generator().manual_seed(5)
TARGETS = torch.where(torch.rand(BATCH, LENGTH, generator=_DRAWN) < 0.1, -100, IDS)
CLASS_WEIGHTS = torch.rand(VOCAB, generator=_DRAWN, dtype=torch.float64) + 0.1
SOFT = torch.randn(BATCH * LENGTH, VOCAB, generator=_DRAWN, dtype=torch.float64).softmax(-1)
KEPT = torch.rand(BATCH, LENGTH, generator=_DRAWN) > 0.4
Of = Callable[[torch.Tensor], torch.Tensor]


def selective(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(logits, index)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    from trl.trainer.utils import entropy_from_logits

    return entropy_from_logits(logits)


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(-1, VOCAB)


def softmax_entropy(logits: torch.Tensor) -> torch.Tensor:
    p = F.softmax(logits, dim=-1)
    return -(p * torch.log(p)).sum(-1).mean()


def in_place(logits: torch.Tensor) -> torch.Tensor:
    logits.div_(0.7)
    logits[:, :, [3, 4]] = -30.0
    logits *= 0.9
    return logits.logsumexp(-1).sum()


def in_parts(logits: torch.Tensor) -> torch.Tensor:
    parts = (*logits.chunk(2, dim=0), *logits.split(1), *logits.unbind(0), *logits, logits[1], logits[:, 5:9], logits[..., -1, :])
    return sum(part.logsumexp(-1).sum() for part in parts)


KEYS = (
    None,
    [1, 0, 0],
    torch.tensor([True, False]),
    1,
    (-1, -1),
    (slice(None), slice(1, -1, 3)),
    (..., None, slice(5), slice(90)),
)


def indexed(logits: torch.Tensor) -> torch.Tensor:
    ends = logits[torch.arange(BATCH), torch.tensor([7, 290])].sum() + logits.index_select(1, torch.tensor([3, 3])).amax(-1).sum()
    return ends + sum(logits[key].logsumexp(-1).sum() for key in KEYS)


def by_name(logits: torch.Tensor) -> torch.Tensor:
    total = torch.sum(input=logits, dim=-1).pow(2).sum() + torch.logsumexp(input=logits, dim=-1).sum()
    return total + F.cross_entropy(input=flat(logits), target=IDS.view(-1)) + logits.gather(index=IDS[..., None], dim=2).sum()


def itself(logits: torch.Tensor) -> torch.Tensor:
    return (logits * logits).sum() + ((1 - logits.sigmoid()) / (1 + logits.abs())).sum() + (2 ** logits.tanh()).sum()


def grpo(logits: torch.Tensor) -> torch.Tensor:
    logits = logits[:, :-1, :][:, -280:, :] / 0.9
    old = selective(logits.detach(), IDS[:, -280:])
    ratio = (selective(logits, IDS[:, -280:]) - old).exp()
    clipped = torch.min(ratio * UPSTREAM[:, -280:], ratio.clamp(0.8, 1.2) * UPSTREAM[:, -280:])
    return -clipped.mean() + 0.1 * entropy(logits).mean()


def top_k(logits: torch.Tensor) -> torch.Tensor:
    """As GRPO samples: only the k likeliest tokens count."""
    least = (logits / 0.8).topk(20, dim=-1).values[..., -1:].detach()
    logits = (logits / 0.8).masked_fill(logits / 0.8 < least, -1e9)
    return (logits.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1) - logits.logsumexp(-1)).mean()


def dpo(logits: torch.Tensor) -> torch.Tensor:
    logps = (selective(logits[:, :-1], IDS[:, 1:]) * KEPT[:, 1:]).sum(-1)
    chosen, rejected = logps.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() + 0.01 * logits[:1][KEPT[:1]].mean()


def kto(logits: torch.Tensor) -> torch.Tensor:
    logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, IDS[:, 1:].unsqueeze(2)).squeeze(2)
    return (1 - torch.sigmoid(0.01 * (logps * UPSTREAM[:, 1:]).sum(-1))).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(logits), TARGETS.view(-1)) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def reductions(logits: torch.Tensor) -> torch.Tensor:
    best, three = logits.max(-1).values, logits.topk(3, -1).values
    norms = logits.norm(dim=-1) + logits.std(-1) + logits.var(-1)
    return best.sum() + logits.mean() + three.sum() + logits.amax(-1).sum() - logits.min(-1)[0].sum() + norms.sum()


def smoothed(logits: torch.Tensor) -> torch.Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)({"logits": logits}, LABELS, shift_labels=True)


def detached_factor(logits: torch.Tensor) -> torch.Tensor:
    return ((logits.detach().softmax(-1) ** 2) * logits.log_softmax(-1)).sum()


def by_row_temperature(logits: torch.Tensor) -> torch.Tensor:
    logits = logits / (UPSTREAM + 1)[..., None] + torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    return logits.masked_fill(torch.arange(VOCAB) > 90, -1e9).logsumexp(-1).sum()


OPS: dict[str, Of] = {
    "script's shift": lambda y: nn.CrossEntropyLoss()(y[..., :-1, :].contiguous().view(-1, VOCAB), LABELS[..., 1:].reshape(-1)),
    "sum": lambda y: F.cross_entropy(y.double().reshape(-1, VOCAB), TARGETS.flatten(), reduction="sum"),
    "none": lambda y: (F.cross_entropy(y.flatten(0, 1), TARGETS.flatten(), reduction="none") * UPSTREAM.flatten()).sum(),
    "smoothing, class weights": lambda y: F.cross_entropy(flat(y), TARGETS.view(-1), weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "class weights": lambda y: F.cross_entropy(flat(y), TARGETS.view(-1), weight=CLASS_WEIGHTS),
    "ignore_index": lambda y: F.cross_entropy(flat(y), IDS.view(-1), ignore_index=5),
    "soft targets": lambda y: F.cross_entropy(flat(y), SOFT),
    "soft targets smoothed": lambda y: F.cross_entropy(flat(y), SOFT, label_smoothing=0.2, reduction="sum"),
    "transpose": lambda y: F.cross_entropy(y.transpose(1, 2), TARGETS),
    "permute, none": lambda y: (F.cross_entropy(y.permute(0, 2, 1), TARGETS, reduction="none") * UPSTREAM).sum(),
    "log_softmax, nll_loss": lambda y: F.nll_loss(F.log_softmax(y, -1).view(-1, VOCAB), TARGETS.view(-1)),
    "log_softmax, gather": lambda y: (y.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1) * UPSTREAM).sum(),
    "gather - logsumexp": lambda y: ((y.gather(-1, IDS[..., None]).squeeze(-1) - y.logsumexp(-1)) * UPSTREAM).sum(),
    "TRL's entropy": lambda y: (entropy(y) * UPSTREAM).sum(),
    "boolean mask": lambda y: F.cross_entropy(y[:, :-1][KEPT[:, 1:]], IDS[:, 1:][KEPT[:, 1:]]),
    "trimmed vocabulary": lambda y: y[..., :90].logsumexp(-1).sum(),
    "squeeze": lambda y: y[:, :1].squeeze().logsumexp(-1).sum() + y[:1].squeeze(0).logsumexp(-1).sum(),
    "positional keepdim": lambda y: (y - y.logsumexp(-1, True).detach()).max(-1, True)[0].sum() + y.sum(-1, True).sum(),
    "reshape of what remains": lambda y: y.reshape(BATCH * LENGTH, -1).logsumexp(-1).sum(),
    "rows joined": lambda y: torch.cat([y[:, :9], y[:, 15:]], 1).logsumexp(-1).sum() + torch.stack([y[0], y[1]]).amax(-1).sum(),
    "one entry": lambda y: (y[..., 9] - y[..., 8]).sigmoid().log().sum() + y.select(-1, 3).exp().sum(),
    "listed entries": lambda y: y[:, :, [3, 7]].logsumexp(-1).sum() + y.index_select(-1, IDS[0, :5]).log_softmax(-1).sum(),
    "take_along_dim": lambda y: -torch.take_along_dim(y.log_softmax(-1), IDS[..., None], -1).mean(),
    "movedim": lambda y: F.cross_entropy(y.movedim(-1, 1), IDS),
    "none of the rows": lambda y: y.logsumexp(-1).sum() + y[:, :0].logsumexp(-1).sum(),
    **{
        fn.__name__: fn
        for fn in (
            softmax_entropy, in_place, in_parts, grpo, top_k, dpo, kto, z_loss, reductions, smoothed, detached_factor,
            by_row_temperature, indexed, by_name, itself,
        )
    },
}  # fmt: skip
DAILY = ["script's shift", "none", "class weights", "transpose", "in_place", "in_parts", "grpo", "top_k", "indexed"]


@pytest.mark.parametrize("name", everyday(OPS, DAILY))
def test_an_op(name: str) -> None:
    if name in ("grpo", "dpo", "TRL's entropy"):
        pytest.importorskip("trl")
    compare(causal(), lambda model: OPS[name](logits_of(model)))


# ---- two models


def divergence(student: torch.Tensor, teacher: torch.Tensor, **how: Any) -> torch.Tensor:
    targets = (teacher / 2).log_softmax(-1) if how.get("log_target") else (teacher / 2).softmax(-1)
    return F.kl_div((student / 2).log_softmax(-1), targets, **how)


def kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))).sum(-1).mean()


PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SFT and KL": lambda y, z: F.cross_entropy(flat(y), TARGETS.view(-1)) + 0.1 * kl(y, z),
    "batchmean": lambda y, z: divergence(y, z, reduction="batchmean"),
    "mean, log_target": lambda y, z: divergence(y, z, reduction="mean", log_target=True),
    "sum": lambda y, z: divergence(y, z, reduction="sum"),
    "none": lambda y, z: (divergence(y, z, reduction="none", log_target=True).sum(-1) * UPSTREAM).sum(),
    "temperature": lambda y, z: -((z / 3).softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    "rows of both": lambda y, z: divergence(y[:, :-1], z[:, :-1], reduction="batchmean"),
    "mask of both": lambda y, z: divergence(y[KEPT], z[KEPT], reduction="batchmean"),
    "logarithms of both": lambda y, z: ((selective(y, IDS) - selective(z, IDS)) * UPSTREAM).sum(),
}


@pytest.mark.parametrize("name", everyday(PAIRS, ["SFT and KL", "batchmean", "mask of both"]))
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
def test_a_teacher_or_reference_whose_logits_are_lazy_too(name: str) -> None:
    if name == "logarithms of both":
        pytest.importorskip("trl")
    model, teacher = causal(), causal(seed=3)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            theirs = logits_of(teacher)
        return PAIRS[name](logits_of(model), theirs)

    want = step(model, loss)
    with attached(teacher), attached(model), Witness() as witness:
        got = step(model, loss)
    assert_same_grads(got, want, EXACT)
    assert witness.rows <= TILE


# ---- what is in no table


class Fused(torch.autograd.Function):
    """As kernels do: it takes the logits, and returns their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logs = logits.log_softmax(-1)
        ctx.save_for_backward(logs.exp(), targets)
        return F.nll_loss(logs, targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        p, targets = ctx.saved_tensors
        return gradient * (p - F.one_hot(targets, VOCAB)) / len(targets), None


UNKNOWN: dict[str, tuple[str, bool, Of]] = {
    "a product": ("'matmul'", True, lambda y: (y @ torch.ones(VOCAB, 2, dtype=y.dtype)).sin().sum()),
    "a kernel": ("needs whole logits", False, lambda y: Fused.apply(flat(y), IDS.view(-1))),
    "two makings": ("needs whole logits", True, lambda y: torch.cumsum(y, -1).sum() + y.logsumexp(-1).sum()),
    "all entries in a row": ("needs whole logits", True, lambda y: y.view(-1).sin().sum() + y.reshape(-1, 1).sin().sum()),
    "two slices": ("needs whole logits", True, lambda y: (y[:, 1:] * y[:, :-1]).sum()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_op_gets_whole_logits_and_is_told(name: str) -> None:
    warns, whole, loss = UNKNOWN[name]
    compare(causal(), lambda model: loss(logits_of(model)), warns=warns, whole=whole)


# ---- without gradients

METRICS: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmax": lambda y: y.argmax(-1),
    "topk": lambda y: y.topk(2).indices,
    "max": lambda y: y.max(-1).indices,
    "accuracy": lambda y: (y[:, :-1].argmax(-1) == IDS[:, 1:]).double().mean(),
    "masked": lambda y: y.masked_fill(IDS[..., None].clone() > 50, 0.0).logsumexp(-1),
    "last tokens": lambda y: y[torch.arange(BATCH), torch.tensor([7, 290])].argmax(-1),
    "any NaN": lambda y: y.isnan().any(),
    "perplexity": lambda y: F.cross_entropy(y[:, :-1].reshape(-1, VOCAB), LABELS[:, 1:].reshape(-1)).exp(),
    "on the host": lambda y: y.detach().float().cpu().argmax(-1),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_metrics_without_gradients(mode: Callable[[], Any]) -> None:
    model = causal().eval()
    with mode():
        stock = logits_of(model)
        want = {name: metric(stock) for name, metric in METRICS.items()}
        with attached(model), Witness() as witness:
            lazy = logits_of(model)
            assert isinstance(lazy, LazyLogits) and not lazy.requires_grad
            assert (lazy.shape, lazy.dtype, lazy.device) == (stock.shape, stock.dtype, stock.device)
            got = {name: metric(lazy) for name, metric in METRICS.items()}
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=EXACT, atol=0, msg=name)
    assert witness.rows <= TILE


# ---- the witness itself


def test_the_witness_sees_whole_logits() -> None:
    model = causal()
    with attached(model, kernels={"cross_entropy": "whole"}) as handle, Witness() as witness:
        step(model, lambda model: z_loss(logits_of(model)))
        assert not handle._session.heads
    assert witness.rows == BATCH * LENGTH
