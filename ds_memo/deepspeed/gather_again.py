"""Gather a layer in the backward of a layer above it, which computes its input by this one (ds_memo.tiles.groups).

ZeRO-3 gathers ahead, so some of the layer's parameters may be under way. They are waited for as DeepSpeed does at the layer's own
turn, and stay: it then finds them gathered. The others are gathered as its coordinator gathers, so that they have the values that
the forward had (quantized on the way, or in a dtype of communication), and are released again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_memo.remat.gathered_params import partitioned

UNDER_WAY, STREAM, GATHER, RELEASE = (
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("inflight_param_registry", "allgather_stream", "all_gather_params", "release_param")
)
"""Private names of DeepSpeed's coordinator: parameters under way, by handle; the stream that gathers; two methods."""


def gathers_again(engine: deepspeed.DeepSpeedEngine) -> Callable[[nn.Module], AbstractContextManager[None]] | None:
    """Return what gathers a layer inside another layer's backward; None: this DeepSpeed has another coordinator."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:  # it is not ZeRO-3
        return lambda module: nullcontext()
    order = offload.get_param_coordinator()
    if not all(hasattr(order, name) for name in (UNDER_WAY, STREAM, GATHER, RELEASE)):
        return None
    live = weakref.ref(order)

    @contextmanager
    def gather(module: nn.Module) -> Iterator[None]:
        order = live()
        assert order is not None  # the engine's hooks, under which the backward runs, hold it
        own = partitioned(module)
        with torch.no_grad():
            if own:
                getattr(order, GATHER)(own, False)
            wait_for_parameters(order, module)
        try:
            yield
        finally:
            for parameter in own:
                getattr(order, RELEASE)(parameter)

    return gather


def wait_for_parameters(order: Any, module: nn.Module) -> None:
    """Wait for parameters of a layer that are under way, as ZeRO-3's own fetch of the layer does."""
    under_way, stream = getattr(order, UNDER_WAY), getattr(order, STREAM)
    found = [parameter for parameter in module.parameters() if parameter in under_way]
    if not found:
        return
    with get_accelerator().stream(stream):
        for parameter in found:
            under_way.pop(parameter).wait()
    if not get_accelerator().resolves_data_dependency():
        get_accelerator().current_stream().wait_stream(stream)
