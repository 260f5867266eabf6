"""A small model whole on one rank, each document by itself, and in parts on all ranks: how far logits and gradients are apart.

Two comparisons make a proof. In float64, with the code that asks for float32 turned to float64, both ways agree to 1e-12: what
they compute is the same. In float32, as users run it, logits agree to 1e-6, and gradients but for terms that cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.runtime.sequence import decoders
from ds_memo.sequence.parts import even
from tests import architectures, models
from tests.sequence.float64 import float64

Lengths = tuple[tuple[int, ...], ...]
"""Tokens of each document, by row."""
LOGITS, GRADIENTS = 1e-6, 1e-4
"""Largest distance in float32 of logits and of a gradient, relative to its norm. Sums of terms of both signs lose digits."""
EXACT = 1e-12
"""The same in float64."""
NOISE = 1e-9
"""Share of the largest gradient below which a gradient is zero in exact arithmetic, as a key's bias."""
SUMS: Any = SimpleNamespace(zero_optimization_stage=lambda: 1)
"""An engine that adds up the ranks' gradients, as `summed_gradients` does."""
ROUNDING = {torch.float32: (LOGITS, GRADIENTS), torch.float64: (EXACT, EXACT)}

OWN: dict[str, Callable[[], nn.Module]] = {
    "llama": functools.partial(models.build, "llama"),
    "six heads": functools.partial(
        models.build, "llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8
    ),
    "one key head": functools.partial(models.build, "llama", num_key_value_heads=1),
    "gemma2": functools.partial(models.build, "gemma2", attn_logit_softcapping=0.5),  # so low that every score is capped
    "llama4_text": functools.partial(architectures.build, "llama4_text", attention_chunk_size=12),
}
"""Models of sizes of their own; all others are those of tests/architectures.py."""


def make(name: str) -> nn.Module:
    """Return a model in PyTorch's default dtype and in evaluation mode, without dropout."""
    model = OWN.get(name, functools.partial(architectures.build, name))().to(torch.get_default_dtype()).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels know no float64
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):  # else recurrent states are forgotten within a token
                parameter.sub_(4)
    return model


class Outcome(NamedTuple):
    logits: torch.Tensor
    """Those of whole sequences (b, s, vocabulary)."""
    grads: dict[str, torch.Tensor]

    def off(self, want: Outcome) -> tuple[float, float, str]:
        """Return the relative distances of logits and of the worst gradient, and its name. NaN is far off."""
        of_logits = _relative(self.logits, want.logits)
        largest = max(float(gradient.norm()) for gradient in want.grads.values())
        assert self.grads.keys() == want.grads.keys(), self.grads.keys() ^ want.grads.keys()
        worst = [
            (_relative(self.grads[name], gradient), name)
            for name, gradient in want.grads.items()
            if gradient.norm() > NOISE * largest
        ]
        return of_logits, *max(worst)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm() / want.norm()).nan_to_num(torch.inf))


class Batch:
    """Sequences and the documents in them.

    Args:
        lengths: of each document, by row.
    """

    def __init__(self, lengths: Lengths, seed: int = 0, vocabulary: int = models.VOCAB) -> None:
        self.lengths = lengths
        length = sum(lengths[0])
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, vocabulary, (len(lengths), length), generator=generator)
        self.positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        self.labels = self.tokens.roll(-1, 1)
        self.labels[:, 2:9] = -100

    def apart_logits(self, model: nn.Module) -> torch.Tensor:
        rows = []
        for tokens, positions, lengths in zip(self.tokens, self.positions, self.lengths, strict=True):
            documents = zip(tokens[None].split(lengths, 1), positions[None].split(lengths, 1), strict=True)
            rows.append(torch.cat([model(input_ids=t, position_ids=p, use_cache=False).logits for t, p in documents], dim=1))
        return torch.cat(rows)

    def apart(self, model: nn.Module) -> Outcome:
        """Logits and gradients of the mean loss, each document in a forward of its own, on this rank alone."""
        logits = self.apart_logits(model)
        mean_loss(logits, self.labels).backward()
        return Outcome(logits.detach(), gradients(model))

    def together(self, model: nn.Module) -> Outcome:
        """As one batch with position_ids, on this rank alone."""
        logits = model(input_ids=self.tokens, position_ids=self.positions, use_cache=False).logits
        mean_loss(logits, self.labels).backward()
        return Outcome(logits.detach(), gradients(model))

    def forward(self, model: nn.Module, lengths: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of a sequence-parallel model's logits, and the loss over whole sequences.

        Args:
            lengths: tokens of each rank's part; None: as equal as they can be.
        """
        given = {"input_ids": self.tokens, "position_ids": self.positions}
        if not decoders[model].takes_whole:
            given = {name: part(value, lengths) for name, value in given.items()}
        logits = model(**given, use_cache=False).logits
        labels = part(self.labels, lengths)
        return logits, sequence.mean_over_ranks(mean_loss(logits, labels), labels, SUMS)

    def in_parts(self, model: nn.Module, parts: Sequence[int] | None = None) -> Outcome:
        logits, loss = self.forward(model, parts)
        loss.backward()
        return Outcome(whole(logits), summed_gradients(model))


def part(value: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
    """Return this rank's part of whole sequences (b, s, …)."""
    lengths = even(value.shape[1], dist.get_world_size()) if lengths is None else lengths
    return value.split(list(lengths), dim=1)[dist.get_rank()]


def whole(own: torch.Tensor) -> torch.Tensor:
    """Return all ranks' parts (b, n, …), which may differ in length."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own.detach())
    return torch.cat(parts, dim=1)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of gradients, zeros for none, and clear them."""
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def summed_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sums over ranks. A rank has none of an expert that its tokens do not reach."""
    grads = gradients(model)
    for gradient in grads.values():
        dist.all_reduce(gradient)
    return grads


def off(
    build: Callable[[], nn.Module],
    make_batch: Callable[[nn.Module], Any],
    ulysses: int | None,
    memo: dict[str, Any] | None = None,
    steps: int = 3,
    **how: Any,
) -> tuple[float, float, str]:
    """Run a model whole and in parts. Return the distance of logits and of the worst gradient, the worst of all ranks and steps.

    Args:
        make_batch: returns what has `apart` and `in_parts`, as a :class:`Batch`, for a model.
        ulysses: ranks that trade heads; the others form a ring.
        memo: settings of memo; the forward and backward then run `steps` times.
        how: arguments of `in_parts`.
    """
    model = build()
    batch = make_batch(model)
    want = batch.apart(model)
    sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
    handle = None if memo is None else ds_memo.attach(model.train(), memo)  # in evaluation mode memo has nothing to do
    found = [batch.in_parts(model, **how).off(want) for _ in range(1 if memo is None else steps)]
    if handle is not None:
        assert handle.report()["frames"]
        handle.detach()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (max(found), max(found, key=lambda off: off[1])))
    return max(off for (off, *_), _ in everywhere), *max(worst[1:] for _, worst in everywhere)


def distances(name: str, ulysses: int | None, lengths: Lengths, memo: Any = None, **how: Any) -> tuple[float, float, str]:
    """Return :func:`off` for sequences of documents of these lengths."""

    def batch(model: Any) -> Batch:
        return Batch(lengths, vocabulary=model.config.get_text_config().vocab_size)

    return off(functools.partial(make, name), batch, ulysses, memo, **how)


def assert_within_rounding(what: str, run: Callable[[], tuple[float, float, str]]) -> None:
    """Check that parts are as the whole, in float32 and in float64.

    Raises:
        Different: by how much they are off, and in which gradient.
    """
    for dtype, context in ((torch.float32, nullcontext), (torch.float64, float64)):
        most = ROUNDING[dtype]
        with context():
            of_logits, of_gradient, where = run()
        if not (of_logits <= most[0] and of_gradient <= most[1]):
            raise models.Different(
                f"{what} in {dtype}: logits are off by {of_logits:.1e}, the gradient of {where} by {of_gradient:.1e}"
            )


def assert_exact(name: str, ulysses: int | None, lengths: Lengths, **how: Any) -> None:
    """Compare a model whole and in parts."""
    assert_within_rounding(name, lambda: distances(name, ulysses, lengths, **how))


def memo(alpha: float | None, **more: Any) -> dict[str, Any] | None:
    """Return settings of memo with a mixture of stored and recomputed rows; None: without memo."""
    return None if alpha is None else {"alpha": alpha, "resident_layers": 1, "plan": {"enabled": False}, **more}
