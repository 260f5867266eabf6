"""Helpers of the engine's tests: tiny models, and attaching them with given streams, slab and engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

import ds_memo.runtime.session as session_module
from ds_memo.runtime.attach import attach
from ds_memo.runtime.session import Session
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_slab import HostSlab

VOCABULARY = 64
HOST = {"enabled": True, "host_memory_gib": 0.25}


def llama(layers: int) -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def gpt_neox(layers: int) -> nn.Module:
    torch.manual_seed(2)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_act="gelu_pytorch_tanh",
        use_parallel_residual=False,
        use_cache=False,
    )
    return GPTNeoXForCausalLM(config).train()


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, hidden)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """A plain model. Forward hooks make its layers misbehave."""

    def __init__(self, layers: int, hidden: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def tokens(seed: int, batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@contextmanager
def attached(
    model: nn.Module,
    streams: Any,
    config: dict[str, Any],
    engine: type[SwapEngine] = SwapEngine,
    slab: type[HostSlab] = HostSlab,
) -> Iterator[Session]:
    """Attach with `streams` in place of the device's own; a checker or poisoner also watches the slab."""

    def make_slab(*args: Any) -> HostSlab:
        made = slab(*args)
        return streams.watch(made) if hasattr(streams, "watch") else made

    with (
        mock.patch.object(session_module, "streams_for", lambda device: streams),
        mock.patch.object(session_module, "SwapEngine", engine),
        mock.patch.object(session_module, "HostSlab", make_slab),
    ):
        memo = attach(model, HOST | config)._session
    try:
        yield memo
    except BaseException:
        with suppress(Exception):  # the engine may be in any state; the first error is the one to see
            memo.detach()
        raise
    if not memo._detached:
        memo.detach()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
