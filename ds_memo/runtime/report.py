"""The report of an attached model, and what DeepSpeed's monitors are sent of it."""

from __future__ import annotations

from ds_memo.hf.kernels import ACCOUNT
from ds_memo.placement import PlacementKind
from ds_memo.remat import attention_kernels, follower
from ds_memo.remat.layer_host import Work
from ds_memo.runtime.session import Session
from ds_memo.runtime.throughput import model_flops_utilization
from ds_memo.sequence.parts import PARTS
from ds_memo.show.report_table import Report


def report(session: Session) -> Report:
    """Return what is set and what happened so far; bytes, seconds and counts of this rank.

    Raises:
        MemoError: after ``detach()``.
    """
    session.refuse_detached()
    engine, policy, slab, solution = session.engine, session.policy, session.slab, session.policy.pass_solution
    traffic, on_device = engine.traffic, policy.calls(PlacementKind.ON_DEVICE)
    step_s, tokens_per_s = session.speed.medians()
    return Report(
        active=traffic.bytes_to_host > 0,
        alpha=policy.alpha_used,
        resident_layers=len(on_device),
        layers_on_device=on_device,
        layers_without_gemms=policy.calls(PlacementKind.GEMMS_RECOMPUTED, PlacementKind.FULL_RECOMPUTE),
        layers_without_recompute=policy.calls(PlacementKind.NO_RECOMPUTE),
        layers_without_input=policy.calls(PlacementKind.SWAPPED_WITHOUT_INPUT),
        binding=policy.binding,
        checkpointing=not policy.no_recompute,
        layers=len(session.layers),
        frames=traffic.frames,
        bytes_to_host=traffic.bytes_to_host,
        bytes_from_host=traffic.bytes_from_host,
        stored_bytes_per_layer=[
            0 if policy.is_without_recompute(layer) or not layer.latest else layer.latest.layout.stored_bytes
            for layer in session.layers
        ],
        gemm_flops_recomputed_fraction=_recomputed(session.remat.work, traffic.frames),
        attention_recomputed=session.remat.work.attention_ops_recomputed,
        host={
            "budget": slab.budget.share,
            "slab": slab.size,
            "peak_used": slab.peak_used,
            "locked_bytes_per_s": slab.pool.locked_bytes / slab.pool.locking_s if slab.pool.locking_s else None,
            "numa_node": slab.pool.node.number if slab.pool.node else None,
            "record_and_replay": follower.way(),
        },
        stall_s=engine.streams.stall_s(),
        predicted=solution.predicted() if solution else None,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        mfu=model_flops_utilization(session.model(), session.hidden_shape(), tokens_per_s, engine.device),
        kernels=getattr(session.model(), ACCOUNT, None),
        attention_kernel=session.kernels_taken | attention_kernels.chosen(),
        eager_attention=dict(session.eager_attention),
        tiles=session.tiling.report() if session.tiling and _may_be_in_tiles(session) else None,
        logits=_logits(session),
        sequence=_sequence(session),
        profile=session.tuner.report() if session.tuner else None,
        plan=session.addresses.report(),
        nvme=session.drives.report() if session.drives else None,
        warnings=list(session.warnings),
    )


def _may_be_in_tiles(session: Session) -> bool:
    """Return False if the latest pass was solved with all layers whole. Tiles of an earlier one are still known."""
    solution = session.policy.pass_solution
    return solution is None or solution.run.tiles is not None


def _logits(session: Session) -> dict[str, int] | None:
    """Return the rows of a tile and the calls that gave lazy logits; None: logits are whole by configuration, or of no head."""
    if not session.heads:
        return None
    return {"tile_rows": max(head.rows for head in session.heads), "lazy_calls": sum(head.lazy_calls for head in session.heads)}


def _sequence(session: Session) -> dict[str, int] | None:
    """Return how many ranks share a sequence, and how they do; None: each rank has whole sequences, or DeepSpeed shares them."""
    modules = (layer.module() for layer in session.layers)
    shared = next((found for module in modules if module is not None and (found := vars(module).get(PARTS))), None)
    if shared is None:
        return None
    return {"ranks": shared.ranks.size, "ulysses": shared.ranks.ulysses, "ring": shared.ranks.ring}


def _recomputed(work: Work, frames: int) -> float | None:
    """Return the share of the layers' GEMM FLOPs that ran again; None: layers ran, and no GEMM was seen in them."""
    if work.gemm_flops:
        return work.gemm_flops_recomputed / work.gemm_flops
    return None if frames else 0.0


def events(report: Report, samples: int) -> list[tuple[str, float, int]]:
    """Return what DeepSpeed's monitors are sent after an optimizer step: name, value, and samples that the run has seen."""
    values = {
        "alpha": report["alpha"],
        "resident_layers": report["resident_layers"],
        "bytes_to_host": report["bytes_to_host"],
        "bytes_from_host": report["bytes_from_host"],
        "stall_s": sum(report["stall_s"].values()),
        "mfu": report["mfu"],
    }
    return [(f"Train/Samples/memo_{name}", value, samples) for name, value in values.items() if value is not None]
