"""A model by its Hugging Face config JSON, with its real layers on the meta device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from ds_memo.errors import MemoError, brief, quoted
from ds_memo.estimate.adapters import Adapters, add_adapters
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import model_file, read_json
from ds_memo.estimate.layers import Layers
from ds_memo.estimate.meta_kernels import ATTENTION, NAME
from ds_memo.hf.find_layers import find_layers
from ds_memo.hf.meta_model import build_without_memory, knows, unknown_keys

_LARGEST = 1 << 24


@dataclass(frozen=True)
class Model:
    """A model's sizes, and its layers."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    parameters: int
    layer_parameters: int
    """Parameters of the largest layer."""
    measured: Layers = field(repr=False, compare=False)
    """The layers on the meta device."""
    trades_heads: bool = True
    """False if DeepSpeed's Ulysses cannot trade its heads: keys and values are not of one size."""
    key_value_size: int = 0
    """Elements of a head's key and value."""
    notes: tuple[str, ...] = ()
    adapters: Adapters | None = None
    """None: all parameters are trained."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients and optimizer states."""
        return self.parameters if self.adapters is None else self.adapters.parameters

    @property
    def layer_trained(self) -> int:
        """Those of the layer with the most."""
        return self.layer_parameters if self.adapters is None else self.adapters.layer_parameters

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights that layers and head compute with."""
        return 2.0 * self.trained + (0.0 if self.adapters is None else self.adapters.frozen_bytes)

    @property
    def head_trained(self) -> int:
        """Trained parameters of the head."""
        return self.vocab * self.hidden if self.adapters is None else 0

    def sequence_flops(self, seq_length: int) -> float:
        """Return the FLOPs to train on one sequence, forward and backward, with the causal half of attention alone.

        Weights that are frozen have no gradients.
        """
        forward, frozen = self.measured.forward_flops(seq_length), 0.0
        if self.adapters is not None:
            frozen = forward.products - 2.0 * seq_length * self.adapters.parameters
        head = 2.0 * seq_length * (2 * self.vocab * self.hidden + self.head_trained)
        return 3 * forward.all - frozen + head


def load(path: str, fused: bool = False, rank: int | None = None, quantized: bool = False) -> Model:
    """Load a config JSON, the one in a folder, or that of a model in the Hugging Face cache. Nothing is downloaded.

    Args:
        fused: norms, rotary embedding, and activations with their product are one kernel each, as Liger's.
        rank: of adapters on all products in layers, which alone are trained; None: all parameters are trained.
        quantized: True if the frozen weights of those products have 4 bits.

    Raises:
        EstimateError: there is no such file, or Transformers cannot build a decoder of it.
    """
    file = model_file(path)
    name = file.stem if Path(path) == file else Path(path).resolve().name
    return _loaded(file.resolve(), file.stat().st_mtime_ns, quoted(name), fused, rank, quantized)


@lru_cache(maxsize=16)
def _loaded(file: Path, changed: int, name: str, fused: bool, rank: int | None, quantized: bool) -> Model:
    return from_config(read_json(file, "model"), name, fused, rank, quantized)


def from_config(data: dict[str, Any], name: str, fused: bool = False, rank: int | None = None, quantized: bool = False) -> Model:
    """See `load`."""
    notes = []
    if any(isinstance(data.get(part), dict) for part in ("text_config", "vision_config")):
        notes.append("only the language model is counted, not what reads images or sound")
    kind = data.get("model_type")
    if not knows(kind):
        if kind is not None and not isinstance(kind, str):
            raise EstimateError(f"model {name}: model_type is {brief(kind)}, expected a name")
        what = "no model_type" if kind is None else f"model_type {brief(kind)} is not known to the installed Transformers"
        notes.append(f"{what}: counted as a Llama")
        inner = data.get("text_config")
        data = (inner if isinstance(inner, dict) else data) | {"model_type": "llama"}
    try:
        built = build_without_memory(data, name, NAME, ATTENTION)
        if unknown := unknown_keys(data):
            words = [key + (f" (did you mean {known}?)" if known else "") for key, known in unknown.items()]
            notes.append(f"Transformers does not know these keys of the config, and leaves them out: {', '.join(words)}")
        return _model(built, data, name, notes, fused, rank, quantized)
    except MemoError as error:
        raise EstimateError(str(error)) from None


def _model(
    built: nn.Module, data: dict[str, Any], name: str, notes: list[str], fused: bool, rank: int | None, quantized: bool
) -> Model:
    config = built.config
    heads: Any = getattr(config, "num_attention_heads", None)
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_attention_heads": heads}
    for key, value in sizes.items():
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise EstimateError(f"model {name}: {key} is {brief(value)}, expected a whole number from 1 to {_LARGEST}")
    parameters = sum(parameter.numel() for parameter in built.parameters())
    layer_parameters = max(sum(p.numel() for p in layer.parameters()) for _, layer in find_layers(built))
    adapters = None if rank is None else add_adapters(built, rank, quantized)
    measured = Layers(built, fused)
    if built.get_output_embeddings() is None and not getattr(config, "tie_word_embeddings", data.get("tie_word_embeddings")):
        head = config.vocab_size * config.hidden_size  # that Transformers builds around the whole
        parameters += head
        adapters = adapters and adapters._replace(frozen_bytes=adapters.frozen_bytes + 2.0 * head)
    value_size, key_size = (getattr(config, key, None) for key in ("v_head_dim", "qk_head_dim"))
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Model(
        name=name,
        layers=len(measured.found),
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_size=head_size,
        vocab=config.vocab_size,
        parameters=parameters,
        layer_parameters=layer_parameters,
        measured=measured,
        trades_heads=value_size == key_size,
        key_value_size=value_size + key_size if value_size and key_size else 2 * head_size,
        notes=tuple(notes),
        adapters=adapters,
    )


def _kv_heads(config: Any, heads: int) -> int:
    """Return the number of key-value heads by the names that configs have for it."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    inner = getattr(config, "attn_config", None)
    for source, key in ((config, "num_key_value_heads"), (config, "num_kv_heads"), (inner, "kv_n_heads")):
        if found := getattr(source, key, None):
            return int(found)
    return heads
