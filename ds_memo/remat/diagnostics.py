"""Diagnostics: causes that make a layer's replay slow, or its results wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ds_memo.attention_kernel import CUDNN_ELEMENTS
from ds_memo.remat import op_policy
from ds_memo.remat.recipe import Gemm, Recipe

MEM_EFFICIENT_TOKENS = 1 << 16
"""Beyond this, that kernel reads its mask and draws its dropout at wrong offsets (pytorch/pytorch issue 187225)."""


def diagnose(module: nn.Module | None, recipe: Recipe) -> Iterator[str]:
    """Yield the warnings about a layer's recipe, each as the rest of a sentence that begins with "layer NAME: "."""
    notes = recipe.notes
    if notes.rewritten:
        yield (
            f"outputs of {', '.join(notes.rewritten)} were changed in place by a kernel that PyTorch cannot see "
            "(a Triton kernel that is no custom op?), so these ops run again in each backward"
        )
    if notes.attention_ops or notes.gemm_flops:
        yield (
            "a part of it runs under torch.utils.checkpoint, and runs again in each backward whatever is kept: "
            f"{notes.gemm_flops / (recipe.gemm_flops or 1):.0%} of its GEMM FLOPs, {notes.attention_ops} attention calls. "
            "Leave that checkpoint out: ds_memo sees to what is computed again"
        )
    if recipe.mem_efficient_tokens > MEM_EFFICIENT_TOKENS:
        yield (
            f"PyTorch took its memory-efficient attention, whose results past {MEM_EFFICIENT_TOKENS:,} tokens are wrong where "
            "there is a mask or dropout. Leave the mask out (join documents in place of padding), or set memo.attention to "
            '"flash" or "cudnn", which then say if they cannot serve'
        )
    if recipe.cudnn_elements > CUDNN_ELEMENTS:
        yield (
            f"cuDNN's attention has {recipe.cudnn_elements:,} elements of queries in one call; its gradients are wrong past "
            f'2**31, and may be past {CUDNN_ELEMENTS:,}. Set memo.attention to "flash", or leave the layer uncompiled: memo then '
            "cuts calls of F.scaled_dot_product_attention into groups of heads"
        )
    if module is not None and any(type(part).__module__.startswith("transformer_engine.") for part in module.modules()):
        yield (
            "it has modules of TransformerEngine, whose kernels PyTorch does not show, so what they compute runs again in each "
            "backward and is not counted. torchao's fp8 linears are kept and counted"
        )
    if not any(isinstance(op, Gemm) for op in recipe.ops):
        compiled = "; it is compiled, and what happens inside a compiled region cannot be seen: leave layers uncompiled"
        why = compiled if module is not None and has_compiled(module) else ""
        but = "all of it but attention" if recipe.attention_ops else "all of it, attention too,"
        yield f"no GEMM was seen in it, so each backward runs {but} again{why}"
    elif not recipe.attention_ops and notes.softmax == str(op_policy.SAFE_SOFTMAX):
        yield (
            "no attention kernel was seen in it, though it calls scaled_dot_product_attention, so its attention runs a second "
            "time in each backward. PyTorch has none where a mask needs a gradient (T5), and on a CPU where attention has "
            "dropout or values are not as wide as keys (multi-head latent attention). A GPU has kernels for the last two; "
            "leave such a mask out"
        )
    elif not recipe.attention_ops and notes.softmax:
        yield (
            f"no attention kernel was seen in it, {notes.softmax} was (attention that materialises its scores), so its "
            'attention runs a second time in each backward. Use attn_implementation="sdpa" or a flash-attn package, and no 4-D '
            "attention mask"
        )
    elif not recipe.attention_ops and notes.hidden_kernels:
        yield (
            "no attention kernel was seen in it, but the work of a kernel that PyTorch does not show. If that is attention, it "
            "runs a second time in each backward: wrap its function in ds_memo.keep_whole"
        )


def within_compiled(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper; a module that has none as it is."""
    return module._orig_mod if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) else module


def has_compiled(module: nn.Module) -> bool:
    """Return True if the module, or a module in it, is compiled."""
    wrapper = torch._dynamo.eval_frame.OptimizedModule
    return any(part._compiled_call_impl is not None or isinstance(part, wrapper) for part in module.modules())
