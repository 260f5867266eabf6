"""Conflicts with memo: refused before training where they can be seen, with one sentence that says what to remove."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_memo.errors import MemoConfigError, MemoError
from ds_memo.hf.caches import CACHES, earlier_tokens
from ds_memo.hf.find_layers import is_huggingface_layer
from ds_memo.units import MIB

_SAME_WORK = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
OFFLOADED = (
    "activations are offloaded around this model, too (TRL's activation_offloading, DeepSpeed's CheckpointHiddenStatesOffload, "
    "torch's save_on_cpu): gradients are right, but whatever layers keep without checkpointing goes to the host whole, beside "
    "memo's own copies. Leave it out"
)


def refuse_config(config: Mapping[str, Any]) -> None:
    """Refuse sections of the DeepSpeed JSON that do memo's work in another way.

    Raises:
        MemoConfigError: naming the setting.
    """
    for key in _SAME_WORK:
        if config.get("activation_checkpointing", {}).get(key):
            raise MemoConfigError(f"activation_checkpointing.{key} does what memo does in another way; remove one of the two")
    if config.get("compile", {}).get("deepcompile"):
        raise MemoConfigError(
            "compile.deepcompile compiles the layers, and what happens inside a compiled region cannot be kept or swapped; "
            "remove it or memo"
        )


def refuse_model(layers: list[tuple[str, nn.Module]]) -> None:
    """Refuse layers that are offloaded already.

    Raises:
        MemoError: they are.
    """
    for _, layer in layers:
        if is_huggingface_layer(layer):
            refuse_offload(layer.__dict__.get("_gradient_checkpointing_func"))


def refuse_fsdp1(model: nn.Module) -> None:
    """Refuse a model whose parameters are parts of a flat one (``FullyShardedDataParallel``), inside its forward, too.

    Raises:
        MemoError: naming what to use.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)  # None: not imported
    if kind is None:
        return
    first = next(model.parameters(), None)
    is_flat = any(hasattr(each, "_fsdp_flattened") for each in (first, getattr(first, "_base", None)))  # it, or a view of it
    if is_flat or any(isinstance(part, kind) for part in model.modules()):
        raise MemoError(
            "the model is under FullyShardedDataParallel (FSDP1), which has put its parameters into flat ones. Use "
            "FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in Accelerate's configuration"
        )


def refuse_offload(function: Any) -> None:
    """Refuse the checkpoint function of ``gradient_checkpointing_kwargs={"offload": True}`` (Transformers 5; later versions of it
    say activation for gradient).

    Raises:
        MemoError: it is that function.
    """
    while isinstance(function, partial):
        function = function.func
    if getattr(function, "__qualname__", "").endswith("checkpointing_enable.<locals>.checkpoint_func"):
        raise MemoError('gradient_checkpointing_kwargs={"offload": True} does what memo does in another way; remove one')


def is_offloaded() -> bool:
    """Return True if hooks send saved tensors to the host now: TRL's and Axolotl's OffloadActivations, save_on_cpu."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and any(name in getattr(hooks[0], "__qualname__", "") for name in ("Offload", "save_on_cpu"))


def refuse_cache(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse keys, values and states of earlier tokens that a Hugging Face model is given in training; a forward pre-hook.

    Raises:
        MemoError: Transformers would drop them, as for every model that is checkpointed, and the loss be another. Before 5.24
            state spaces keep theirs, each replay writes to them, and gradients would be others.
    """
    if not model.training or not torch.is_grad_enabled():
        return
    if name := earlier_tokens(kwargs):
        raise MemoError(
            f"{type(model).__name__} was given earlier tokens in training ({name}). Layers that are checkpointed drop such a "
            "cache or write to it twice: the loss or gradients would be others. Prefix tuning, which needs it, goes without "
            "memo; else call the model without it"
        )


def fill_no_cache(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Have a Hugging Face model's loss without gradients fill no cache, which is read by no loss; a forward pre-hook.

    Such a cache has the keys and values of all layers (Trainer.evaluate), and layers that fill it cannot run in tiles.
    """
    labels = kwargs.get("labels")
    if torch.is_grad_enabled() or labels is None or labels.shape[-1] <= LONG or {"use_cache", *CACHES} & kwargs.keys():
        return None
    return args, {**kwargs, "use_cache": False}


LONG = 4096
"""Tokens from which a mask or a cache counts: 16 MiB of booleans."""


class MaskWatch:
    """Warns once if a layer is given a mask with an entry for every pair of tokens; a forward pre-hook."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self.name = name
        self.warn: Callable[[str], None] | None = warn

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.warn is None:
            return
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and _is_mask(value):
                mib = value.numel() * value.element_size() / MIB
                self.warn(
                    f"layer {self.name} is given an attention mask of shape {tuple(value.shape)}: {mib:.3g} MiB that grow with "
                    "the square of the length, and SDPA's fastest kernels take none. Pad nothing (join the documents) or use a "
                    "flash-attn package"
                )
                self.warn = None
                return


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[-1] == tensor.shape[-2] >= LONG
