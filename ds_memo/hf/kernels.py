"""Optional kernels, one switch each. A package counts as installed if it has the symbols that ds_memo uses.

A kernel that is configured and missing is an error before training; its message has the line to install it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.attention_kernel import FA3, FA4
from ds_memo.config import MemoConfig
from ds_memo.errors import MemoConfigError, MemoError


@dataclass(frozen=True)
class Package:
    """A kernel's module, and the command that installs it."""

    module: str
    symbols: tuple[str, ...]
    install: str
    compiled: str | None = None
    """The extension that it imports at first use: a build without it has the same symbols."""

    def load(self, setting: str) -> Any:
        """Import the module.

        Raises:
            MemoError: it cannot be imported, or is another package of the same name.
        """
        try:
            module = importlib.import_module(self.module)
            if self.compiled:
                importlib.import_module(self.compiled)
        except Exception as error:  # a build for another torch fails in many ways
            raise MemoError(f"{setting}: {self.module} cannot be used ({error}). Install it: {self.install}") from error
        lacking = [symbol for symbol in self.symbols if not hasattr(module, symbol)]
        if lacking:
            raise MemoError(
                f"{setting}: the {self.module} that is installed has no {', '.join(lacking)}: it is another package of that "
                f"name, or too old. Install the right one: {self.install}"
            )
        return module


_APEX = (
    'git clone https://github.com/NVIDIA/apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ./apex '
    '(the package "apex" on the index is something else)'
)  # fmt: skip
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
APEX_NORM = Package(
    "apex.normalization.fused_layer_norm", ("fused_layer_norm_affine", "fused_rms_norm_affine"), _APEX, "fused_layer_norm_cuda"
)
APEX_ADAM = Package("apex.optimizers", ("FusedAdam",), _APEX, "amp_C")
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


def use_fused_norms(model: nn.Module, which: str, undo: ExitStack) -> None:
    """Run the model's norms as one kernel each. Parameters and modules stay the same objects.

    Args:
        which: "torch": RMSNorm by PyTorch's kernel, its LayerNorm is one anyway; "apex": both by apex's.
    """
    setting = f'memo.kernels.norm "{which}"'
    layer_norm, rms_norm, norms = None, torch_rms_norm, "RMSNorm"
    if which == "apex":
        apex = APEX_NORM.load(setting)
        layer_norm, rms_norm, norms = apex.fused_layer_norm_affine, apex.fused_rms_norm_affine, "LayerNorm or RMSNorm"
    runs = [(module, run) for module in model.modules() if (run := fused_norm(module, rms_norm, layer_norm)) is not None]
    if not runs and not (which == "torch" and any(isinstance(module, nn.LayerNorm) for module in model.modules())):
        raise MemoError(f"{setting}: {type(model).__name__} has no {norms} with a weight that it can run; leave it out")
    for module, run in runs:
        replace_forward(module, run, undo)


def replace_forward(module: nn.Module, run: Callable[..., Any], undo: ExitStack) -> None:
    """Give one module another forward; its class keeps the own."""
    undo.callback(_restore_forward, weakref.ref(module), module.__dict__.get("forward"))
    module.forward = run  # type: ignore[method-assign]


def _restore_forward(where: weakref.ref[nn.Module], before: Callable[..., Any] | None) -> None:
    """Restore an instance's own forward; None: it had none."""
    if (module := where()) is None:
        return
    if before is not None:
        module.forward = before
    else:
        module.__dict__.pop("forward", None)


def fused_norm(
    module: nn.Module, rms_norm: Callable[..., torch.Tensor], layer_norm: Callable[..., torch.Tensor] | None = None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a forward of the module by these kernels; None: the module computes something else."""
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    if layer_norm is not None and type(module).forward is nn.LayerNorm.forward and module.bias is not None:
        return functools.partial(_layer_norm, layer_norm, module)
    if type(module).forward is nn.RMSNorm.forward or _scales_as_rms_norm(module):
        return functools.partial(_rms_norm, rms_norm, module)
    return None


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, shape: torch.Size, eps: float) -> torch.Tensor:
    return F.rms_norm(x, shape, weight, eps)


def _layer_norm(kernel: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return kernel(x, module.weight, module.bias, module.normalized_shape, module.eps)


def _rms_norm(kernel: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:  # the kernels return the input's type, models return the wider one
        return type(module).forward(module, x)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
    return kernel(x, module.weight, module.weight.shape, eps)


def _scales_as_rms_norm(module: nn.Module) -> bool:
    """Return True if a model's own RMSNorm computes weight * x / rms(x). Gemma's does not: it scales by 1 + weight."""
    if not type(module).__name__.endswith("RMSNorm") or list(module._parameters) != ["weight"]:
        return False
    if getattr(module, "variance_epsilon", None) is None:
        return False
    twin = object.__new__(type(module))
    nn.Module.__init__(twin)
    twin.__dict__.update({key: value for key, value in module.__dict__.items() if not key.startswith("_")})
    twin.weight, twin.variance_epsilon = nn.Parameter(torch.linspace(0.5, 1.5, 8)), 0.5  # large: it belongs inside the root
    x = torch.linspace(-1, 2, 16).reshape(2, 8)
    with torch.no_grad():
        return torch.allclose(type(module).forward(twin, x), F.rms_norm(x, (8,), twin.weight, 0.5), rtol=1e-4)


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
    undo.callback(_restore_forward, weakref.ref(model), model.__dict__.get("forward"))
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
