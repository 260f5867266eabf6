"""Layouts of GPUs: ranks that split one sequence, replicas of them, and the ZeRO stage.

tp   tensor parallel, with the sequence split outside of the GEMMs (Megatron-LM)
cp   context parallel: ring attention
sp   ranks that share a sequence. DeepSpeed's Ulysses: all-to-alls around attention, each rank has some of the heads. ds_memo's
     own (method memo): Ulysses × ring, so that the heads bound neither
dp   data parallel: each replica takes its own sequences
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_memo.estimate.errors import EstimateError
from ds_memo.sequence.ulysses_size import ulysses_size

if TYPE_CHECKING:
    from ds_memo.estimate.model import Model


OFFLOADS = ("none", "optimizer", "all")
"""Model states on the host: none; those of the optimizer, with gradients and a buffer; bf16 parameters, too."""
LEAST_ZERO = {"none": 0, "optimizer": 1, "all": 3}
"""Least ZeRO stage at which DeepSpeed offloads."""


@dataclass(frozen=True)
class GpuLayout:
    gpus: int
    tp: int = 1
    cp: int = 1
    sp: int = 1
    ring: int = 1
    """Ranks of sp around which keys and values travel."""
    zero: int = 3
    offload: str = "none"
    """One of OFFLOADS."""

    @property
    def ranks(self) -> int:
        """Ranks that share one sequence."""
        return self.tp * self.cp * self.sp

    @property
    def ulysses(self) -> int:
        """Ranks that trade heads."""
        return self.sp // self.ring

    @property
    def dp(self) -> int:
        return self.gpus // self.ranks

    @property
    def sharded(self) -> int:
        """Ranks over which ZeRO shards a tensor-parallel rank's parameters."""
        return self.gpus // self.tp

    def __str__(self) -> str:
        rings = {"sp": f" = {self.ulysses} × {self.ring}"} if self.ring > 1 else {}
        split = [f"{name} {size}{rings.get(name, '')}" for name in ("tp", "cp", "sp", "dp") if (size := getattr(self, name)) > 1]
        return ", ".join([*split, f"ZeRO {self.zero}", *([] if self.offload == "none" else [f"offload {self.offload}"])])


def check(layout: GpuLayout, model: Model) -> GpuLayout:
    """Return the layout. Raises EstimateError if it cannot split this model or these GPUs."""
    heads = model.heads
    if layout.sp > 1 and not model.trades_heads:
        raise EstimateError(f"--sp {layout.sp}: {model.name} has keys and values of unequal size, which Ulysses does not trade")
    _check_gpus(layout)
    if heads % (layout.tp * layout.sp):
        most = largest_sp(model, layout.gpus)
        raise EstimateError(
            f"--tp {layout.tp} --sp {layout.sp}: {model.name} has {heads} attention heads, which must be a multiple of tp · sp; "
            f"Ulysses ends at sp {most} here"
        )
    if not _kv_splits(model.kv_heads, layout.sp):
        raise EstimateError(
            f"--sp {layout.sp}: {model.name} has {model.kv_heads} key/value heads; one of the two must be a multiple of the other"
        )
    return layout


def split(layout: GpuLayout, model: Model, gpus_per_node: int, ulysses: int | None = None) -> GpuLayout:
    """Return the layout with its sp as Ulysses × ring, as ds_memo splits it.

    Args:
        ulysses: as asked for; None: as a run chooses.

    Raises:
        EstimateError: it cannot split this model or these GPUs.
    """
    _check_gpus(layout)
    tp, heads, key_heads = layout.tp, model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    if model.heads % tp:
        raise EstimateError(f"--tp {tp}: {model.name} has {model.heads} attention heads, which must be a multiple of tp")
    chosen = ulysses or ulysses_size(layout.sp, heads, key_heads, max(1, gpus_per_node // (tp * layout.cp)))
    if layout.sp % chosen:
        raise EstimateError(f"--ulysses {chosen} with --sp {layout.sp}: expected a divisor of sp")
    if heads % chosen or not _kv_splits(key_heads, chosen):
        raise EstimateError(
            f"--sp {layout.sp} with --ulysses {chosen}: {model.name} has {heads} heads and {key_heads} key/value heads on a "
            "tensor-parallel rank, which are estimated only where all ranks get as many. Give another --ulysses"
        )
    return replace(layout, ring=layout.sp // chosen)


def _check_gpus(layout: GpuLayout) -> None:
    if layout.gpus % layout.ranks:
        raise EstimateError(
            f"--gpus {layout.gpus} is not a multiple of tp · cp · sp = {layout.tp} · {layout.cp} · {layout.sp} = {layout.ranks}"
        )


def largest_sp(model: Model, gpus: int) -> int:
    """Return the largest Ulysses size that the model's heads allow."""
    return max(_ulysses_sizes(model, gpus))


def every_sp(model: Model, gpus: int, zero: int, batch: int, gpus_per_node: int | None) -> list[GpuLayout]:
    """Return layouts with the least sp at which every replica has a sequence, and larger ones.

    Args:
        gpus_per_node: for ds_memo's own split; None: DeepSpeed's Ulysses.
    """
    if gpus_per_node is None:
        return _busy([GpuLayout(gpus, sp=sp, zero=zero) for sp in _ulysses_sizes(model, gpus)], batch)
    busy = _busy([GpuLayout(gpus, sp=sp, zero=zero) for sp in _divisors(gpus)], batch)
    return [split(layout, model, gpus_per_node) for layout in busy]


def every_cp(layout: GpuLayout, batch: int) -> list[GpuLayout]:
    """Return this layout with the cp at which every replica has a sequence, and larger ones."""
    return _busy([replace(layout, cp=cp) for cp in _divisors(layout.dp)], batch)


def _busy(found: list[GpuLayout], batch: int) -> list[GpuLayout]:
    """Return the layouts whose replicas all have a sequence; if there is none, those with the fewest replicas."""
    least = min(layout.dp for layout in found)
    return [layout for layout in found if layout.dp <= max(batch, least)]


def _ulysses_sizes(model: Model, gpus: int) -> list[int]:
    sizes = _divisors(gpus) if model.trades_heads else [1]
    return [sp for sp in sizes if model.heads % sp == 0 and _kv_splits(model.kv_heads, sp)]


def _kv_splits(kv_heads: int, sp: int) -> bool:
    return kv_heads % sp == 0 or sp % kv_heads == 0


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
