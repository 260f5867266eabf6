"""The account of an attached model: its report, and of that what DeepSpeed's monitors are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_memo.autotune.policy import PlacementPolicy
from ds_memo.placement import PlacementKind
from ds_memo.remat.call import Work
from ds_memo.remat.checkpoint import Layer
from ds_memo.show.report import Report
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_slab import HostSlab


def report(
    layers: Sequence[Layer], work: Work, engine: SwapEngine, policy: PlacementPolicy, slab: HostSlab, **others: Any
) -> Report:
    """Report what is set and what happened so far.

    Args:
        others: entries that are said as they are.
    """
    traffic, on_device = engine.traffic, policy.calls(PlacementKind.ON_DEVICE)
    return Report(
        active=traffic.bytes_to_host > 0,
        alpha=policy.alpha_used,
        resident_layers=len(on_device),
        layers_on_device=on_device,
        layers_without_gemms=policy.calls(PlacementKind.GEMMS_RECOMPUTED, PlacementKind.FULL_RECOMPUTE),
        layers_without_recompute=policy.calls(PlacementKind.NO_RECOMPUTE),
        binding=policy.binding,
        checkpointing=not policy.no_recompute,
        layers=len(layers),
        frames=traffic.frames,
        bytes_to_host=traffic.bytes_to_host,
        bytes_from_host=traffic.bytes_from_host,
        stored_bytes_per_layer=[
            0 if policy.is_without_recompute(layer) or not layer.latest else layer.latest.layout.stored_bytes for layer in layers
        ],
        gemm_flops_recomputed_fraction=_recomputed(work, traffic.frames),
        attention_recomputed=work.attention_ops_recomputed,
        host={
            "budget": slab.budget.share,
            "slab": slab.size,
            "peak_used": slab.peak_used,
            "locked_bytes_per_s": slab.pool.locked_bytes / slab.pool.locking_s if slab.pool.locking_s else None,
            "numa_node": slab.pool.node.number if slab.pool.node else None,
        },
        stall_s=engine.streams.stall_s(),
        predicted=policy.pass_solution.predicted() if policy.pass_solution else None,
        **others,
    )


def _recomputed(work: Work, frames: int) -> float | None:
    """Return the share of the layers' GEMM FLOPs that ran again; None: layers ran, and no GEMM was seen in them."""
    if work.gemm_flops:
        return work.gemm_flops_recomputed / work.gemm_flops
    return None if frames else 0.0


def events(report: Report, samples: int) -> list[tuple[str, float, int]]:
    """Name, value, and how many samples the run has seen."""
    values = {
        "alpha": report["alpha"],
        "resident_layers": report["resident_layers"],
        "bytes_to_host": report["bytes_to_host"],
        "bytes_from_host": report["bytes_from_host"],
        "stall_s": sum(report["stall_s"].values()),
        "mfu": report["mfu"],
    }
    return [(f"Train/Samples/memo_{name}", value, samples) for name, value in values.items() if value is not None]
