"""A model's shape, read from a Hugging Face config JSON: dense, grouped-query, mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import read_json

# Families whose MLP is up, activation, down; all others have a gate beside up.
_UNGATED = {"gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "falcon", "phi", "codegen", "starcoder2", "gpt_bigcode", "mpt"}
_LARGEST, _MOST_LAYERS = 1 << 24, 4096


@dataclass(frozen=True)
class Model:
    """Sizes in elements, counts."""

    name: str
    layers: int
    hidden: int
    ffn: int
    """Width of the MLP; of one expert in a mixture."""
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    gated: bool
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    """Width of the shared expert, which every token visits."""
    notes: tuple[str, ...] = ()
    """What of the config is not modelled."""

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def active_ffn(self) -> int:
        """Width of all the MLPs that one token visits."""
        return self.ffn * (self.experts_per_token or 1) + self.shared_ffn

    @property
    def attention_parameters(self) -> int:
        return self.hidden * (2 * self.attention_width + 2 * self.kv_width)

    @property
    def layer_parameters(self) -> int:
        """All of a layer's matrices."""
        matrices = 3 if self.gated else 2
        width = self.ffn * (self.experts or 1) + self.shared_ffn
        return self.attention_parameters + matrices * self.hidden * width + self.hidden * self.experts

    @property
    def active_layer_parameters(self) -> int:
        """Those that multiply each token."""
        matrices = 3 if self.gated else 2
        return self.attention_parameters + matrices * self.hidden * self.active_ffn + self.hidden * self.experts

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """P of ds_memo.estimate.flops: what multiplies every token."""
        return self.layers * self.active_layer_parameters + self.vocab * self.hidden


def load(path: str) -> Model:
    """A model from its config file, or from a folder with a config.json.

    Raises:
        EstimateError: no such file, or a size that is missing or makes no sense.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise EstimateError(
            f"model {path!r}: no such file; expected a Hugging Face config JSON, e.g. ds_configs/models/gpt-7b.json"
        )
    data = read_json(file, "model")
    inner = data.get("text_config")
    return from_config(inner if isinstance(inner, dict) else data, file.stem)


def from_config(config: dict[str, Any], name: str) -> Model:
    """See `load`."""

    def size(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise EstimateError(f"model {name}: {key} is {value!r}, expected a whole number above 0")
            if value > _LARGEST:
                raise EstimateError(f"model {name}: {key} is {value}, expected at most {_LARGEST}")
            return value
        if default is None:
            raise EstimateError(
                f"model {name}: no {' or '.join(keys)} in its config; expected a Hugging Face config of a decoder"
            )
        return default

    kind = config.get("model_type", "")
    if config.get("kv_lora_rank"):
        raise EstimateError(f"model {name}: multi-head latent attention (kv_lora_rank) is not modelled")
    layers = size("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers > _MOST_LAYERS:
        raise EstimateError(f"model {name}: {layers} layers, expected at most {_MOST_LAYERS}")
    hidden = size("hidden_size", "n_embd", "d_model", "n_embed")
    heads = size("num_attention_heads", "n_head", "n_heads")
    kv_heads = 1 if config.get("multi_query") is True else size("num_key_value_heads", "num_kv_heads", default=heads)
    if not config.get("head_dim") and hidden % heads:
        raise EstimateError(f"model {name}: hidden size {hidden} is not a multiple of its {heads} attention heads")
    if heads % kv_heads:
        raise EstimateError(f"model {name}: {heads} attention heads are not a multiple of its {kv_heads} key/value heads")
    experts = size("num_local_experts", "num_experts", "n_routed_experts", default=0) if _has_experts(config) else 0
    ffn_keys = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    ffn = size(*(("moe_intermediate_size",) if experts else ()), *ffn_keys, default=4 * hidden)
    per_token = size("num_experts_per_tok", "num_experts_per_token", "top_k") if experts else 0
    if per_token > experts:
        raise EstimateError(f"model {name}: {per_token} experts per token, but only {experts} experts")
    shared = size("shared_expert_intermediate_size", default=0) if config.get("shared_expert_intermediate_size") else 0
    if experts and config.get("n_shared_experts"):
        shared = ffn * size("n_shared_experts")
    notes = []
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append("sliding-window attention is counted as full causal attention")
    if experts and (config.get("first_k_dense_replace") or config.get("mlp_only_layers")):
        notes.append("the dense layers among the expert layers are counted as expert layers")
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size("head_dim", default=hidden // heads),
        vocab=size("vocab_size", "n_vocab"),
        gated=kind not in _UNGATED,
        tied=config.get("tie_word_embeddings", kind in ("gpt2", "opt", "gemma", "gemma2", "gemma3")) is True,
        experts=experts,
        experts_per_token=per_token,
        shared_ffn=shared,
        notes=tuple(notes),
    )


def _has_experts(config: dict[str, Any]) -> bool:
    return any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
