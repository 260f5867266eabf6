"""Model states on the host, as DeepSpeed keeps them (`offload_optimizer`, `offload_param`): bytes, seconds of link and CPU.

offload      on the host                                              on the device
optimizer    fp32 weights, two moments, fp32 gradients; a bf16        bf16 parameters; under ZeRO-1 all gradients
             buffer of gradients (ZeRO-3) or parameters (ZeRO-1, 2)
all          the bf16 parameters too (ZeRO-3 only)                    parameters while they are gathered

Reduce buckets and DeepSpeed's staging buffers are not counted, nor is the rounding of pinned blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import Layout

if TYPE_CHECKING:
    from ds_memo.estimate.model import Model

OFFLOADS = ("none", "optimizer", "all")
LEAST_ZERO = {"none": 0, "optimizer": 1, "all": 3}
"""Least ZeRO stage at which DeepSpeed offloads."""
_HOST_BYTES = {"none": 0, "optimizer": 18, "all": 20}
"""Bytes on the host per parameter of a rank's shard."""
_HOST_MOVED = 42
"""Bytes through host memory per parameter of a rank's shard: CPU Adam reads four fp32 numbers and writes three (28), gradients
are scaled (8), and weights are rounded to bf16 (6)."""
_LEAST_SHARE = 0.5
"""Share of a link that activations get at least."""


class LinkSeconds(NamedTuple):
    """Seconds of one layer's model states on the link, at full speed."""

    forward_h2d: float
    backward_h2d: float
    backward_d2h: float


def host_state_bytes(model: Model, layout: Layout) -> float:
    """Return the bytes of one rank's model states on the host."""
    return _HOST_BYTES[layout.offload] * _shard(model, layout)


def layer_link_s(model: Model, hardware: Hardware, layout: Layout) -> LinkSeconds:
    """Return the seconds of one layer's copies that its computation hides, as far as it takes.

    Parameters come for the forward and for the backward (`all`). Under ZeRO-3 a bf16 gradient goes to the host and back, to be
    added up, and goes there again in fp32: DeepSpeed's partition_grads.
    """
    shard = model.layer_parameters / layout.tp / layout.sharded
    parameters = 2 * shard if layout.offload == "all" else 0.0
    gradients = shard if layout.offload != "none" and layout.zero == 3 else 0.0
    return LinkSeconds(parameters / hardware.h2d, (parameters + 2 * gradients) / hardware.h2d, (2 + 4) * gradients / hardware.d2h)


def activations_share(states_s: float, layer_s: float) -> float:
    """Return the share of a link's bandwidth that is left to activations.

    Args:
        states_s: seconds of a layer's model states on the link.
        layer_s: seconds of the layer's pass.
    """
    return max(_LEAST_SHARE, 1 - states_s / layer_s)


def step_s(model: Model, hardware: Hardware, layout: Layout, sequences: int) -> float:
    """Return the seconds of CPU Adam and of the copies that nothing hides.

    Below ZeRO-3 DeepSpeed copies gradients on the compute stream, unless overlap_comm is set.

    Args:
        sequences: sequences of this replica in a step.
    """
    shard = _shard(model, layout)
    ranks = min(layout.gpus, hardware.gpus_per_node)
    seconds = _HOST_MOVED * shard * ranks / (hardware.host_bandwidth * hardware.host_bandwidth_efficiency)
    if layout.offload == "optimizer":
        seconds += 2 * shard / hardware.h2d
    if layout.zero < 3:
        seconds += 4 * shard / hardware.d2h
    if layout.zero == 2 and sequences > 1:  # added up in bf16, on the host
        seconds += 2 * shard * (sequences / hardware.d2h + (sequences - 1) / hardware.h2d)
    return seconds


def _shard(model: Model, layout: Layout) -> float:
    """Return the parameters whose optimizer states one rank has."""
    return model.parameters / layout.tp / (layout.sharded if layout.zero else 1)
