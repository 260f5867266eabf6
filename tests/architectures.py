"""Every causal language model of the installed Transformers, as small as possible, with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import HEADS, HIDDEN, LAYERS, VOCAB

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Their model types."""
IS_PINNED = f"transformers=={__version__}" in (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
"""True for the Transformers whose families the documentation lists. Others have other ones, and other code for some."""
LARGEST = 20_000_000
"""Parameters. A larger model has a tower that `SIZES` does not reach."""

_TOWER = "it has a tower, or tables, that no setting of its configuration makes small"
NOT_COMPARED = {
    **dict.fromkeys(
        ("dots3_note_text", "fuyu", "gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"), _TOWER
    ),
    **dict.fromkeys(("dots3_note", "qwen4_exp"), "its text part, a type of its own, needs sizes that it is not given inside"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it needs caches of the model that it assists"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "Transformers cannot make it of its configuration: that has no dropout"),
    "gemma3n": "it needs the package timm",
    "reformer": "it draws seeds of its own: no two runs of stock are alike",
    "xlm": "parts of a layer lie in lists of their own: memo.layers must name layers",
    "xmod": "it wants a language to be set",
    "zamba": "Transformers cannot tie the weights of one this small",
}
"""Model types that are not compared, and why. Any other that cannot be made small fails."""

_WIDTH, _HEAD = 96, HIDDEN // HEADS
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("lru_width", "attention_hidden_size"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "mlp_dim", "ffn_hidden_size", "dim_ff", "d_ff", "d_inner"), _WIDTH
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "global_head_dim"), _HEAD),
    **dict.fromkeys(("d_kv", "attention_head_dim", "swa_head_dim", "swa_v_head_dim", "index_head_dim"), _HEAD),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 128),
    # mixtures
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "zero_expert_num"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    "shared_intermediate_size": 48,
    # state spaces, recurrences, linear attention
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_conv", "time_step_rank", "mamba_dt_rank", "linear_num_value_heads", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("mamba_expand", "linear_num_key_heads", "attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    # windows, indexers, and other sizes
    **dict.fromkeys(("sliding_window", "attention_window", "attention_window_size", "index_topk", "rotary_dim"), 8),
    **dict.fromkeys(("index_n_heads", "type_vocab_size", "altup_num_inputs"), 2),
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 16,
    "query_pre_attn_scalar": 16,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "bos_token"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "decoder_start_token_id"), 2),
    "use_cache": False,
    "is_decoder": True,
}
"""Values for the configuration fields of these names."""

_ONE_SIZE = {"qk_rope_head_dim": 8, "v_head_dim": _HEAD + 8}  # else a CPU's attention makes a matrix of tokens × tokens
_LATENT = {**_ONE_SIZE, "head_dim": None, "num_key_value_heads": HEADS}
_NARROW = {**_ONE_SIZE, "head_dim": 8, "num_key_value_heads": HEADS}
_WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")},
}
_BLT = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": _HEAD}
_BLT_PART = {**_BLT, "hidden_size_global": HIDDEN, "num_hidden_layers": 2, "intermediate_size": _WIDTH, "cross_attn_k": 2}
_NO_TOWERS = {"vision_config": None, "audio_config": None}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("mistral4", "sarvam_mla"), _LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "youtu"), _NARROW),
    "blt": {
        "patch_size": 4,
        "patching_mode": "space",
        "patch_in_forward": False,
        "num_hidden_layers": LAYERS,
        "encoder_config": _BLT_PART,
        "decoder_config": _BLT_PART,
        "global_config": {**_BLT, "num_hidden_layers": LAYERS, "intermediate_size": _WIDTH},
        "patcher_config": {**_BLT, "num_hidden_layers": 2, "intermediate_size": _WIDTH},
        "encoder_hash_byte_group_vocab": 100,
        "encoder_hash_byte_group_size": [2, 3],
    },
    "cohere_compass_text": _WINDOWS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": _WIDTH, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "initializer_range": 1.0},  # its scales are divided by it
    "falcon_h1": {"mamba_d_ssm": 2 * HIDDEN},
    **dict.fromkeys(("gemma4", "gemma4_unified"), _NO_TOWERS),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "ple_layer_ids": [2],
        "ple_embed_dim": HIDDEN,
    },
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "use_mem_rope": False},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of some model types, which override SIZES; None: the type's own default."""


class TooLarge(Exception):
    """`SIZES` cannot make a part of the model small."""


def build(name: str, **own: Any) -> nn.Module:
    """Return the model of a type, in PyTorch's default dtype.

    Args:
        own: values of configuration fields, which override all others.

    Raises:
        TooLarge: it has more than LARGEST parameters.
        Exception: Transformers raises others if the model needs other sizes.
    """
    config = _config(CONFIG_MAPPING[name], {**OWN.get(name, {}), **own})
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > LARGEST:
        raise TooLarge(f"{name} has {parameters / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():  # parameters that are all 0 or all 1 hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif not parameter.any() or not parameter.isfinite().all():
                parameter.normal_(0, 0.05)
    return model


def _config(cls: type[PretrainedConfig], own: Mapping[str, Any]) -> PretrainedConfig:
    known = _fields(cls) - set(cls.attribute_map)
    sizes = {key: value for key, value in SIZES.items() if key in known} | dict(own)
    if hasattr(cls.sub_configs.get("text_config"), "attribute_map"):  # else any model's
        sizes["text_config"] = _config(cls.sub_configs["text_config"], {}).to_dict()
    default = {key for key, value in own.items() if value is None and not key.endswith("_config")}
    return cls(**{key: value for key, value in sizes.items() if key not in default})


def _fields(cls: type) -> set[str]:
    fields: set[str] = set()
    for base in cls.__mro__:
        fields |= set(getattr(base, "__annotations__", {}))
        if "__init__" in vars(base):
            fields |= set(inspect.signature(base.__init__).parameters)
    return fields
