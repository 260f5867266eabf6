"""Families of models: parameter counts against Transformers' own, and what is refused or noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ds_memo.estimate import families, hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import Model, from_config, load

SIZES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "hidden_size", "n_embd", "d_model")
INSIDE_OTHERS = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
"""Language models of vision-language models; AutoModelForCausalLM does not build them alone."""
CANNOT_BE_BUILT = {
    "dots1": {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4_moe": {"num_hidden_layers": 3, "head_dim": 128},
    "hunyuan_v1_dense": {"num_hidden_layers": 2, "head_dim": 128},
    "hunyuan_v1_moe": {"num_hidden_layers": 2, "head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "ministral": {"num_hidden_layers": 2, "head_dim": 128},
    "nemotron": {"num_hidden_layers": 2, "num_key_value_heads": 8},
}
"""Families built from their defaults, with the keys that a config adds."""
DBRX = {
    "model_type": "dbrx", "d_model": 512, "n_heads": 8, "n_layers": 2, "vocab_size": 1000,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 896, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
MIXED = {
    "qwen2_moe, every other layer": {"model_type": "qwen2_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2},
    "qwen2_moe, by number": {"model_type": "qwen2_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 3]},
    "ernie4_5_moe, from the third": {"model_type": "ernie4_5_moe", "num_hidden_layers": 5, "moe_layer_start_index": 2},
    "ernie4_5_moe, to the third": {"model_type": "ernie4_5_moe", "num_hidden_layers": 5, "moe_layer_end_index": 2},
    "glm4_moe, from the third": {
        **{"model_type": "glm4_moe", "num_hidden_layers": 4, "hidden_size": 4096, "head_dim": 128, "first_k_dense_replace": 2}
    },
}
HEADS = {
    "falcon, before": {"model_type": "falcon", "num_hidden_layers": 2},
    "falcon, all heads": {"model_type": "falcon", "num_hidden_layers": 2, "multi_query": False},
    "falcon, grouped": {
        **{"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8},
        **{"new_decoder_architecture": True, "multi_query": True},
    },
    "gpt_bigcode, one": {"model_type": "gpt_bigcode", "n_layer": 2},
    "gpt_bigcode, all": {"model_type": "gpt_bigcode", "n_layer": 2, "multi_query": False},
    "null is not the default": {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 2048, "num_key_value_heads": None},
}
KEYS = {key for defaults in families.DEFAULTS.values() for key in defaults}


def transformers_model(config: dict[str, Any]) -> torch.nn.Module:
    more = {key: value for key, value in config.items() if key != "model_type"}
    built = CONFIG_MAPPING[config["model_type"]](**more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(built)


def check(config: dict[str, Any]) -> Model:
    """Compare with all parameters but positions. Biases and norms, which the estimate leaves out, are under 1 %."""
    stock = transformers_model(config)
    positions = ("wpe", "embed_positions", "position_embeddings")
    want = sum(p.numel() for name, p in stock.named_parameters() if not any(word in name for word in positions))
    got = estimated(stock, config)
    assert got.parameters == pytest.approx(want, rel=0.01)
    return got


def estimated(stock: torch.nn.Module, config: dict[str, Any]) -> Model:
    """Return the estimate's model of the same config, plus its depth and width."""
    always = {key: value for key in SIZES if isinstance(value := getattr(stock.config, key, None), int)}
    return from_config({**always, **config}, "config")


def shallow(kind: str) -> dict[str, Any]:
    """Return a config of two layers with the family's defaults."""
    if kind == "gpt_neo":  # it lists which of its layers attend to a window
        return {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    return {CONFIG_MAPPING[kind].attribute_map.get("num_hidden_layers", "num_hidden_layers"): 2}


@pytest.mark.parametrize("kind", sorted(families.DEFAULTS.keys() - INSIDE_OTHERS - CANNOT_BE_BUILT.keys() - {"dbrx"}))
def test_parameters_by_the_familys_defaults(kind):
    """The config has its depth and nothing else."""
    model = check({"model_type": kind, **shallow(kind)})
    assert not any("not known" in note for note in model.notes)


@pytest.mark.parametrize("kind", CANNOT_BE_BUILT)
def test_parameters_of_configs_that_need_more(kind):
    check({"model_type": kind, **CANNOT_BE_BUILT[kind]})


def test_parameters_of_dbrx():
    model = check(DBRX)
    assert (model.kv_heads, model.experts, model.experts_per_token) == (2, 4, 2)


@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED)
def test_parameters_of_mixtures_with_dense_layers(config):
    assert 0 < len(check(config).dense_layers) < config["num_hidden_layers"]


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_parameters_by_key_and_value_heads(config):
    check(config)


@pytest.mark.parametrize("kind", families.DEFAULTS)
def test_the_defaults_are_transformers(kind):
    """Compare every key of every family, except empty values."""
    cls = CONFIG_MAPPING[kind]
    own = {key: getattr(cls, key, None) for key in KEYS}
    steps = {"decoder_sparse_step", "moe_layer_interval"}
    plain = {
        key: value for key, value in own.items() if isinstance(value, (bool, int)) and value and not (key in steps and value == 1)
    }
    unusual = {key: value for key, value in own.items() if isinstance(value, str) and value in families.ACTIVATION_SAVES}
    assert families.DEFAULTS[kind] == plain | unusual


@pytest.mark.parametrize("kind", sorted(families.DEFAULTS.keys() - INSIDE_OTHERS - CANNOT_BE_BUILT.keys() - {"dbrx"}))
def test_which_normalise_queries_and_keys(kind):
    config = {"model_type": kind, **shallow(kind)}
    stock = transformers_model(config)
    has = any(word in name for name, _ in stock.named_parameters() for word in ("q_norm", "q_layernorm", "query_layernorm"))
    assert estimated(stock, config).qk_norm is has


def test_a_language_model_inside_another():
    """Most sizes are the family's defaults; the outer config says if embeddings are tied."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model = from_config({"model_type": "gemma3", "text_config": inner, "vision_config": {}}, "gemma-3-4b")
    assert model.parameters == pytest.approx(3.88e9, rel=0.001)
    assert any("only the language model" in note for note in model.notes)
    untied = from_config({"text_config": inner, "tie_word_embeddings": False}, "x")
    assert untied.parameters - model.parameters == model.vocab * model.hidden
    flat = {"model_type": "qwen2_vl", "hidden_size": 1536, "num_hidden_layers": 28, "vision_config": {"depth": 32}}
    notes = from_config(flat, "qwen2-vl").notes
    assert any("vision_config" in note for note in notes) and not any("not known" in note for note in notes)


@pytest.mark.parametrize("kind", families.REFUSED)
def test_refused_families(kind):
    with pytest.raises(EstimateError, match=f"{kind} cannot be estimated: "):
        from_config(
            {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}, "x"
        )


PLAIN = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layers_block_type": ["attention", "mamba"]}, "mamba"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"model_type": "new_one", "mamba_d_state": 16}, "not attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"model_type": ["llama"]}, "expected a name"),
        ({"model_type": {}}, "expected a name"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "only 4 experts"),
        ({"layer_types": [{}]}, "layer_types"),
    ],
)
def test_refused_structure(more, says):
    with pytest.raises(EstimateError, match=says):
        from_config(PLAIN | more, "x")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model_type": "new_one"}, "'new_one' is not known"),
        ({"model_type": "gpt_oss", "num_key_value_heads": 2}, "sinks"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding-window"),
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]]}, "sliding-window"),
    ],
)
def test_notes(more, says):
    assert any(says in note for note in from_config(PLAIN | more, "x").notes)


@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": None},
        {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen3", "num_key_value_heads": 2, "sliding_window": 4096},
        {"layer_types": ["full_attention", "full_attention"], "sliding_window": 128},
    ],
)
def test_nothing_to_note(more):
    assert not from_config(PLAIN | more, "x").notes


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_depths_are_those_of_a_real_layers_products(family: str) -> None:
    """Separate projections, fused ones, and no gate."""
    config = {"model_type": family, "num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1024}
    linears = [m for n, m in transformers_model(config).named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]
    forward, back = Costs(from_config(config, family), hardware.load("a800"), Layout(1), 1 << 10).gemm_depths()
    assert forward == sum(linear.in_features for linear in linears)
    assert back == sum(linear.out_features for linear in linears)


def test_tensor_parallelism_splits_one_side_of_each_product() -> None:
    """Megatron has four products; the first of each pair is split by columns, the second by rows."""
    gpt_7b = load(str(Path(__file__).parents[2] / "ds_configs" / "models" / "gpt-7b.json"))
    costs = Costs(gpt_7b, hardware.load("a800"), Layout(8, tp=4), 1 << 10, megatron=True)
    assert costs.gemm_depths() == (4096 + 1024 + 4096 + 4096, 3072 + 4096 + 4096 + 4096)
