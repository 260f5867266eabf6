"""Configs of small and known models."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ds_memo.estimate.model import Model, from_config
from tests.processes import ROOT

GPT_7B = ROOT / "ds_configs" / "models" / "gpt-7b.json"
LLAMA_8B = ROOT / "ds_configs" / "models" / "llama3-8b.json"

# fmt: off
_BASE = {
    "hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "vocab_size": 96, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 8}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama"},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 32},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 96, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": {**_BASE, "model_type": "gpt_neox", "rotary_pct": 1.0, "use_parallel_residual": False},
    "phi3": {**_BASE, "model_type": "phi3"},
    "mixtral": {**_BASE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**_BASE, **_EXPERTS, "model_type": "qwen3_moe", "num_attention_heads": 8, "head_dim": 16},
    "gemma": {**_BASE, "model_type": "gemma", "head_dim": 16},
    "gemma3": {**_BASE, "model_type": "gemma3_text", "head_dim": 16},
    "olmo2": {**_BASE, "model_type": "olmo2"},
    "deepseek_v3": {
        **_BASE, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        **_BASE, **_EXPERTS, "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16,
        "shared_expert_intermediate_size": 24, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "gpt_oss": {
        **_BASE, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "vision_config": {"depth": 1},
        "text_config": {**_BASE, "model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    },
}
# fmt: on


@lru_cache
def small(name: str) -> Model:
    return from_config(SMALL[name], name)
