"""Gather a layer in the backward of a layer above it, which computes its input by this one (ds_memo.tiles.groups).

ZeRO-3 gathers ahead, so some of the layer's parameters may be under way. They are waited for as DeepSpeed does at the layer's own
turn, and stay: it then finds them gathered. The others are partitioned again, and it gathers them once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from torch import nn

from ds_memo.remat.gathered_params import gathered

_OF_ORDER = "_PartitionedParameterCoordinator__"
UNDER_WAY, STREAM = f"{_OF_ORDER}inflight_param_registry", f"{_OF_ORDER}allgather_stream"


def gathers_again(engine: deepspeed.DeepSpeedEngine) -> Callable[[nn.Module], AbstractContextManager[None]] | None:
    """Return what gathers a layer inside another layer's backward; None: this DeepSpeed does not tell what is under way."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return gathered
    order = offload.get_param_coordinator()
    if not isinstance(getattr(order, UNDER_WAY, None), InflightParamRegistry) or not hasattr(order, STREAM):
        return None
    live = weakref.ref(order)

    @contextmanager
    def gather(module: nn.Module) -> Iterator[None]:
        if (order := live()) is not None:
            wait_for_parameters(order, module)
        with gathered(module):
            yield

    return gather


def wait_for_parameters(order: Any, module: nn.Module) -> None:
    """Wait for parameters of a layer that ZeRO-3 has begun to gather, as its own fetch of the layer does."""
    under_way, stream = getattr(order, UNDER_WAY), getattr(order, STREAM)
    found = [parameter for parameter in module.parameters() if parameter in under_way]
    if not found:
        return
    with get_accelerator().stream(stream):
        for parameter in found:
            under_way.pop(parameter).wait()
    if not get_accelerator().resolves_data_dependency():
        get_accelerator().current_stream().wait_stream(stream)
