"""Llama-3-8B on eight H100, estimated: benchmarks.frontier."""

from dataclasses import replace

import pytest

from benchmarks import frontier
from benchmarks.published_runs import machine, model
from ds_memo.attention_kernel import CUDNN, FA3, FLASH
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.question import Question
from ds_memo.units import GIB

pytestmark = pytest.mark.slow
ASKED = Question(model("llama3-8b", fused=True), machine("flash_attn_3"), 8, 1 << 20)


def test_a_step_without_recomputed_attention_is_shorter() -> None:
    found = frontier.row("here", estimate(ASKED))
    assert found["attention_recomputed"] == 0
    assert [(of["kernel"], of["ring"]) for of in found["steps"]] == [(FA3, 1), (CUDNN, 1), (CUDNN, 2)]
    assert all(0.6 < of["ds_memo_s"] / of["checkpointed_s"] < 0.9 for of in found["steps"])
    assert sum(found["stored_gib"].values()) == pytest.approx(found["host_gib"])


def test_heads_of_more_than_4_mi_tokens_have_cudnns_kernel_around_a_ring_alone() -> None:
    found = frontier.row("here", estimate(replace(ASKED, seq_length=5 << 20)))
    assert [of["kernel"] for of in found["steps"]] == [FA3, FLASH, CUDNN]
    steps = [of["ds_memo_s"] for of in found["steps"]]
    assert steps[0] < steps[2] < 0.7 * steps[1]


def test_where_the_host_is_small_attention_once_ends_earlier() -> None:
    small = replace(ASKED, host_memory=300 * GIB)
    once, any_ = (frontier.longest(small, recomputes) for recomputes in (False, True))
    assert once is not None and any_ is not None
    assert once.placed["attention_recomputed"] == 0 < any_.placed["attention_recomputed"]
    assert once.question.seq_length < any_.question.seq_length


def test_with_less_than_the_smallest_host_attention_is_recomputed() -> None:
    found = frontier.smallest_host(ASKED)
    assert found is not None and frontier.fits(found.question, recomputes=False)
    less = replace(ASKED, host_memory=found.question.host_bytes - 16 * GIB)
    assert frontier.fits(less, recomputes=False) is None and frontier.fits(less, recomputes=True)
