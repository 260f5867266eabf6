"""Read a model's shape from a Hugging Face config JSON: dense, grouped-query, mixture of experts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_memo.errors import brief, quoted
from ds_memo.estimate import families
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import read_json

_LARGEST, _MOST_LAYERS = 1 << 24, 4096
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k")
_ACTIVATION = ("hidden_act", "activation_function", "hidden_activation", "activation")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_STATE_SPACE = ("mamba_", "ssm_", "linear_num_", "lru_width", "attn_layer_period", "attn_layer_indices", "full_attn_idxs")
_SLIDES_IF_ASKED = {"qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "smollm3"}


@dataclass(frozen=True)
class Model:
    """A model's shape. Widths are in elements."""

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
    fused_qkv: bool = False
    """Queries, keys and values are one GEMM's output."""
    fused_gate: bool = False
    """The MLP's gate and up projection are one GEMM's output."""
    rotary: bool = True
    """Queries and keys are turned by their position."""
    rms: bool = True
    """Norms are RMSNorm, in float32; else LayerNorm, one kernel."""
    float_weights: bool = False
    """An RMSNorm multiplies by its weight in float32, too."""
    pre_norms: bool = True
    """Attention and MLP begin with a norm."""
    post_norms: bool = False
    """Attention and MLP end with a norm."""
    activation_saves: int = 0
    """MLP-wide tensors that the activation saves, without its input: 0 where it is one kernel."""
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""
    shared_ffn: int = 0
    """Width of the shared expert, which every token visits."""
    shared_first: bool = False
    """The shared expert comes before the others."""
    shared_gate: bool = False
    """The shared expert's output is weighted."""
    float_router: bool = False
    """The router's GEMM is in float32."""
    float_routes: bool = False
    """Experts' outputs are weighted and summed in float32."""
    dense_layers: tuple[int, ...] = ()
    """Indices of a mixture's layers that have one MLP in place of experts."""
    dense_ffn: int = 0
    """Width of that MLP."""
    fused: bool = False
    """Norms, rotary embedding and the activation with its product are one kernel each, as Liger's; else Transformers' code."""
    fused_norms: bool = False
    """Norms alone are one kernel each, as torch.nn.functional.rms_norm."""
    notes: tuple[str, ...] = ()
    """Parts of the config that are not modelled."""

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def active_ffn(self) -> int:
        """Total width of the MLPs that one token visits."""
        return self.ffn * (self.experts_per_token or 1) + self.shared_ffn

    @property
    def attention_parameters(self) -> int:
        return self.hidden * (2 * self.attention_width + 2 * self.kv_width)

    @property
    def layer_parameters(self) -> int:
        """Parameters of all matrices of a layer."""
        matrices = 3 if self.gated else 2
        width = self.ffn * (self.experts or 1) + self.shared_ffn
        return self.attention_parameters + matrices * self.hidden * width + self.hidden * self.experts

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of a layer that multiply each token."""
        matrices = 3 if self.gated else 2
        return self.attention_parameters + matrices * self.hidden * self.active_ffn + self.hidden * self.experts

    @property
    def dense(self) -> Model:
        """The model of this one's dense layers alone."""
        return replace(
            self,
            layers=len(self.dense_layers),
            ffn=self.dense_ffn,
            experts=0,
            experts_per_token=0,
            shared_ffn=0,
            shared_gate=False,
            dense_layers=(),
            dense_ffn=0,
        )

    @property
    def parameters(self) -> int:
        return self._all_layers("layer_parameters") + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """P of ds_memo.estimate.flops: the parameters that multiply every token."""
        return self._all_layers("active_layer_parameters") + self.vocab * self.hidden

    def _all_layers(self, what: str) -> int:
        dense = len(self.dense_layers)
        others = (self.layers - dense) * getattr(self, what)
        return others + (dense * getattr(self.dense, what) if dense else 0)


def load(path: str) -> Model:
    """Load a model from its config file, or from a folder with a config.json.

    Raises:
        EstimateError: there is no such file, it is no plain decoder, or a size is missing or out of range.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
        if not file.is_file():
            raise EstimateError(f"model {brief(path)}: there is no config.json in that folder")
    if not file.is_file():
        raise EstimateError(
            f"model {brief(path)}: no such file or folder; expected a Hugging Face config JSON, e.g. "
            "ds_configs/models/gpt-7b.json, or a folder with one (nothing is downloaded)"
        )
    return from_config(read_json(file, "model"), quoted(file.stem))


def from_config(config: dict[str, Any], name: str) -> Model:
    """See `load`."""
    inner, notes = _text_part(config)
    return _Reader(inner, name, notes).model()


def _text_part(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the language model's part of a config, with the outer tie_word_embeddings, and notes on the parts left out."""
    if isinstance(inner := config.get("text_config"), dict):
        outer = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
        return inner | outer, ["only the language model (text_config) is counted, not what reads images or sound"]
    if isinstance(config.get("vision_config"), dict):
        return config, ["only the language model is counted, not what reads images (vision_config)"]
    return config, []


class _Reader:
    """Read one config; missing values come from its family's config class."""

    def __init__(self, config: dict[str, Any], name: str, notes: list[str]) -> None:
        kind = "" if config.get("model_type") is None else config["model_type"]
        self.config, self.name, self.notes = config, name, notes
        if not isinstance(kind, str):
            raise EstimateError(f"model {name}: model_type is {brief(kind)}, expected a name")
        self.kind = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}.get(kind, kind)  # published configs are flat
        self.defaults = families.DEFAULTS.get(self.kind, {})

    # ---- values

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that exists; null means no value, and hides the family's default."""
        for source in (self.config, self.defaults):
            for key in keys:
                if key in source:
                    return source[key]
        return None

    def size(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys)
        key = next((key for key in keys if key in self.config), keys[0])
        if value is None:
            if default is None:
                raise EstimateError(
                    f"model {self.name}: no {' or '.join(keys)} in its config; expected a Hugging Face config of a decoder"
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise EstimateError(f"model {self.name}: {key} is {brief(value)}, expected a whole number above 0")
        if value > _LARGEST:
            raise EstimateError(f"model {self.name}: {key} is {brief(value)}, expected at most {_LARGEST}")
        return value

    def may_be_zero(self, *keys: str) -> int:
        return self.size(*keys, default=0) if self.get(*keys) else 0

    def part(self, key: str) -> _Reader:
        """Return a reader of a config inside this one (attn_config of MPT and DBRX)."""
        inner = self.config.get(key)
        return _Reader(inner if isinstance(inner, dict) else {}, self.name, [])

    # ---- the model

    def model(self) -> Model:
        self.refuse()
        name = self.name
        layers = self.size("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if layers > _MOST_LAYERS:
            raise EstimateError(f"model {name}: {layers} layers, expected at most {_MOST_LAYERS}")
        hidden = self.size("hidden_size", "n_embd", "d_model", "n_embed")
        heads = self.size("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
        kv_heads = self.kv_heads(heads)
        if not self.get("head_dim") and hidden % heads:
            raise EstimateError(f"model {name}: hidden size {hidden} is not a multiple of its {heads} attention heads")
        if heads % kv_heads:
            raise EstimateError(f"model {name}: {heads} attention heads are not a multiple of its {kv_heads} key/value heads")
        if self.kind not in families.DEFAULTS:
            what = f"model_type {brief(self.kind)} is not known" if self.kind else "no model_type"
            self.notes.append(f"{what}: counted as a Llama, with a gate in its MLP, and untied embeddings unless it says so")
        if self.kind in families.NOTES:
            self.notes.append(families.NOTES[self.kind])
        if self.slides():
            self.notes.append("sliding-window attention is counted as full causal attention")
        ffn = self.ffn(hidden)
        experts = self.may_be_zero(*_EXPERTS) or self.part("ffn_config").may_be_zero("moe_num_experts")
        return Model(
            name=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_size=self.size("head_dim", default=hidden // heads) if self.get("head_dim") else hidden // heads,
            vocab=self.size("vocab_size", "n_vocab"),
            gated=self.kind not in families.UNGATED,
            fused_qkv=self.kind in families.FUSED_QKV,
            fused_gate=self.kind in families.FUSED_GATE,
            rotary=self.kind not in families.NO_ROTARY and self.get("alibi") is not True,
            rms=self.kind not in families.LAYER_NORM,
            float_weights=self.kind in families.FLOAT_WEIGHTS,
            pre_norms=self.kind not in families.NO_PRE_NORMS,
            post_norms=self.kind in families.POST_NORMS,
            activation_saves=families.ACTIVATION_SAVES.get(str(self.get(*_ACTIVATION)), 0),
            tied=self.get("tie_word_embeddings") is True,
            qk_norm=self.kind in families.QK_NORM or any(self.get(key) is True for key in ("use_qk_norm", "qk_layernorm")),
            **(self.mixture(layers, ffn, experts) if experts else {"ffn": ffn}),
            notes=tuple(self.notes),
        )

    def refuse(self) -> None:
        """Raise EstimateError unless all layers are attention and an MLP, or experts."""
        config, why = self.config, families.REFUSED.get(self.kind)
        if config.get("is_encoder_decoder") is True:
            why = "it is an encoder and a decoder"
        elif config.get("kv_lora_rank"):
            why = "multi-head latent attention (kv_lora_rank) is not modelled"
        else:
            for key in ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern"):
                value = config.get(key) or []
                odd = sorted({str(entry) for entry in value} - _ATTENTION) if isinstance(value, list) else [str(value)]
                if odd:
                    why = why or f"its {key} have {', '.join(odd)[:60]}, which are not modelled"
            if marks := sorted(key for key in config if key.startswith(_STATE_SPACE) and config[key]):
                why = why or f"it has layers that are not attention ({marks[0]})"
        if why:
            raise EstimateError(f"model {self.name}: {quoted(self.kind) or 'this config'} cannot be estimated: {why}")

    def kv_heads(self, heads: int) -> int:
        if self.kind == "falcon":  # the newer architecture groups heads and ignores multi_query
            if self.get("new_decoder_architecture") is True:
                return self.size("num_kv_heads", default=heads)
            return 1 if self.get("multi_query") is True else heads
        if self.get("multi_query") is True:
            return 1
        inner = self.part("attn_config").may_be_zero("kv_n_heads")
        return inner or self.size("num_key_value_heads", "num_kv_heads", default=1 if self.kind == "dbrx" else heads)

    def slides(self) -> bool:
        types = self.get("layer_types")
        if isinstance(types, list):
            return any(entry in ("sliding_attention", "chunked_attention") for entry in types)
        if "attention_types" in self.config:  # GPT-Neo's
            return "local" in json.dumps(self.config["attention_types"])
        uses = self.get("use_sliding_window")
        return bool(self.get("sliding_window")) and (self.kind not in _SLIDES_IF_ASKED if uses is None else uses is True)

    def ffn(self, hidden: int) -> int:
        inner = self.part("ffn_config")
        if inner.get("ffn_hidden_size"):
            return inner.size("ffn_hidden_size")
        times = self.may_be_zero("expansion_ratio", "intermediate_multiple_size") or 4
        return self.size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=times * hidden)

    def mixture(self, layers: int, dense_ffn: int, experts: int) -> dict[str, Any]:
        ffn = self.size("moe_intermediate_size", default=dense_ffn)
        inner = self.part("ffn_config")
        per_token = inner.may_be_zero("moe_top_k") or self.size(*_PER_TOKEN)
        if per_token > experts:
            raise EstimateError(f"model {self.name}: {per_token} experts per token, but only {experts} experts")
        shared = self.may_be_zero("shared_expert_intermediate_size", "shared_intermediate_size")
        if self.kind == "hunyuan_v1_moe":
            shared = ffn
        shared = shared or ffn * self.may_be_zero("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
        dense = self.dense_layers(layers)
        return {
            "ffn": ffn,
            "experts": experts,
            "experts_per_token": per_token,
            "shared_ffn": shared,
            "shared_first": self.kind in families.SHARED_FIRST,
            "shared_gate": shared > 0 and self.kind in families.SHARED_GATE,
            "float_router": self.kind in families.FLOAT_ROUTER,
            "float_routes": self.kind in families.FLOAT_ROUTES,
            "dense_layers": dense,
            "dense_ffn": dense_ffn if dense else 0,
        }

    def dense_layers(self, layers: int) -> tuple[int, ...]:
        """Return the indices of the layers that have one MLP in place of experts."""
        types, only = self.get("mlp_layer_types"), self.get("mlp_only_layers")
        if isinstance(types, list):
            return tuple(index for index, entry in enumerate(types[:layers]) if entry == "dense")
        first = self.may_be_zero("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
        step = self.may_be_zero("decoder_sparse_step", "moe_layer_interval") or 1
        end = self.get("moe_layer_end_index")
        last = end if isinstance(end, int) and end >= 0 else layers - 1
        only = only if isinstance(only, list) else []
        return tuple(i for i in range(layers) if i < first or i > last or (i + 1) % step or i in only)
