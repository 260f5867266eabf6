"""Padding that a caller says by attention_mask: no token sees it, and the others are as in a whole run."""

from __future__ import annotations

import functools

import pytest
import torch

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.hf import sequence as hf_sequence
from tests.distributed_harness.common import DistributedTest
from tests.faults import put_in
from tests.models import VOCAB
from tests.sequence import whole_and_parts
from tests.sequence.whole_and_parts import (
    SUMS,
    Outcome,
    assert_within_rounding,
    make,
    mean_loss,
    memo,
    off,
    part,
    summed_gradients,
)  # fmt: skip

LENGTH = 45
SIDES = ((7, 0), (-5, 0), (30, -40), (6, -3))
"""Padding of each row: at its left if positive, at its right if negative. One covers a rank's whole part."""


class Padded:
    """Rows with padding.

    Args:
        counted: position_ids number the text, as Transformers' generate() has them; False: all tokens.
    """

    def __init__(self, sides: tuple[int, ...], counted: bool = False) -> None:
        tokens = torch.randint(3, VOCAB, (len(sides), LENGTH), generator=torch.Generator().manual_seed(0))
        self.labels, self.mask = tokens.roll(-1, 1), torch.ones_like(tokens)
        self.labels[:, -1] = -100
        for row, size in enumerate(sides):
            if size:
                self.mask[row, slice(size) if size > 0 else slice(size, None)] = 0
        self.labels[(self.mask == 0) | (self.mask.roll(-1, 1) == 0)] = -100
        self.given = {"input_ids": tokens, "attention_mask": self.mask}
        counts = (self.mask.cumsum(1) - 1).masked_fill(self.mask == 0, 1)
        self.given["position_ids"] = counts if counted else torch.arange(LENGTH).expand(len(sides), -1)

    def apart(self, model: torch.nn.Module) -> Outcome:
        logits = model(**self.given, use_cache=False).logits
        mean_loss(logits, self.labels).backward()
        return Outcome(logits.detach()[self.mask.bool()], whole_and_parts.gradients(model))

    def in_parts(self, model: torch.nn.Module) -> Outcome:
        logits = model(**{name: part(value) for name, value in self.given.items()}, use_cache=False).logits
        labels = part(self.labels)
        sequence.mean_over_ranks(mean_loss(logits, labels), labels, SUMS).backward()
        return Outcome(whole_and_parts.whole(logits)[self.mask.bool()], summed_gradients(model))


def distances(name: str, ulysses: int, batch: Padded, alpha: float | None = None) -> tuple[float, float, str]:
    return off(functools.partial(make, name), lambda _: batch, ulysses, memo(alpha))


def assert_exact(name: str, ulysses: int, sides: tuple[int, ...], counted: bool = False, alpha: float | None = None) -> None:
    assert_within_rounding(f"{name}, {sides}", lambda: distances(name, ulysses, Padded(sides, counted), alpha))


FAMILIES = ("llama", "mistral", "gpt_oss", "llama4_text", "gpt2", "qwen3_next")


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("name, ulysses", [("llama", 1), *((name, 2 - number % 2) for number, name in enumerate(FAMILIES))])
    def test_families(self, name, ulysses):
        for number, sides in enumerate(SIDES):
            assert_exact(name, ulysses, sides, counted=number % 2 == 0)

    def test_memo(self):
        for ulysses in (2, 1):
            assert_exact("llama", ulysses, (30, -40), alpha=0.5)

    def test_a_mask_of_ones_changes_nothing(self, monkeypatch):
        model, found = make("llama"), []
        sequence.set_up(model, 2)
        put_in(monkeypatch, hf_sequence, "documents_of", lambda right, said: found.append(right(said)) or found[-1])
        batch = Padded((0, 0))
        batch.in_parts(model)
        del batch.given["attention_mask"]
        batch.in_parts(model)
        assert found == [((0,), (0,))] * 2

    def test_without_the_mask(self, monkeypatch):
        """Tokens that see the padding before them are others'."""
        put_in(monkeypatch, hf_sequence, "describe_part", lambda right, *args: right(*args[:3]))
        assert distances("llama", 2, Padded((7, 0)))[0] > 1e-2

    def test_refusals(self):
        model = make("llama")
        sequence.set_up(model, 2)
        for first, stop in ((4, 9), (20, 25), (22, 23), (23, 24)):  # on one rank, on both, at their border
            batch = Padded((0, 0))
            batch.mask[1, first:stop] = 0
            with pytest.raises(
                ds_memo.MemoError, match=rf"attention_mask of row 1 is 0 at tokens {first} to {stop - 1} and 1 on"
            ):
                batch.in_parts(model)
            batch.given["position_ids"] = torch.arange(LENGTH).repeat(2, 1)
            batch.given["position_ids"][1, stop:] = torch.arange(LENGTH - stop)
            batch.in_parts(model)  # another document
        with pytest.raises(ds_memo.MemoError, match=r"attention_mask has the shape \(2, 21\); expected \(2, 2[23]\)"):
            short = {name: part(value) for name, value in Padded((0, 0)).given.items()}
            model(**short | {"attention_mask": torch.ones(2, 21)})
