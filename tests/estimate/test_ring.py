"""A sequence on Ulysses × ring ranks: how it splits, and what the ring takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.estimate import candidates
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.model import from_config
from ds_memo.estimate.question import Question
from tests.estimate.models import SMALL, small

H100 = hardware.load("h100")
MODEL = small("llama")  # 4 heads, 2 for keys, of 16
SIX = from_config(SMALL["llama"] | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}, "six")


@pytest.mark.parametrize(
    ("model", "sp", "split"),
    [(MODEL, 4, (4, 1)), (MODEL, 16, (4, 4)), (SIX, 4, (2, 2)), (SIX, 5, (1, 5)), (small("deepseek_v3"), 8, (4, 2))],
)
def test_ranks_beyond_the_heads_are_a_ring(model, sp, split) -> None:
    asked = Question(model, H100, sp, 1 << 20)
    for one in (asked, replace(asked, sp=sp)):
        (found,) = candidates(one)
        assert (found.ulysses, found.ring, found.sp) == (*split, sp)
    (other,) = candidates(replace(asked, sp=sp, ulysses=1))
    assert (other.ulysses, other.ring) == (1, sp)
    with pytest.raises(EstimateError, match=r"multiple|unequal"):
        candidates(replace(asked, sp=2 * sp, gpus=2 * sp + 1, method="none"))


def test_uneven_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(EstimateError, match="--sp 8 with --ulysses 8: six has 6 heads and 6 key/value heads"):
        candidates(Question(SIX, H100, 8, 1 << 20, sp=8, ulysses=8))


@pytest.mark.parametrize(("sp", "ring"), [(4, 2), (8, 4), (16, 4)])
def test_what_of_the_ring_attention_does_not_hide(sp: int, ring: int) -> None:
    costs = Costs(MODEL, H100, GpuLayout(sp, sp=sp, ring=ring), 1 << 20)
    heads = max(2, sp // ring)
    way_s = 2 * (1 << 20) / sp * heads * (16 + 16) / (H100.intra_node if sp <= 8 else H100.inter_node)
    nothing_s = 1e-30
    sent = pytest.approx([(ring - 1) * way_s, (ring - 1) * way_s + ring * 2 * way_s])  # gradients are fp32
    assert costs.ring_s(nothing_s, nothing_s) == sent
    assert costs.ring_s(1e9, 1e9) == (0.0, 2 * way_s)  # the gradients' way home
    half = costs.ring_s(ring * way_s / 2, ring * 10 * way_s)
    assert half == pytest.approx(((ring - 1) * way_s / 2, 2 * way_s))
    assert costs.ring_s(0.0, 0.0) == (0.0, 0.0)  # a layer without attention


def test_latent_attention_sends_keys_and_values_of_their_sizes() -> None:
    model = small("deepseek_v3")
    costs = Costs(model, H100, GpuLayout(8, sp=8, ring=2), 1 << 20)
    assert costs.ring_s(1e9, 1e9)[1] == pytest.approx(2 * 2 * (1 << 17) * 4 * (8 + 16 + 16) / H100.intra_node)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1 << 16, 1 << 20])
def test_each_rank_of_a_ring_computes_as_much_as_one_that_trades_heads(tokens: int) -> None:
    of_heads, of_both, of_ring = (Costs(MODEL, H100, GpuLayout(4, sp=4, ring=ring), tokens).layers()[0] for ring in (1, 2, 4))
    assert of_both.attention_s == pytest.approx(of_heads.attention_s) == pytest.approx(of_ring.attention_s)
    assert of_both.outputs[0].nbytes == of_heads.outputs[0].nbytes


def test_a_rings_buffers_are_alive_in_attentions_backward() -> None:
    """Keys and values twice, and their gradients twice in fp32: 12 bytes an element."""
    model = from_config(SMALL["qwen3"] | {"head_dim": 128, "intermediate_size": 16}, "wide")  # so that attention has the peak
    alone, ring = (model.measured._sample(0, 1024, 2, H100, size).working.backward for size in (1, 2))
    assert ring - alone == 12 * 1024 * 2 * (128 + 128)
