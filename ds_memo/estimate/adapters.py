"""Adapters on a model of the meta device: PEFT's own modules, on frozen weights in bf16 (LoRA), or in 4 bits (QLoRA).

Adapters and their gradients are bf16, with fp32 weights and two moments, as DeepSpeed has them. Weights in 4 bits are
bitsandbytes' NF4: those of all products in layers. Embeddings, norms, head, and experts that are one tensor stay in bf16. Each
product unpacks its weight to bf16, in the forward, in each replay and in the backward, once for every tile. Assumed: the kernel
that unpacks reads and writes device memory once, at the rate of elementwise kernels.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.estimate.errors import EstimateError
from ds_memo.hf.find_layers import find_layers

NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight: 4 bits, a byte for each 64 weights, which scales them, and four for each 256 of those bytes."""
_library = torch.library.Library("ds_memo", "FRAGMENT")
_library.define("dequantize(Tensor weight) -> Tensor")
_library.impl("dequantize", torch.empty_like, "Meta")


class Adapters(NamedTuple):
    """Adapters on all products in layers, of which alone there are gradients and optimizer states."""

    rank: int
    quantized: bool
    parameters: int
    layer_parameters: int
    """Those of the layer with the most."""
    frozen_bytes: float

    def __str__(self) -> str:
        return f"{'QLoRA' if self.quantized else 'LoRA'} of rank {self.rank}"


class _Product(torch.autograd.Function):
    """A product that keeps its packed weight alone, as bitsandbytes' MatMul4Bit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return F.linear(x, torch.ops.ds_memo.dequantize(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.matmul(gradient, torch.ops.ds_memo.dequantize(ctx.weight)), None, None


class QuantizedLinear(nn.Linear):
    """A product with a weight in 4 bits, which on the meta device has no memory anyway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight, self.bias).clone()  # PEFT clones what bitsandbytes returns


def add_adapters(model: nn.Module, rank: int, quantized: bool) -> Adapters:
    """Freeze a model on the meta device, and add adapters to all products in its layers.

    Raises:
        EstimateError: PEFT is missing, layers have no torch.nn.Linear, or PEFT adapts tensors of experts, too.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        raise EstimateError(f"--lora and --qlora need peft ({error}): pip install 'ds_memo[hf]'") from None
    layers = [layer for _, layer in find_layers(model)]
    products = {part: name for name, part in model.named_modules() if type(part) is nn.Linear}
    inside = [part for layer in layers for part in layer.modules() if part in products]
    if not inside:
        raise EstimateError(f"--lora and --qlora: layers of {type(model).__name__} have no torch.nn.Linear, to which adapters go")
    frozen_bytes = sum(2.0 * parameter.numel() for parameter in model.parameters())
    if quantized:
        frozen_bytes -= sum((2 - NF4_BYTES) * part.weight.numel() for part in inside)
        for part in inside:
            part.__class__ = QuantizedLinear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # patterns for experts, of a model that has them
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=[products[part] for part in inside]), model)
    if any(isinstance(part, ParamWrapper) for part in model.modules()):
        raise EstimateError(
            f"--lora and --qlora: PEFT adapts the experts of {type(model).__name__}, which are one tensor each, and that is not "
            "estimated"
        )
    trained = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    for parameter in trained.values():
        parameter.data = parameter.data.bfloat16()
    of_layers = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    return Adapters(rank, quantized, sum(p.numel() for p in trained.values()), max(of_layers), frozen_bytes)
