"""Norms as one kernel each, where a module's norm computes what the kernel does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.hf.packages import INSTALL_APEX, Package

APEX_NORM = Package(
    "apex.normalization.fused_layer_norm",
    ("fused_layer_norm_affine", "fused_rms_norm_affine"),
    INSTALL_APEX,
    "fused_layer_norm_cuda",
)


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
    undo.callback(restore_forward, weakref.ref(module), module.__dict__.get("forward"))
    module.forward = run  # type: ignore[method-assign]


def restore_forward(where: weakref.ref[nn.Module], before: Callable[..., Any] | None) -> None:
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
