"""Hugging Face causal LMs from a config JSON (random weights) or a local checkpoint directory."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KEEP_DOCUMENTS_APART = {"full_attention", "sliding_attention"}
"""Types of layers that position_ids keep inside documents. Chunks, convolutions and recurrent states go on across borders."""


class ModelError(ValueError):
    """A model that cannot be used; says in one line what to change."""


def load_config(path: Path) -> PreTrainedConfig:
    """Return the model's configuration, from a JSON file or a checkpoint directory.

    Raises:
        ModelError: Where nothing is there, it is no model configuration, or the model is not a causal LM.
    """
    if not path.exists():
        raise ModelError(f"no model configuration at {path}; check --model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ModelError(
            f"{path} is not a model configuration, expected one of Hugging Face: {str(error).splitlines()[0]}"
        ) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{path} is not a causal language model, as expected (model_type {config.model_type!r})")
    return config


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the model's longest sequence, in tokens; None if its configuration sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def build(path: Path, config: PreTrainedConfig, ds_config: dict, dtype: torch.dtype, attention: str) -> nn.Module:
    """Build the model in `dtype`: weights from the directory `path`, else random ones from torch's seed.

    Under ZeRO-3 every parameter is partitioned as it is made (deepspeed.zero.Init), so no rank ever holds them all.

    Raises:
        ModelError: Where the attention implementation does not exist or the weights do not fit.
    """
    zero3 = HfDeepSpeedConfig(ds_config)  # noqa: F841  transformers finds it through a weak reference: keep it until the end
    try:
        if path.is_dir():
            return AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot build {path}, correct its configuration: {str(error).splitlines()[0]}") from error


def check_packing(model: nn.Module, ranks: int) -> None:
    """Refuse a model that is not known to keep packed documents apart by their position_ids.

    Where `ranks` share a sequence, convolutions and scans go by ds_memo's borders of documents. It refuses other models itself.

    Raises:
        ModelError: With the reason.
    """
    if ranks > 1:
        return
    config = model.config.get_text_config()
    types = {*(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())}
    reason = ", ".join(sorted(types - KEEP_DOCUMENTS_APART))
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        reason = "no position_ids"
    if reason:
        raise ModelError(
            f"--pack: {type(model).__name__} is not known to keep documents apart ({reason}). "
            'Leave --pack out, or set "sequence_parallel_size" to 2 or more'
        )
