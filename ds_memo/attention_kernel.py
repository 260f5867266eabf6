"""The choice of attention's kernel: one function for one rank, tiles, ranks that share a sequence, and the estimator.

It knows no tensors and no PyTorch. It follows PyTorch's own rules (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), so that
a sequence on several ranks runs the kernel that F.scaled_dot_product_attention takes on one. FlashAttention-3 and 4 come before:
PyTorch knows them, but takes them only if they are activated (ds_memo/flash_kernels.py).
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import NamedTuple

CUDNN = "cudnn"
FLASH = "flash"
"""FlashAttention-2, of which PyTorch has a copy."""
FA3 = "flash_attn_3"
FA4 = "flash_attn_4"
EFFICIENT = "efficient"
"""PyTorch's memory-efficient attention."""
MATH = "math"
"""Products and a softmax, block by block."""
CPU = "cpu"

PLAIN = "plain"
"""Causal, or all keys."""
DOCUMENTS = "documents"
"""Many plain sequences end to end, told by their borders."""
WINDOW = "window"
"""Limits that are no triangle, told by numbers."""
TENSOR = "tensor"
"""A mask of queries by keys."""

CUDNN_ELEMENTS = 1 << 29
"""Most elements of queries in one call of cuDNN's. Past 2**31 its gradient of the queries is wrong (9.19 on an H200:
benchmarks/gpu/first_large.py). It sums that gradient in float32, 4 bytes an element, so offsets in bytes may wrap from here on.
That is a precaution: no size between was measured."""

Capability = tuple[int, int]
ASKED = "memo.attention names it"
NAMES = {FLASH: "FlashAttention-2", FA3: "FlashAttention-3", FA4: "FlashAttention-4", CUDNN: "cuDNN"}


class AttentionKernel(NamedTuple):
    name: str
    reason: str
    """Part of a sentence, for the report."""
    instead_of: str | None = None
    """The configured kernel, if it cannot serve."""


class Attention(NamedTuple):
    """A call of attention."""

    dtype: str
    """As PyTorch prints it, without "torch."."""
    head_dim: int
    value_dim: int
    mask: str = PLAIN
    dropout: bool = False
    softcap: bool = False
    deterministic: bool = False
    """True under torch.use_deterministic_algorithms."""
    queries_of_a_head: int = 0
    """In all rows of the batch."""


@functools.lru_cache(maxsize=256)
def attention_kernel(
    call: Attention,
    capability: Capability | None,
    installed: Set[str] = frozenset(),
    configured: str | None = None,
    cudnn_first: bool | None = None,
) -> AttentionKernel:
    """Return the kernel that runs a call of attention, and why.

    Args:
        capability: compute capability of the CUDA device; None: a CPU.
        installed: FA3 and FA4, if their packages are there and PyTorch runs them.
        configured: "memo"'s key `attention`.
        cudnn_first: True if PyTorch takes cuDNN before flash, as version and settings say; None: as by default.
    """
    if call.softcap:
        return AttentionKernel(MATH, "logits are capped, which no fused kernel of PyTorch does")
    if capability is None:
        return AttentionKernel(CPU, "the device is a CPU")
    if call.dtype == "float64":
        return AttentionKernel(MATH, "no fused kernel knows float64")
    asked = FLASH if configured == "flash_attn_2" else configured if configured in NAMES else None
    order = [asked] if asked else [name for name in (FA3, FA4) if name in installed and _is_first_on(name, capability)]
    if cudnn_first if cudnn_first is not None else capability[0] in (9, 10):
        order += [CUDNN] * (asked not in (FLASH, CUDNN))
    refusals: list[str] = []
    for name in dict.fromkeys((*order, FLASH)):
        why_not = _refusal(name, call, capability, installed)
        if not why_not:
            reason = "; ".join([*refusals, _reason(name, capability, asked)])
            return AttentionKernel(name, reason, None if asked == name else asked)
        refusals.append(f"{NAMES[name]} cannot: {why_not}")
    return AttentionKernel(EFFICIENT, "; ".join(refusals), asked)


def flash_refusal(name: str, call: Attention, capability: Capability) -> str:
    """Return why a kernel behind PyTorch's flash ops cannot run a call; "": it can."""
    size = max(call.head_dim, call.value_dim)
    if call.dtype not in ("float16", "bfloat16"):
        return f"tensors are {call.dtype}"
    if call.mask == TENSOR:
        return "the mask is a tensor"
    small = capability[0] == 12 or (8, 6) <= capability <= (8, 9)
    made_for, refusals = {
        FA3: (capability == (9, 0), {"dropout": call.dropout, "heads of more than 256": size > 256}),
        FA4: (
            capability[0] in (9, 10),
            {
                "dropout": call.dropout,
                "windows": call.mask == WINDOW,  # its backward has none in PyTorch 2.11
                "heads of more than 128": size > 128,
                "deterministic algorithms": call.deterministic,
            },
        ),
        FLASH: (
            capability >= (8, 0),
            {
                "heads of more than 256": size > 256,
                # The backward needs more shared memory than these cards have.
                "heads of 193 to 224 on this card": small and 192 < size <= 224,
                "dropout with heads of more than 192 on this card": small and size > 192 and call.dropout,
            },
        ),
    }[name]
    if not made_for:
        return f"it is not made for compute capability {_card(capability)}"
    return next((f"it has no {what}" for what, met in refusals.items() if met), "")


def _is_first_on(name: str, capability: Capability) -> bool:
    """Return True if a kernel is taken unasked. FlashAttention-4 runs on Hopper, too, but 3 is made for it."""
    return capability == (9, 0) if name == FA3 else capability[0] == 10


def _refusal(name: str, call: Attention, capability: Capability, installed: Set[str]) -> str:
    if name == CUDNN:
        return _cudnn_refusal(call, capability)
    if name != FLASH and name not in installed:
        return "PyTorch does not run its package"
    return flash_refusal(name, call, capability)


def _cudnn_refusal(call: Attention, capability: Capability) -> str:
    if capability < (8, 0):
        return f"it is not made for compute capability {_card(capability)}"
    if call.dtype not in ("float16", "bfloat16"):
        return f"tensors are {call.dtype}"
    if call.mask in (WINDOW, DOCUMENTS):
        return "windows would be masks" if call.mask == WINDOW else "documents would be calls of their own"
    if call.deterministic:
        return "its gradients are not deterministic"
    if call.queries_of_a_head * call.head_dim > CUDNN_ELEMENTS:
        return f"one head has more than {CUDNN_ELEMENTS:,} elements of queries"
    sizes = call.head_dim, call.value_dim
    equal = sizes[0] == sizes[1] <= 128 and sizes[0] % 8 == 0
    if not equal and (sizes != (192, 128) or capability[0] not in (9, 10)):
        return f"heads have {sizes[0]} and {sizes[1]} elements"
    return ""


def _reason(name: str, capability: Capability, asked: str | None) -> str:
    if name == asked:
        return ASKED
    if name in (FA3, FA4):
        return f"its package is installed, and it is made for compute capability {_card(capability)}"
    if name == CUDNN:
        return f"PyTorch prefers it on compute capability {_card(capability)}"
    return f"it is PyTorch's own on compute capability {_card(capability)}"


def _card(capability: Capability) -> str:
    return ".".join(map(str, capability))
