"""Build a meta model: a Hugging Face causal LM of which one layer of each kind has memory, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.hf.attention import catch_attention
from ds_memo.hf.find_layers import find_layers
from ds_memo.profile.layer_kinds import kinds_of
from ds_memo.remat.layer import Layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_LAYERS = 4096


def build(path: Path, dtype: torch.dtype, attention: str, device: torch.device) -> nn.Module:
    """Build the model in training mode, with random weights in the first layer of each kind.

    Embeddings, head and all other layers have shapes but no memory (the "meta" device). The model can run
    up to its first layer, from `inputs_embeds`.

    Args:
        path: a config JSON, or a folder with one.
        attention: Transformers' attn_implementation.

    Raises:
        MemoError: a package or file is missing, the config cannot be built, or layers attend to an encoder's states.
    """
    try:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MemoError(f"profiling a model needs transformers and accelerate ({error}): pip install 'ds_memo[hf]'") from None
    if not path.exists():
        raise MemoError(f"model {str(path)!r}: no such file; expected a Hugging Face config JSON or a folder with one")
    with _building(path):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        config.use_cache = False
        _refuse_encoders(path, config)
        with init_empty_weights(include_buffers=False):  # buffers hold values, such as rotary frequencies
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    layers = [module for _, module in find_layers(model)]
    numbers = kinds_of(Layer(index, "", module) for index, module in enumerate(layers))
    never_run = {model.get_input_embeddings(), model.get_output_embeddings(), *layers}
    measured = [layers[numbers.index(kind)] for kind in range(max(numbers) + 1)]
    for part in [*_around(model, never_run), *(part for layer in measured for part in layer.modules())]:
        _fill(part, device)
    return model.train()


def build_without_memory(data: dict[str, Any], name: str, attention: str, function: Callable[..., Any]) -> nn.Module:
    """Build the language model of a config in training mode and bf16, all on the meta device.

    Args:
        data: a Hugging Face config. Of a model that also reads images, only the language model is built, without a head
            if Transformers has none for it alone.
        name: of the model, for messages.
        attention, function: an attention implementation, and its name.

    Raises:
        MemoError: Transformers is missing or cannot build it, or layers attend to an encoder's states.
    """
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        raise MemoError(f"an estimate needs transformers ({error}): pip install 'ds_memo[hf]'") from None
    AttentionInterface.register(attention, function)
    catch_attention()
    with _building(name):
        whole = CONFIG_MAPPING[data["model_type"]].from_dict(data)
        config = whole.get_text_config()
        config.use_cache = False
        _refuse_encoders(name, whole)
        made_by = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
        layers = getattr(config, "num_hidden_layers", None)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise MemoError(f"model {name}: {layers} layers, expected at most {MOST_LAYERS}")
        with torch.device("meta"):
            return made_by.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).train()


@contextmanager
def _building(name: Path | str) -> Iterator[None]:
    """Turn whatever a wrong config raises into a MemoError of one line."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        yield
    except MemoError:
        raise
    except Exception as error:
        why = next(iter(str(error).strip().splitlines()), "no reason given")
        raise MemoError(f"model {name}: cannot be built ({type(error).__name__}: {why}); correct the config") from None


def knows(model_type: object) -> bool:
    """Return True if Transformers has models of this type."""
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def unknown_keys(data: dict[str, Any]) -> dict[str, str | None]:
    """Return a config's keys that Transformers does not know, each with the known key that it resembles, if any.

    Transformers keeps such a key as it is. A known one is a default's, or is turned into another.

    Args:
        data: a Hugging Face config that Transformers can build.
    """
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[data["model_type"]].from_dict(data)
    found = {}
    for given, config in ((data, whole), (data.get("text_config"), whole.get_text_config())):
        if isinstance(given, dict):
            known = vars(type(config)())
            for key in given:
                if key in vars(config) and not (key in known or hasattr(type(config), key) or key.startswith("_")):
                    found[key] = next(iter(get_close_matches(key, known, 1, 0.8)), None)
    return found


def _refuse_encoders(path: Path | str, config: PretrainedConfig) -> None:
    cross_attention = ("cross_attention_layers", "add_cross_attention")
    if config.is_encoder_decoder or any(getattr(config.get_text_config(), name, None) for name in cross_attention):
        raise MemoError(
            f"model {path}: layers attend to an encoder's states, whose length a profile does not know. Train such a model with "
            "memo.alpha and memo.resident_layers"
        )


def _around(module: nn.Module, leave_out: set[nn.Module | None]) -> list[nn.Module]:
    """Return the module and its submodules, without `leave_out` and the submodules of those."""
    parts = [module]
    for child in module.children():
        if child not in leave_out:
            parts += _around(child, leave_out)
    return parts


def _fill(module: nn.Module, device: torch.device) -> None:
    """Give a module's own parameters memory and values that neither vanish nor explode."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            real = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.dim() > 1:
                nn.init.normal_(real, std=0.02)
            module._parameters[name] = nn.Parameter(real, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
