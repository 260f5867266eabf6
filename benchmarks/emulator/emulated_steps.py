"""One step on the emulated device: time, bytes requested and reserved, calls of CUDA, planned addresses, solution."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.emulated_time import Clock
from benchmarks.timing import Memory, served
from ds_memo.units import GIB

if TYPE_CHECKING:
    from ds_memo.runtime.handle import MemoHandle

HEADER = "step       ms  requested   reserved      arena  predicted  cudaMalloc   hits  residents  alpha  missed      (GiB)"


class Step:
    """A step that begins now.

    Args:
        handle: None: it is not under ds_memo.
    """

    def __init__(self, clock: Clock, handle: MemoHandle | None) -> None:
        self._clock, self._handle = clock, handle
        self._memory = Memory(torch.device("cuda", 0))
        self._plan = (handle and handle.report()["plan"]) or {}
        self._begin, self._waits = torch.cuda.Event(enable_timing=True), clock.host_waits()
        self._kernels = clock.kernels()
        self._begin.record()

    def row(self, number: int, binding: str | None = None, **more: Any) -> dict[str, Any]:
        """End the step and return its row.

        Args:
            binding: text of the row if there is no handle.
        """
        waits = self._clock.host_waits() - self._waits
        (end := torch.cuda.Event(enable_timing=True)).record()
        end.synchronize()
        took = self._memory.read(1, lambda: None)
        report = self._handle.report() if self._handle else collections.defaultdict(lambda: None, binding=binding, warnings=[])
        plan = report["plan"] or {"arena": 0, "misses": {}, "hits": 0}
        between = served(self._plan, plan)
        return {
            "step": number,
            **more,
            "ms": self._begin.elapsed_time(end),
            "host_waits": waits,
            "kernels": self._clock.kernels() - self._kernels,
            "requested": took["device_peak"],
            "reserved": took["device_reserved_peak"],
            "mallocs": took["cuda_mallocs_per_step"],
            "arena": plan["arena"],
            "hits": between["hits"],
            "missed": between["misses"],
            "predicted": report["predicted"] and report["predicted"]["device_bytes"],
            "predicted_s": report["predicted"] and report["predicted"]["layers_s"],
            "stall_s": report["stall_s"],
            "tiles": report["tiles"],
            "nvme": report["nvme"],
            "residents": report["resident_layers"] or 0,
            "alpha": report["alpha"] or 0.0,
            "binding": report["binding"],
            "changes": (report["profile"] or {}).get("changes", []),
            "warnings": report["warnings"],
        }


def line(row: dict[str, Any]) -> str:
    """Format a row as a line under HEADER."""
    gib = "  ".join(f"{(row[name] or 0) / GIB:9.3f}" for name in ("requested", "reserved", "arena", "predicted"))
    counts = f"{row['mallocs']:10.0f}  {row['hits']:5d}  {row['residents']:9d}  {row['alpha']:5.3g}"
    return f"{row['step']:4d}  {row['ms']:7.1f}  {gib}  {counts}  {row['missed'] or ''}"
