"""Kinds of layers: layers of one kind share a measurement, in this run and from the cache."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_memo.remat.layer import Layer

_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Attributes that only number the layers of a model."""
_PASSING = ("training", "gradient_checkpointing")
"""Attributes that may change from pass to pass."""
_NO_MATTER = ("_name_or_path", "transformers_version")
"""Entries of a Hugging Face config that layers do not read."""


def kinds_of(layers: Iterable[Layer]) -> list[int]:
    """Return the number of each layer's kind.

    Two layers are of one kind if they have the same class, parameters of the same shapes and the same settings (an attention
    window, say). An attribute that differs between most layers is a name or a number, not a setting.
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
        varied = tuple(sorted((name, repr(value)) for name, value in named.items() if 1 < len(values[here, name]) <= few))
        found.append(numbers.setdefault((here, varied), len(numbers)))
    return found


def layer_in_words(layer: Layer) -> str:
    """Return the layer's class and parameters as text."""
    module = layer.module()
    if module is None:
        return layer.name
    parameters = ", ".join(
        f"{name} {tuple(getattr(p, 'ds_shape', p.shape))} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    )
    return f"{type(module).__module__}.{type(module).__qualname__}({parameters})"


def settings_digest(layer: Layer) -> str:
    """Return a digest of everything else that changes the layer's work: heads, experts per token, windows, attention kernels,
    replaced forwards (Liger's, TiledMLP)."""
    module = layer.module()
    parts = [re.sub(r"0x[0-9a-f]+", "", repr(module)), sorted(_settings(module).items()), *_configs(module), _code(module)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:20]


def _class_and_shapes(layer: Layer) -> Any:
    shapes = tuple((tuple(getattr(p, "ds_shape", p.shape)), p.dtype, p.requires_grad) for p in layer.parameters)
    return type(layer.module()), shapes


def _settings(module: nn.Module | None) -> dict[str, Any]:
    """Return the public attributes of the module and its submodules that are numbers, strings or None."""
    return {
        f"{path}.{name}": value
        for path, part in (module.named_modules() if module is not None else ())
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, type(None)))
        and not name.startswith(("_", "ds_"))  # PyTorch's and DeepSpeed's own state
        and name not in (*_NUMBERS, *_PASSING)
    }


def _code(module: nn.Module) -> str:
    """Return a digest of the code of all forwards in the module."""
    digest = hashlib.sha256()
    for part in module.modules():
        forward = getattr(part.forward, "plain", part.forward)  # a patched forward holds the layer's own
        forward = inspect.unwrap(getattr(forward, "__func__", forward))
        digest.update(f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}".encode())
        digest.update(getattr(getattr(forward, "__code__", None), "co_code", b""))
        if isinstance(forward, functools.partial):  # the function of a kernel, and the kernel
            digest.update(" ".join(getattr(x, "__qualname__", "") for x in (forward.func, *forward.args)).encode())
    return digest.hexdigest()


def _configs(module: nn.Module) -> list[dict[str, Any]]:
    """Return the Hugging Face configs that the module's parts hold and read while they run."""
    configs = {id(config): config for part in module.modules() if hasattr(config := getattr(part, "config", None), "to_dict")}
    return [
        {name: value for name, value in config.to_dict().items() if name not in _NO_MATTER}
        | {"attention": getattr(config, "_attn_implementation", None)}
        for config in configs.values()
    ]
