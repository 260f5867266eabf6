"""Rig of the engine's tests: attach a tiny model with given streams, slab and engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import nn

import ds_memo.runtime.session as session_module
from ds_memo.runtime.attach import attach
from ds_memo.runtime.session import Session
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_slab import HostSlab
from tests.inside import inside
from tests.models import VOCAB, build

HOST = {"enabled": True, "host_memory_gib": 0.25}
SIZES = {"hidden_size": 32, "intermediate_size": 48}


def llama(layers: int) -> nn.Module:
    return build("llama", num_hidden_layers=layers, use_cache=False, **SIZES)


def gpt_neox(layers: int) -> nn.Module:
    more = {"hidden_act": "gelu_pytorch_tanh", "use_parallel_residual": False}
    return build("neox", num_hidden_layers=layers, use_cache=False, **SIZES, **more)


def tokens(seed: int, batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@contextmanager
def attached(
    model: nn.Module, streams: Any, config: dict[str, Any], engine: type[SwapEngine] = SwapEngine, slab: type[HostSlab] = HostSlab
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
        memo = inside(attach(model, HOST | config))
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
