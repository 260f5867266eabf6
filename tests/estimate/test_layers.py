"""Layers on the meta device: their bytes against real layers, the emulator and rehearsals; models of every kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_memo.estimate import layers
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.hardware import load as hardware
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.model import Model, from_config, load
from ds_memo.estimate.question import Question
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.profile.caught_call import layer_calls
from ds_memo.profile.layer import measure
from ds_memo.profile.layer_sample import PEAKS, LayerSample
from ds_memo.profile.tile_sample import PARTS, SAMPLES
from ds_memo.runtime.attach import attach_model
from tests.estimate.models import GPT_7B, LLAMA_8B, SMALL, small
from tests.everyday import everyday

H100 = hardware("h100")
CPU = torch.device("cpu")
AS_ON_A_CPU = ("llama", "qwen3", "gpt2", "gpt_neox", "phi3", "mixtral", "qwen3_moe", "gemma", "gemma3", "olmo2")
"""Models whose attention a CPU has a kernel for."""


def really(config: dict, folder: Path) -> LayerSample:
    """Return a real layer's profile at 1,024 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    memo = attach_model(model, {"plan": {"enabled": False}, "host_memory_gib": 0.01}, device=CPU)
    try:
        embeds = torch.randn(1, 1024, 64, dtype=torch.bfloat16)
        given, kinds = {"inputs_embeds": embeds}, [0] * len(memo.layers)
        (call,) = layer_calls(memo.remat.instead, CPU, model, (), given, kinds, bool).values()
        return measure(call, 1024, CPU)
    finally:
        memo.detach()


@pytest.mark.parametrize("name", everyday(AS_ON_A_CPU, ["llama"], slow=["gpt2", "gemma3", "qwen3_moe"]))
def test_bytes_are_those_of_a_real_layer(name: str, tmp_path: Path) -> None:
    """Kept bytes, what autograd saves, and all peaks: within 3 %."""
    real, found = really(SMALL[name], tmp_path), small(name).measured._sample(0, 1024, 1, H100)
    assert [(output.role, output.nbytes) for output in found.outputs] == [(o.role, o.nbytes) for o in real.outputs]
    assert found.no_recompute_bytes == pytest.approx(real.no_recompute_bytes, rel=0.03)
    for field in PEAKS:
        here, there = getattr(found, field), getattr(real, field)
        assert (here.forward, here.backward) == pytest.approx((there.forward, there.backward), rel=0.03), field
    assert (found.gemm_flops, found.attention_flops) == (real.gemm_flops, real.attention_flops)


@pytest.fixture(scope="module")
def llama() -> Model:
    return load(str(LLAMA_8B))


IN_THE_EMULATOR = {
    "pre": (5.250, 3.875, 5.250),
    "attention": (3.516, 3.516, 3.516),
    "post": (9.266, 6.141, 9.266),
    "attention_backward": (20.516, 14.766, 14.766),
    "pre_backward": (23.751, 13.125, 16.500),
    "post_backward": (39.501, 21.500, 28.000),
}
"""A profile of a Llama-3-8B layer, in units of tokens * hidden * 2 bytes: 4,096 tokens in tiles of 2,048; 8,192 in such; 8,192 in
tiles of 4,096."""


@pytest.mark.slow
def test_parts_in_tiles_are_those_in_the_emulator(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_TILED", (4096, 8192))
    samples = load(str(LLAMA_8B)).measured._in_tiles(0, 1, replace(H100, name="emulator"))
    for number, part in enumerate(PARTS):
        units = [sample.peaks[0][number][0] / (8192 * sample.length) for sample in samples]
        assert units == pytest.approx(IN_THE_EMULATOR[part], rel=0.001 if part != "post_backward" else 0.04), part


@pytest.mark.slow
def test_beside_attentions_backward_lie_rounded_sums(llama: Model) -> None:
    """In any groups of heads bytes grow with tokens alone, from those of the gradients of o_proj, MLP and norm in bf16."""
    short, long, _ = llama.measured._in_tiles(0, 1, H100)
    assert long.length == 2 * short.length
    number, of_sums = PARTS.index("attention_backward"), 2 * (4096 * 4096 + 3 * 4096 * 14336 + 4096)
    for few, many in zip(short.peaks, long.peaks, strict=True):
        assert 2 * few[number][0] - many[number][0] == pytest.approx(of_sums, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "groups", "units"), [(8, 1, 8.03), (8, 4, 5.78), (4, 8, 5.15)])
def test_attention_under_ulysses_is_that_of_rehearsals(llama: Model, ranks: int, groups: int, units: float) -> None:
    """Measured with 524,288 tokens a rank: the forward, without frames."""
    for sample in llama.measured._in_tiles(0, ranks, H100):
        peaks = [peak for peak, _ in sample.peaks_in(groups)]
        assert peaks[PARTS.index("attention")] / (8192 * sample.length) == pytest.approx(units, rel=0.01)


@pytest.mark.parametrize(("path", "units"), [(GPT_7B, (2, 8, 16)), (LLAMA_8B, (2, 9.5, 24.5))])
def test_what_a_layer_stores_is_the_designs(path: Path, units: tuple[float, ...]) -> None:
    """2 + 8 alpha of a GPT, 2 + 9.5 alpha of Llama-3, in units of the hidden states, and the log-sum-exp."""
    costs = Costs(load(str(path)), H100, GpuLayout(1), 1 << 17)
    layer = costs.layers()[0]
    assert layer.whole_bytes / costs.hidden_bytes == pytest.approx(units[0], rel=0.01)
    assert layer.split_bytes / costs.hidden_bytes == pytest.approx(units[1])
    if path == LLAMA_8B:
        assert layer.no_recompute_bytes / costs.hidden_bytes == pytest.approx(units[2], rel=0.01)


def test_flops_are_the_papers() -> None:
    model, s = load(str(GPT_7B)), 1 << 17
    parameters = model.layers * 12 * model.hidden**2 + model.vocab * model.hidden
    assert model.sequence_flops(s) == pytest.approx(6 * s * parameters + 6 * model.layers * model.hidden * s**2, rel=1e-6)


def test_between_two_samples_all_is_as_measured(llama: Model) -> None:
    """Bytes exactly, seconds within 1 %."""
    asked, exact = Costs(llama, H100, GpuLayout(1), 40_000).layers()[0], llama.measured._sample(0, 40_000, 1, H100)
    assert asked.no_recompute_bytes == pytest.approx(exact.no_recompute_bytes, rel=1e-4)
    assert asked.working.backward == pytest.approx(exact.working.backward, rel=0.01)
    assert (asked.forward_s, asked.backward_s) == pytest.approx((exact.forward_s, exact.backward_s), rel=0.01)


@pytest.mark.parametrize(
    "name", everyday(SMALL, ["qwen2_5_vl"], slow=["deepseek_v3", "gpt2", "gpt_oss", "qwen3_moe", "qwen3_next"])
)
def test_every_model_gets_an_answer(name: str) -> None:
    answer = estimate(Question(small(name), H100, 1, 2048, tile_tokens=0))
    assert answer.status == "ok" and 0 < answer.mfu < 1 and len(answer.placements) == small(name).layers


def test_a_window_bounds_attention() -> None:
    sliding, full = (small("gpt_oss").measured._sample(kind, 1 << 16, 1, H100) for kind in (0, 1))
    assert sliding.attention_s < 0.01 * full.attention_s and sliding.gemm_flops == full.gemm_flops


@pytest.mark.slow
def test_attention_with_sinks_runs_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of heads its backward wants a gradient of every input, the sinks too."""
    monkeypatch.setattr(layers, "_TILED", (1 << 10, 1 << 11))
    assert len(from_config(SMALL["gpt_oss"], "short tiles").measured._in_tiles(1, 1, H100)) == SAMPLES


def test_parameters_are_transformers_own(llama: Model) -> None:
    assert llama.parameters == 8_030_261_248
    tied = from_config(SMALL["llama"] | {"tie_word_embeddings": True}, "tied")
    assert small("llama").parameters - tied.parameters == 96 * 64


def test_fused_kernels_take_less() -> None:
    plain, fused = (from_config(SMALL["llama"], "llama", fused).measured._sample(0, 1024, 1, H100) for fused in (False, True))
    assert fused.gemm_flops == plain.gemm_flops and fused.forward_s < plain.forward_s and fused.replay_s < 0.6 * plain.replay_s
    assert fused.working.backward < plain.working.backward and fused.no_recompute_bytes < plain.no_recompute_bytes
    assert sum(o.nbytes for o in fused.outputs) == sum(o.nbytes for o in plain.outputs)


@pytest.mark.slow
def test_deepspeeds_ulysses_trades_no_latent_attention() -> None:
    asked = Question(small("deepseek_v3"), H100, 4, 2048, sp=2, tile_tokens=0)
    assert estimate(asked).layout.ulysses == 2
    with pytest.raises(ValueError, match="keys and values of unequal size"):
        estimate(replace(asked, method="none", tile_tokens=None))
    assert estimate(replace(asked, method="none", tile_tokens=None, sp=None, batch=4)).layout.sp == 1


@pytest.mark.slow
def test_tiles_where_whole_layers_do_not_fit(llama: Model) -> None:
    asked = Question(llama, H100, gpus=8, seq_length=5 << 19)
    tiled, whole = estimate(asked), estimate(replace(asked, tile_tokens=0))
    assert whole.status == "oom" and tiled.status == "ok"
    assert tiled.tiles.tokens == 4096 and tiled.placed["attention_recomputed"] == 0
    assert estimate(replace(asked, seq_length=1 << 18, tile_tokens=4096)).tiles.tokens == 4096
    assert estimate(replace(asked, seq_length=1 << 18)).tiles is None
    costs = Costs(llama, H100, GpuLayout(8, sp=8), 1 << 20)
    one, cut = costs.layers()[0], costs.layers(Tiles(4096, 4))[0]
    took = [layer.forward_s + layer.backward_s + layer.replay_s + layer.gemm_s for layer in (one, cut)]
    assert 1.0 < took[1] / took[0] < 1.1
    assert cut.stored_bytes(Placement(PlacementKind.SWAPPED, 0.0)) == one.stored_bytes(Placement(PlacementKind.SWAPPED, 0.0))
