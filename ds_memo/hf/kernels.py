"""Optional kernels, one switch each.

A kernel that is configured and missing is an error before training; its message has the line to install it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ds_memo.attention_kernel import FA3, FA4
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoConfigError, MemoError
from ds_memo.hf.fused_norms import restore_forward, use_fused_norms
from ds_memo.hf.packages import INSTALL_APEX, Package

FLASH = {
    "flash_attn_2": Package(
        "flash_attn", ("flash_attn_func", "flash_attn_varlen_func"), "pip install flash-attn --no-build-isolation"
    ),
    "flash_attn_3": Package(
        "flash_attn_interface",
        ("flash_attn_func", "flash_attn_varlen_func"),
        "git clone https://github.com/Dao-AILab/flash-attention && pip install --no-build-isolation ./flash-attention/hopper",
    ),
    "flash_attn_4": Package("flash_attn.cute", ("flash_attn_func", "flash_attn_varlen_func"), "pip install --pre flash-attn-4"),
}
APEX_ADAM = Package("apex.optimizers", ("FusedAdam",), INSTALL_APEX, "amp_C")
LIGER = Package(
    "liger_kernel.transformers.monkey_patch",
    ("_apply_liger_kernel_to_instance", "MODEL_TYPE_TO_APPLY_LIGER_FN"),
    "pip install liger-kernel",
)
ATTENTION = "_attn_implementation_internal"
"""Attribute of a Transformers configuration with the name of its attention; the public one also sets sub-configurations."""


ACCOUNT = "_ds_memo_kernels"
"""Attribute of a model with what ``"kernels": "fast"`` took and left, by kernel."""


def use_kernels(model: nn.Module, config: MemoConfig, device: torch.device) -> ExitStack:
    """Install the kernels that the section configures in the model, before ``deepspeed.initialize``.

    Args:
        device: where the model computes.

    Returns:
        A stack whose ``close()`` restores the model.

    Raises:
        MemoError: a package is missing, or the model cannot use it. The model is unchanged.
    """
    with ExitStack() as undo:
        if config.attention in FLASH:
            use_flash_attention(model, config.attention, undo)
        if config.kernels.norm is not None:
            use_fused_norms(model, config.kernels.norm, undo)
        if config.kernels.fast:
            from ds_memo.hf.fast_kernels import use_fast_kernels  # registers ops

            undo.callback(_forget_account, weakref.ref(model))
            vars(model)[ACCOUNT] = use_fast_kernels(model, config.kernels.norm, device, undo)
        if config.kernels.cross_entropy == "liger":
            use_liger_cross_entropy(model, undo)
        return undo.pop_all()


def _forget_account(where: weakref.ref[nn.Module]) -> None:
    if (model := where()) is not None:
        vars(model).pop(ACCOUNT, None)


def use_flash_attention(model: nn.Module, which: str, undo: ExitStack) -> None:
    """Switch a Hugging Face model to a flash-attn package. Of another model, PyTorch's flash ops run FlashAttention-3 and 4."""
    setting = f"memo.attention {which!r}"
    FLASH[which].load(setting)
    if not hasattr(model, "set_attn_implementation"):
        if which in (FA3, FA4):
            return
        raise MemoError(f"{setting}: {type(model).__name__} is no Hugging Face model; call the package in the model itself")
    for config in _configs(model):
        undo.callback(setattr, config, ATTENTION, getattr(config, ATTENTION))
    model.set_attn_implementation(which.replace("flash_attn", "flash_attention"))


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a Hugging Face model and of the models in it, each once."""
    found: dict[int, Any] = {}
    todo = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), ATTENTION)]
    while todo:
        config = todo.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            todo += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def use_liger_cross_entropy(model: nn.Module, undo: ExitStack) -> None:
    """Patch the model with Liger's fused head and cross entropy, which never makes the full logits; nothing else of Liger."""
    setting = 'memo.kernels.cross_entropy "liger"'
    liger = LIGER.load(setting)
    if hasattr(model, "get_base_model"):  # PEFT's wrapper
        model = model.get_base_model()
    kind = getattr(getattr(model, "config", None), "model_type", None)
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    others = inspect.signature(apply).parameters if apply else {}
    if "fused_linear_cross_entropy" not in others:
        raise MemoError(f"{setting}: Liger has none for {type(model).__name__} (model type {kind!r}); leave it out")
    if not torch.cuda.is_available():
        raise MemoError(f"{setting}: its kernels are written in Triton and need a GPU; leave it out on a CPU")
    undo.callback(restore_forward, weakref.ref(model), model.__dict__.get("forward"))
    off = {name: False for name, parameter in others.items() if parameter.default is True}
    liger._apply_liger_kernel_to_instance(model=model, **{**off, "fused_linear_cross_entropy": True})


def fused_adam(config: Mapping[str, Any], model: nn.Module, parameters: Any, given: Any) -> torch.optim.Optimizer:
    """Return apex's FusedAdam with the parameters of the DeepSpeed JSON's "optimizer" section.

    Args:
        config: the DeepSpeed JSON.
        parameters: the model_parameters of ``deepspeed.initialize``; None: all trained parameters of the model.
        given: the optimizer passed to ``deepspeed.initialize``, or None.

    Raises:
        MemoConfigError: the section has another type of optimizer, or the script passes its own.
        MemoError: apex is missing.
    """
    setting = 'memo.kernels.adam "apex"'
    section = config.get("optimizer", {})
    kind = str(section.get("type", "")).lower()
    if given is not None or kind not in ("adam", "adamw"):
        found = f"the script's own {type(given).__name__}" if given is not None else f"type {kind!r}"
        raise MemoConfigError(
            f'{setting}: takes the place of an "optimizer" of type "Adam" or "AdamW" in the DeepSpeed JSON; there is '
            f"{found}. Leave it out"
        )
    apex = APEX_ADAM.load(setting)
    options = dict(section.get("params", {}))
    for deepspeeds_own in ("torch_adam", "fused"):
        options.pop(deepspeeds_own, None)
    options["adam_w_mode"] = options.pop("adam_w_mode", True) or kind == "adamw"  # as DeepSpeed reads the section
    return apex.FusedAdam(parameters or [p for p in model.parameters() if p.requires_grad], **options)
