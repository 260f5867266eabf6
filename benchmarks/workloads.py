"""Workloads of the GPU benchmarks: layers of the papers' widths with random weights, one random sequence, training steps.

    gpt7b      GPT-NeoX, rotary, GELU tanh: h 4096, 32 heads, ffn 16384
    llama8b    Llama-3-8B's shape: h 4096, 32 heads, 8 of them for keys and values, ffn 14336
    qwen3next  Qwen3-Next-80B-A3B's shape with dense MLPs: h 2048, three layers of the gated delta rule and one of attention
    nemotronh  Nemotron-H-8B's shape: h 4096, layers "M-M*-M" of its pattern, of Mamba-2 (M), MLP (-) and attention (*)

Attention runs through one function for every rival, `sdpa`, which the transformers attention registry leads to. On a CPU the
same shapes shrink by one table of sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_memo.remat.op_policy import ATTENTION
from ds_memo.sequence.catch_mixers import calls_mixers

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""q, k, v (b, heads, rows, d), scale → (b, heads, rows, d)."""
NAMES = ("gpt7b", "llama8b")
HYBRIDS = ("qwen3next", "nemotronh")
"""Most layers mix tokens by a scan. The emulator's suite alone trains them."""
LOGITS = 16
"""Last positions that the loss reads: a full vocabulary at every position would be a benchmark of the loss."""


@dataclass(frozen=True)
class Size:
    """One width."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int


@dataclass(frozen=True)
class Shape:
    """One workload."""

    name: str
    family: str
    layers: int
    lengths: tuple[int, ...]
    size: Size


def gpt_shape(layers: int, hidden: int, heads: int, lengths: tuple[int, ...]) -> Shape:
    """A GPT that is no workload of its own."""
    return Shape("gpt", "gpt", layers, lengths, Size(hidden, heads, heads, 4 * hidden))


_NEOX = {
    "hidden_act": "gelu_pytorch_tanh",
    "use_parallel_residual": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_GPT, _LLAMA = Size(4096, 32, 32, 16384), Size(4096, 32, 8, 14336)
_SMALL_GPT, _SMALL_LLAMA = Size(32, 8, 8, 128), Size(32, 8, 2, 112)
_K = 1024


def shapes(device: torch.device) -> dict[str, Shape]:
    """The table of sizes: those of the papers on CUDA, tiny ones that try the harness elsewhere."""
    if device.type == "cuda":
        one = tuple(n * _K for n in (16, 32, 64, 128))
        gpt, llama = _GPT, _LLAMA
    else:
        one = (48, 96)
        gpt, llama = _SMALL_GPT, _SMALL_LLAMA
    found = [
        Shape("gpt7b", "gpt", 6, one, gpt),
        Shape("llama8b", "llama", 6, one, llama),
        Shape("qwen3next", "qwen3next", 4, one, Size(2048, 16, 2, 5120) if device.type == "cuda" else Size(32, 4, 2, 64)),
        Shape("nemotronh", "nemotronh", 6, one, Size(4096, 32, 8, 21504) if device.type == "cuda" else Size(32, 4, 2, 64)),
    ]
    return {shape.name: shape for shape in found}


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build(shape: Shape, device: torch.device) -> nn.Module:
    """A causal language model of the shape in training mode, random weights, no dropout."""
    size = shape.size
    common = {
        "vocab_size": 512,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": max(shape.lengths),
        "attn_implementation": "bench",
        "use_cache": False,
    }
    torch.manual_seed(0)
    with torch.device(device), born_as(dtype_of(device)):
        if shape.family == "gpt":
            model: nn.Module = GPTNeoXForCausalLM(GPTNeoXConfig(**common, **_NEOX))
        elif shape.name in HYBRIDS:
            model = _hybrid(shape, common | {"num_key_value_heads": size.kv_heads})
            calls_mixers(model)  # catches the scans, in whose place the emulator has kernels
        else:
            model = LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=size.kv_heads))
    return model.train()


def _hybrid(shape: Shape, common: dict[str, Any]) -> nn.Module:
    """A model whose scans have their real heads and states on CUDA, and a few small ones elsewhere."""
    from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    real = shape.size.hidden > 1024
    if shape.family == "qwen3next":
        heads = {} if real else {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
        sizes = {} if real else dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8)
        return Qwen3NextForCausalLM(Qwen3NextConfig(**common, num_experts=0, **heads, **sizes))
    letters = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    del common["num_hidden_layers"]
    small = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "head_dim": 8, "chunk_size": 8}
    kinds = [letters[letter] for letter in "M-M*-M"]
    return NemotronHForCausalLM(NemotronHConfig(**common, n_routed_experts=0, layers_block_type=kinds, **({} if real else small)))


def small_models(vocab: int, layers: int, hidden: int, heads: int, kv_heads: int, llama_ffn: int) -> dict[str, nn.Module]:
    """A GPT and a Llama shape that are no workloads, with the attention that Transformers picks."""
    common = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    llama = {"intermediate_size": llama_ffn, "num_key_value_heads": kv_heads}
    torch.manual_seed(0)
    return {
        "gpt-neox": GPTNeoXForCausalLM(GPTNeoXConfig(**common, **_NEOX, intermediate_size=4 * hidden)),
        "llama": LlamaForCausalLM(LlamaConfig(**common, **llama)),
    }


@contextlib.contextmanager
def born_as(dtype: torch.dtype) -> Iterator[None]:
    """Make parameters in this dtype. A later cast would leave a hole in the memory that the allocator holds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batch(shape: Shape, length: int, device: torch.device) -> torch.Tensor:
    """Return random token ids (1, length)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 512, (1, length), generator=generator).to(device)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=LOGITS).logits.float().square().mean()


# ---- attention

_instead: Core | None = None


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention over (b, heads, s, d)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@contextlib.contextmanager
def attention_through(function: Core) -> Iterator[None]:
    """Within the block attention calls `function`."""
    global _instead
    before, _instead = _instead, function
    try:
        yield
    finally:
        _instead = before


def _attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    return (_instead or sdpa)(q, k, v, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register("bench", _attention)


class AttentionOps(TorchDispatchMode):
    """Names of the attention kernels that run, as PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in ATTENTION:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
