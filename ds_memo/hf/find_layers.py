"""Find a model's transformer layers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator

from torch import nn

from ds_memo.errors import MemoError, quoted

HOW_TO_NAME = (
    'Name them: ds_memo.attach(model, config, layers=["decoder.blocks.0", …]) or layers=list(model.decoder.blocks); '
    "in the DeepSpeed JSON memo.layers, with [] for a model that calls deepspeed.checkpointing.checkpoint itself."
)


def find_layers(model: nn.Module, layers: Iterable[str | nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
    """Return the layers and their names, in model order.

    Args:
        model: any module.
        layers: names or modules, to replace the search; empty if the model calls ``ds_memo.checkpoint`` itself.

    Returns:
        Hugging Face's ``GradientCheckpointingLayer`` modules that are not inside another; without any, the longest outermost
        ``nn.ModuleList`` of one class.

    Raises:
        MemoError: no layers are found, or several lists are equally long.
    """
    if layers is not None:
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise MemoError(f"layers: got {quoted(layers)}, expected a list of names or modules. {HOW_TO_NAME}")
        return _named(model, list(layers))
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_huggingface_layer(module) and module not in inside:
            found.append((name, module))
            inside.update(module.modules())
    if found:
        return found
    lists = [(name, part) for name, part in _outermost_lists(model) if len({type(item) for item in part.values()}) == 1]
    if not lists:
        raise MemoError(
            f"{type(model).__name__} has no Hugging Face GradientCheckpointingLayer and no nn.ModuleList whose items are of one "
            f"class, so its layers are not known. {HOW_TO_NAME}"
        )
    longest = max(len(part) for _, part in lists)
    best = [(name, part) for name, part in lists if len(part) == longest]
    if len(best) > 1:
        names = ", ".join(name for name, _ in best)
        raise MemoError(f"{type(model).__name__} has several lists of {longest} layers: {names}. {HOW_TO_NAME}")
    prefix, part = best[0]
    return [(f"{prefix}.{name}", item) for name, item in part.items()]


def is_huggingface_layer(module: nn.Module) -> bool:
    """Return True if Transformers itself routes this layer's call through a checkpoint function."""
    modeling = sys.modules.get("transformers.modeling_layers")  # not imported: no such layer exists
    return modeling is not None and isinstance(module, modeling.GradientCheckpointingLayer)


def is_huggingface_model(module: nn.Module) -> bool:
    """Return True for a Transformers model with a `gradient_checkpointing` switch."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel) and hasattr(module, "gradient_checkpointing")


def fills_a_cache(module: nn.Module) -> bool:
    """Return True for a Transformers model with a loss of its own, and PEFT's of one: it fills a cache unless told not to."""
    modeling, peft = sys.modules.get("transformers.modeling_utils"), sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.PeftModel):  # which calls the other's forward, past its hooks
        return fills_a_cache(module.get_base_model())
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return False
    return {"labels", "use_cache"} <= inspect.signature(module.forward).parameters.keys()


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the lists that are not inside another list (those hold the experts of a layer): path and items by name."""
    for name, part in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(part, nn.ModuleList) and len(part):
            yield path, dict(_items(part))
        else:
            yield from _outermost_lists(part, f"{path}.")


def _items(part: nn.ModuleList, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the items of a list, and of lists inside it (stages), each once."""
    for name, item in part.named_children():
        if isinstance(item, nn.ModuleList):
            yield from _items(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _named(model: nn.Module, layers: list[str | nn.Module]) -> list[tuple[str, nn.Module]]:
    by_name = dict(model.named_modules())
    by_module = {module: name for name, module in by_name.items()}
    named = []
    for layer in layers:
        if isinstance(layer, str) and layer in by_name:
            named.append((layer, by_name[layer]))
        elif isinstance(layer, nn.Module) and layer in by_module:
            named.append((by_module[layer], layer))
        else:
            wanted = layer if isinstance(layer, str) else type(layer).__name__
            raise MemoError(f"layers: {quoted(wanted)!r} is no module of {type(model).__name__}. {HOW_TO_NAME}")
    if len({id(module) for _, module in named}) < len(named):
        raise MemoError("layers: a module is named twice; name each once")
    return named
