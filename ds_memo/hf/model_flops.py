"""Model FLOPs of one training step of a Hugging Face causal LM.

The counts are the paper's (MEMO, SIGMOD 2025): forward and backward of the model, with causal attention at half its
square; recomputation never counts. Symbols: s tokens in a sequence, n layers, h attention width (heads × head
size; the hidden size in most models), V vocabulary, P parameters that multiply every token.

Hybrids: n counts the layers that attend. A scan adds the products of its recurrence, with a state of k × v in each head: Mamba
writes to it and reads it (4·k·v of a token), the delta rule also takes out what it finds (6·k·v). A convolution's weights are
among P.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

_WITHOUT_ATTENTION = frozenset({"linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"})
"""Transformers' names of such layers, earlier ones among them."""


def sequence_flops(seq_length: int, parameters: int, layers: int, attention_width: int) -> float:
    """Return the FLOPs to train on one sequence: 6·s·P for the matrices, 6·n·h·s² for causal attention.

    Args:
        seq_length: s, in tokens.
        parameters: P. Leave out an embedding table that is only looked up, and experts that a token does not visit.
        layers: n.
        attention_width: h, in elements: heads × head size.
    """
    return 6.0 * seq_length * parameters + 6.0 * layers * attention_width * seq_length**2


def model_flops(model: nn.Module, seq_length: int) -> float | None:
    """Return the FLOPs to train on one sequence of `seq_length` tokens; None where the formula does not hold.

    It does not hold for a model without a Hugging Face configuration and head, nor for a mixture of experts.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or not hasattr(model, "get_output_embeddings"):
        return None
    config = config.get_text_config()
    parameters = matmul_parameters(model)
    if parameters is None or not hasattr(config, "num_attention_heads"):
        return None
    return sequence_flops(seq_length, parameters, attending_layers(config), attention_width(config)) + 3.0 * seq_length * sum(
        map(_scan_flops, model.modules())
    )


def attending_layers(config: Any) -> int:
    """Return the number of layers with attention."""
    kinds = getattr(config, "layer_types", None)
    return config.num_hidden_layers if kinds is None else sum(kind not in _WITHOUT_ATTENTION for kind in kinds)


def _scan_flops(module: nn.Module) -> int:
    """Return the FLOPs of a token in a module's own scan, by the sizes that Transformers' mixers have."""

    def product(*names: str) -> int:
        sizes = [getattr(module, name, 0) for name in names]
        return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0

    return 4 * product("intermediate_size", "ssm_state_size") + 6 * product("num_v_heads", "head_k_dim", "head_v_dim")


def attention_width(config: Any) -> int:
    """Return heads × head size, in elements: h of the FLOP formula."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head


def matmul_parameters(model: nn.Module) -> int | None:
    """Return P of the FLOP formula, the parameters that multiply every token; None for a mixture of experts.

    An input embedding counts only if it is also the head.
    """
    config = model.config.get_text_config()
    if any(getattr(config, field, None) for field in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embeddings is None or head is None:
        return None

    def count(module: nn.Module) -> int:
        return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())  # ds_numel: partitioned by ZeRO-3

    return count(model) - (0 if embeddings.weight is head.weight else count(embeddings))
