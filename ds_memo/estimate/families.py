"""Facts that a family's config leaves out: the defaults of Transformers' config classes, and properties without a key.

A published config.json omits keys with default values, and a nested text_config often lists only the differences.
tests/estimate/test_families.py checks these tables against Transformers.
"""

from __future__ import annotations

from typing import Any

# fmt: off
DEFAULTS: dict[str, dict[str, Any]] = {
    "apertus": {"num_attention_heads": 32, "intermediate_size": 14336, "vocab_size": 131072, "hidden_act": "xielu"},
    "arcee": {"num_attention_heads": 32, "intermediate_size": 18432, "vocab_size": 32000, "hidden_act": "relu2"},
    "biogpt": {"num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 42384, "tie_word_embeddings": True},
    "bitnet": {"num_attention_heads": 20, "num_key_value_heads": 5, "intermediate_size": 6912, "vocab_size": 128256,
        "hidden_act": "relu2"},
    "bloom": {"n_head": 8, "vocab_size": 250880, "tie_word_embeddings": True},
    "codegen": {"n_head": 16, "vocab_size": 50400, "activation_function": "gelu_new"},
    "cohere": {"num_attention_heads": 64, "intermediate_size": 22528, "vocab_size": 256000, "tie_word_embeddings": True},
    "cohere2": {"num_attention_heads": 64, "intermediate_size": 22528, "vocab_size": 256000, "sliding_window": 4096,
        "tie_word_embeddings": True},
    "cwm": {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504,
        "vocab_size": 128256, "sliding_window": 8192},
    "dbrx": {"n_heads": 16, "vocab_size": 32000},
    "dots1": {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 10944, "vocab_size": 152064,
        "moe_intermediate_size": 1408, "sliding_window": 4096},
    "ernie4_5": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 103424, "tie_word_embeddings": True},
    "ernie4_5_moe": {"num_attention_heads": 20, "num_key_value_heads": 4, "intermediate_size": 12288, "vocab_size": 103424,
        "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "tie_word_embeddings": True},
    "exaone4": {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 16384, "vocab_size": 102400,
        "sliding_window": 4096},
    "falcon": {"num_attention_heads": 71, "vocab_size": 65024, "multi_query": True, "tie_word_embeddings": True},
    "flex_olmo": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 100352, "num_experts": 7,
        "num_experts_per_tok": 5},
    "gemma": {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24576,
        "vocab_size": 256000, "tie_word_embeddings": True},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "vocab_size": 256000, "sliding_window": 4096, "tie_word_embeddings": True},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "vocab_size": 262208, "sliding_window": 4096, "tie_word_embeddings": True},
    "glm": {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 13696,
        "vocab_size": 151552},
    "glm4": {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 13696,
        "vocab_size": 151552},
    "glm4_moe": {"num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 10944, "vocab_size": 151552,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1},
    "gpt2": {"n_head": 12, "vocab_size": 50257, "tie_word_embeddings": True, "activation_function": "gelu_new"},
    "gpt_bigcode": {"n_head": 12, "vocab_size": 50257, "multi_query": True, "tie_word_embeddings": True},
    "gpt_neo": {"num_heads": 16, "vocab_size": 50257, "tie_word_embeddings": True, "activation_function": "gelu_new"},
    "gpt_neox": {"num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432},
    "gpt_neox_japanese": {"num_attention_heads": 32, "intermediate_multiple_size": 4, "vocab_size": 32000,
        "tie_word_embeddings": True},
    "gpt_oss": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "vocab_size": 201088, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128},
    "gptj": {"n_head": 16, "vocab_size": 50400, "activation_function": "gelu_new"},
    "granite": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
    "granitemoe": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2},
    "granitemoeshared": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2},
    "helium": {"num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "intermediate_size": 7040,
        "vocab_size": 48000},
    "hunyuan_v1_dense": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 290943},
    "hunyuan_v1_moe": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 290943, "num_experts": 1,
        "moe_topk": 1},
    "jais2": {"num_attention_heads": 26, "intermediate_size": 26624, "vocab_size": 150272, "hidden_act": "relu2"},
    "llama": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
    "minimax_m2": {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536,
        "vocab_size": 200064, "num_local_experts": 256, "num_experts_per_tok": 8},
    "ministral": {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
        "sliding_window": 4096},
    "ministral3": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 131072},
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
        "sliding_window": 4096},
    "mixtral": {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2},
    "mpt": {"n_heads": 16, "expansion_ratio": 4, "vocab_size": 50368, "tie_word_embeddings": True},
    "nemotron": {"num_attention_heads": 48, "intermediate_size": 24576, "vocab_size": 256000, "hidden_act": "relu2"},
    "olmo": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 50304},
    "olmo2": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 50304},
    "olmo3": {"num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 50304, "sliding_window": 4096},
    "olmoe": {"num_attention_heads": 16, "intermediate_size": 2048, "vocab_size": 50304, "num_experts": 64,
        "num_experts_per_tok": 8},
    "opt": {"num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272, "tie_word_embeddings": True},
    "persimmon": {"num_attention_heads": 64, "intermediate_size": 16384, "vocab_size": 262144, "qk_layernorm": True,
        "hidden_act": "relu2"},
    "phi": {"num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 51200, "hidden_act": "gelu_new"},
    "phi3": {"num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 32064},
    "phimoe": {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 6400, "vocab_size": 32064,
        "num_local_experts": 16, "num_experts_per_tok": 2},
    "qwen2": {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936,
        "sliding_window": 4096},
    "qwen2_moe": {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151936,
        "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096},
    "qwen2_vl_text": {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
        "sliding_window": 4096},
    "qwen2_5_vl_text": {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
        "sliding_window": 4096},
    "qwen3": {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22016,
        "vocab_size": 151936, "sliding_window": 4096},
    "qwen3_moe": {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "sliding_window": 4096, "num_experts": 128},
    "qwen3_vl_text": {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22016,
        "vocab_size": 151936},
    "qwen3_vl_moe_text": {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151936,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "tie_word_embeddings": True, "num_experts": 60},
    "seed_oss": {"num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 27648,
        "vocab_size": 155136},
    "smollm3": {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 11008, "vocab_size": 128256,
        "tie_word_embeddings": True},
    "stablelm": {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 6912, "vocab_size": 50304},
    "starcoder2": {"num_attention_heads": 24, "num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152,
        "tie_word_embeddings": True},
    "vaultgemma": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        "vocab_size": 256000, "sliding_window": 4096, "tie_word_embeddings": True},
    "xglm": {"attention_heads": 16, "ffn_dim": 4096, "vocab_size": 256008, "tie_word_embeddings": True},
}
"""Known families by model_type. Values that are None, False or 0, and a step of 1, are left out."""
# fmt: on

UNGATED = {
    *("apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gpt_neox_japanese", "gptj", "jais2", "mpt", "nemotron", "opt", "persimmon", "phi", "starcoder2", "xglm"),
}
"""Families whose MLP is up, activation, down; all others have a gate too."""

FUSED_QKV = {
    *("bloom", "codegen", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "mpt", "persimmon", "phi3"),
}
"""Families with one GEMM for queries, keys and values: a view of its output keeps all of it."""

FUSED_GATE = {"glm", "glm4", "phi3"}
"""Families with one GEMM for the MLP's gate and up projection."""

SHARED_FIRST = {"ernie4_5_moe", "hunyuan_v1_moe"}
"""Mixtures whose shared expert comes before the others."""

SHARED_GATE = {"qwen2_moe"}
"""Mixtures whose shared expert has a weight for each token."""

FLOAT_ROUTER = {"glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe"}
"""Mixtures whose router is in float32."""

FLOAT_ROUTES = {"glm4_moe", "dots1", "hunyuan_v1_moe", "mixtral", "minimax_m2"}
"""Mixtures whose routing weights, and so their weighted expert outputs, are in float32."""

NO_ROTARY = {"biogpt", "bloom", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt", "xglm"}
"""Families with learned positions, or positions as a bias of attention."""

LAYER_NORM = {
    *("biogpt", "bloom", "codegen", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj"),
    *("jais2", "mpt", "nemotron", "opt", "persimmon", "phi", "phimoe", "stablelm", "starcoder2", "xglm"),
}
"""Families with LayerNorm; all others have RMSNorm (the LayerNorms of Cohere and OLMo are in float32 too)."""

FLOAT_WEIGHTS = {"gemma", "gemma2", "gemma3_text", "vaultgemma", "olmo2", "olmo3", "flex_olmo"}
"""Families whose RMSNorm multiplies by its weight in float32; the others round first."""

NO_PRE_NORMS = {"olmo2", "olmo3", "exaone4", "flex_olmo"}
"""Families whose attention and MLP have a norm only behind them."""

POST_NORMS = {*NO_PRE_NORMS, "gemma2", "gemma3_text", "glm4"}
"""Families whose attention and MLP have a norm behind them, before the residual."""

QK_NORM = {
    *("apertus", "exaone4", "flex_olmo", "gemma3_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmo2", "olmo3", "olmoe"),
    *("dots1", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "minimax_m2"),
}
"""Families whose queries and keys are always normalised; others say so by use_qk_norm or qk_layernorm."""

ACTIVATION_SAVES = {"gelu_new": 3, "quick_gelu": 1, "relu2": 1, "xielu": 4}
"""Activations of several kernels: the number of MLP-wide tensors that they save, without their input."""

NOTES = {
    "gpt_oss": "attention is counted as one kernel; where there is none for its sinks, a layer takes several times as much",
}
"""Notes on families whose estimate has a known gap."""

_NOT_ATTENTION = "it has layers that are not attention (state space, linear attention, convolution or recurrence)"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "jamba", "zamba", "zamba2", "bamba", "falcon_h1", "zaya"),
            *(
                "recurrent_gemma",
                "lfm2",
                "lfm2_moe",
                "qwen3_next",
                "qwen3_5_text",
                "qwen3_5_moe_text",
                "qwen4_exp_text",
                "minimax",
            ),
            *("granitemoehybrid", "nemotron_h", "olmo_hybrid", "kimi_linear"),
        ),
        _NOT_ATTENTION,
    ),
    **dict.fromkeys(
        ("albert", "bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
        "it is an encoder",
    ),
    "jetmoe": "its attention is a mixture of experts",
    "llama4_text": "its experts are computed for every token",
    "gemma3n_text": "its layers have inputs beside the hidden states",
    "gemma4_text": "its layers have inputs beside the hidden states",
    "mllama_text_model": "it has layers of cross-attention",
}
"""Reasons by model_type."""
