"""Which layers are alike, and what a layer is: what a measurement of one says of others, and of other runs."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_memo.remat.checkpoint import Layer

_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Attributes that say nothing but where in the model a layer is."""
_PASSING = ("training", "gradient_checkpointing")
"""Attributes that may change from pass to pass."""
_NO_MATTER = ("_name_or_path", "transformers_version")
"""Entries of a Hugging Face config that layers do not look at."""


def kinds_of(layers: Iterable[Layer]) -> list[int]:
    """For each layer the number of its kind.

    Two layers are of one kind if they have the same class, parameters of the same shapes and the same settings (an attention
    window, say). An attribute that differs between most layers is no setting, but a name or a number of the layer.
    """
    layers = list(layers)
    shapes = [_class_and_shapes(layer) for layer in layers]
    settings = [_settings(layer.module()) for layer in layers]
    values: dict[Any, set[Any]] = defaultdict(set)
    for here, named in zip(shapes, settings, strict=True):
        for name, value in named.items():
            values[here, name].add(value)
    alike = Counter(shapes)
    numbers: dict[Any, int] = {}
    found = []
    for here, named in zip(shapes, settings, strict=True):
        few = max(2, alike[here] // 2)
        told = tuple(sorted((name, repr(value)) for name, value in named.items() if 1 < len(values[here, name]) <= few))
        found.append(numbers.setdefault((here, told), len(numbers)))
    return found


def layer_in_words(layer: Layer) -> str:
    """Class and parameters."""
    module = layer.module()
    if module is None:
        return layer.name
    parameters = ", ".join(
        f"{name} {tuple(getattr(p, 'ds_shape', p.shape))} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    )
    return f"{type(module).__module__}.{type(module).__qualname__}({parameters})"


def settings_digest(layer: Layer) -> str:
    """A digest of everything else that is known to change what the layer does: heads, experts per token, windows, attention
    kernels, forwards that were replaced (Liger's, TiledMLP)."""
    module = layer.module()
    seen = [re.sub(r"0x[0-9a-f]+", "", repr(module)), sorted(_settings(module).items()), *_configs(module), _code(module)]
    return hashlib.sha256(json.dumps(seen, sort_keys=True, default=repr).encode()).hexdigest()[:20]


def _class_and_shapes(layer: Layer) -> Any:
    shapes = tuple((tuple(getattr(p, "ds_shape", p.shape)), p.dtype, p.requires_grad) for p in layer.parameters)
    return type(layer.module()), shapes


def _settings(module: nn.Module | None) -> dict[str, Any]:
    """Public attributes that are plain values, of the module and those in it."""
    return {
        f"{path}.{name}": value
        for path, part in (module.named_modules() if module is not None else ())
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, type(None)))
        and not name.startswith(("_", "ds_"))  # what PyTorch and DeepSpeed count
        and name not in (*_NUMBERS, *_PASSING)
    }


def _code(module: nn.Module) -> str:
    """A digest of the code of all forwards in it."""
    digest = hashlib.sha256()
    for part in module.modules():
        forward = getattr(part.forward, "plain", part.forward)  # a layer's own is behind ds_memo's
        forward = inspect.unwrap(getattr(forward, "__func__", forward))
        digest.update(f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}".encode())
        digest.update(getattr(getattr(forward, "__code__", None), "co_code", b""))
    return digest.hexdigest()


def _configs(module: nn.Module) -> list[dict[str, Any]]:
    """The Hugging Face configs that its parts hold, and look at while they run."""
    configs = {id(config): config for part in module.modules() if hasattr(config := getattr(part, "config", None), "to_dict")}
    return [
        {name: value for name, value in config.to_dict().items() if name not in _NO_MATTER}
        | {"attention": getattr(config, "_attn_implementation", None)}
        for config in configs.values()
    ]
