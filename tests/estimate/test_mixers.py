"""Layers without attention in an estimate: scans are kernels, linear in tokens, and run in tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_memo.estimate import mixer_kernels
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.hardware import load as hardware
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.model import Model, from_config
from ds_memo.hf.model_flops import attending_layers, model_flops
from ds_memo.placement import Tiles
from ds_memo.solve.run_costs import LayerCosts

H200 = hardware("h200")
HIDDEN, TOKENS = 256, 1 << 16
_COMMON = {"hidden_size": HIDDEN, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "chunk_size": 64}
CONFIGS = {
    "qwen3_next": {"num_experts": 0, "num_hidden_layers": 4, "head_dim": 64, **_LINEAR},
    "nemotron_h": {
        "n_routed_experts": 0,
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "head_dim": 64,
        **_MAMBA,
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def hybrid(request: pytest.FixtureRequest) -> Model:
    return from_config({**_COMMON, **CONFIGS[request.param], "model_type": request.param}, request.param)


def costs(model: Model, tokens: int, tiles: Tiles | None = None) -> tuple[LayerCosts, ...]:
    return Costs(model, H200, GpuLayout(1), tokens).layers(tiles)


def test_a_scan_is_linear_in_tokens_and_has_no_attention(hybrid: Model) -> None:
    short, long = costs(hybrid, TOKENS), costs(hybrid, 2 * TOKENS)
    for at_short, at_long in zip(short, long, strict=True):
        if at_short.attention_bytes:
            assert at_long.attention_s > 3.9 * at_short.attention_s > 0
            continue
        assert at_long.attention_s == at_long.attention_bytes == 0
        for name in ("forward_s", "backward_s", "replay_s", "gemm_s"):
            assert getattr(at_long, name) == pytest.approx(2 * getattr(at_short, name), rel=0.05), (
                name
            )  # short GEMMs have empty waves


@pytest.mark.slow
def test_states_at_borders_are_kept_and_little(hybrid: Model) -> None:
    """A tile keeps its hidden states, what it got from the tile before, and no log-sum-exp."""
    tiled = costs(hybrid, TOKENS, Tiles(4096))
    assert all(layer.in_tiles for layer in tiled), "every layer runs in tiles, an MLP alone too"
    unit, tiles = 2 * HIDDEN * TOKENS, TOKENS // 4096
    for layer, module in zip(tiled, hybrid.measured.found, strict=True):
        if layer.attention_bytes:
            continue
        assert layer.working_at_0.backward < 8 * unit
        carried = layer.nbytes("input") - unit
        assert carried == (tiles - 1) * carried_bytes(module.module())


def carried_bytes(layer: Any) -> int:
    """Bytes of a state in fp32 and of a convolution's inputs in bf16, by hand."""
    mixer = getattr(layer, "linear_attn", getattr(layer, "mixer", None))
    if not hasattr(mixer, "conv1d"):
        return 0
    state = math.prod(_LINEAR[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
    if hasattr(mixer, "ssm_state_size"):
        state = math.prod(_MAMBA[name] for name in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
    return 4 * state + 2 * (mixer.conv_kernel_size - 1) * mixer.conv_dim


@pytest.mark.parametrize("tokens", [1000, TOKENS])
def test_model_flops_are_those_that_its_layers_run(hybrid: Model, tokens: int) -> None:
    """The formula counts a scan's recurrence, the kernels also products inside chunks."""
    model = hybrid.measured._model
    assert attending_layers(model.config) == 1
    found = model_flops(model, tokens)
    assert found is not None
    assert 0.8 * hybrid.sequence_flops(tokens) < found < hybrid.sequence_flops(tokens)


def test_convolution_and_scan_in_one_has_the_gradients_of_the_two() -> None:
    heads, size, groups, n = 8, 16, 2, 32
    inner, mixed = heads * size, heads * size + 2 * groups * n
    shapes = [(2, 130, inner + mixed + heads), (mixed, 4), (mixed,), (heads,), (heads,), (heads,)]
    given = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    norm, projection = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((inner,), (64, inner)))
    names = {"rmsnorm_weight": norm, "outproj_weight": projection, "headdim": size, "ngroups": groups}
    out = mixer_kernels.all_in_one(*given, 64, **names)
    assert out.shape == (2, 130, 64)
    found = torch.autograd.grad(out, [*given, norm, projection], torch.empty_like(out))
    assert [x.shape for x in found] == [x.shape for x in (*given, norm, projection)]
