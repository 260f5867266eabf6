"""The generated requests of a layer beside traces recorded from real models."""

from pathlib import Path

import pytest

from ds_memo.estimate.model import Model
from ds_memo.estimate.requests import layer_trace, transient_bytes
from ds_memo.plan import plan_trace, read_trace

REQUESTS = Path(__file__).parents[1] / "data" / "requests"
GPT = Model("gpt", 4, 4096, 16384, 32, 32, 128, 1, gated=False, tied=False)
LLAMA = Model("llama", 4, 4096, 14336, 32, 8, 128, 1, gated=True, tied=False)
UNIT = 2 * 16384 * 4096  # bytes of hidden states


@pytest.mark.parametrize(("model", "trace"), [(GPT, "gpt_none_L4_s16k"), (LLAMA, "llama_none_L4_s16k")])
def test_transients_of_a_layer_whose_activations_are_kept(model, trace):
    recorded = plan_trace(read_trace(REQUESTS / f"{trace}.txt"))
    want = max(phase.peak for phase in recorded.phases if phase.name.startswith("L"))
    assert transient_bytes(model, 16384, replays=False) == pytest.approx(want, rel=0.06)


@pytest.mark.parametrize(("model", "trace"), [(GPT, "gpt_full_L4_s16k"), (LLAMA, "llama_full_L4_s16k")])
def test_transients_of_a_replayed_layer(model, trace):
    """Below a full recomputation by what the replay is given: GEMM and attention outputs (and fp32 inside Llama's norms)."""
    recorded = plan_trace(read_trace(REQUESTS / f"{trace}.txt"))
    full = max(phase.peak for phase in recorded.phases if phase.name.startswith("L"))
    width = model.attention_width + 2 * model.kv_width + model.hidden + (2 if model.gated else 1) * model.ffn
    supplied = 2 * 16384 * (width + model.attention_width)
    assert full - supplied < transient_bytes(model, 16384, replays=True) < full


def test_every_request_is_freed_once():
    for model in (GPT, LLAMA, Model("moe", 2, 64, 96, 4, 2, 16, 1, gated=True, tied=False, experts=8, experts_per_token=2)):
        for replays in (False, True):
            requests = layer_trace(model, 64, replays).requests
            born = [r.id for r in requests if r.size is not None]
            freed = [r.id for r in requests if r.size is None]
            assert sorted(born) == sorted(freed) and len(set(born)) == len(born)


def test_it_grows_with_the_tokens():
    assert transient_bytes(GPT, 2 * 16384, True) == 2 * transient_bytes(GPT, 16384, True)
