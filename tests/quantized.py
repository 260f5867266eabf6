"""A causal LM with bitsandbytes' 4-bit weights and PEFT's adapters, as QLoRA has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def with_adapters(model: nn.Module, rank: int, quantized: bool) -> nn.Module:
    """Return a bf16 model with adapters on all products but the head, which are drawn at random; skip without the packages.

    Args:
        quantized: True if those products have weights in NF4, whose scales are quantised, too.
    """
    peft = pytest.importorskip("peft")
    if quantized:
        nn4 = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes").nn
        head = model.get_output_embeddings()
        for part in list(model.modules()):
            for name, product in part.named_children():
                if type(product) is nn.Linear and product is not head:
                    packed = nn4.Linear4bit(
                        product.in_features, product.out_features, bias=product.bias is not None, compute_dtype=torch.bfloat16
                    )
                    packed.weight = nn4.Params4bit(product.weight.data, requires_grad=False, quant_type="nf4", module=packed)
                    packed.bias = product.bias
                    setattr(part, name, packed.to("cpu"))
        model.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.enable_input_require_grads()
    return model.train()


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of all frozen weights, with the scales of packed ones."""
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            total += parameter.nbytes
            if (state := getattr(parameter, "quant_state", None)) is not None:
                total += state.absmax.nbytes + state.state2.absmax.nbytes
    return total
