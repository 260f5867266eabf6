"""Would a scan's output, kept for the backward, pay? What computing it again takes for each byte, beside GEMMs and attention.

    python -m benchmarks.scans [--hardware h200]

Estimated: prices of ds_memo/estimate on the meta device. A kept scan needs its output and what its backward takes from its
forward (flash-linear-attention: the inverse A of each chunk); all else of a layer is made again anyway.
"""

from __future__ import annotations

import argparse
import collections
import sys
from typing import Any

import torch

from benchmarks.workloads import HYBRIDS, build, shapes
from ds_memo.estimate.hardware import Hardware, load
from ds_memo.estimate.kernels import PRODUCTS, Clock
from ds_memo.estimate.layers import Layers
from ds_memo.estimate.meta_kernels import ATTENTION, NAME
from ds_memo.hf.meta_model import build_without_memory

TOKENS = 1 << 18


class ByPart(Clock):
    """Sums up seconds, and the bytes to keep in place of computing again, by part of a layer."""

    def __init__(self, machine: Hardware) -> None:
        super().__init__(machine, TOKENS)
        self.parts: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])

    def _cost_s(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        seconds = super()._cost_s(func, args, kwargs, result)
        name = func._schema.name
        if "delta_rule" in name:
            part, kept = "scan", result[0].nbytes + result[-1].nbytes
        elif "chunk_scan" in name:
            part, kept = "scan", result[0].nbytes
        elif name == "ds_memo::attention":
            part, kept = "attention", sum(x.nbytes for x in result)
        elif func._overloadpacket in PRODUCTS:
            part, kept = "GEMMs", result.nbytes
        else:
            part, kept = "all others", 0
        self.parts[part][0] += seconds
        self.parts[part][1] += kept
        return seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.scans", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    machine = load(parser.parse_args(arguments).hardware)
    print(f"{TOKENS:,} tokens on {machine.name}; ns of a layer's forward and bytes to keep, of a token")
    for workload in HYBRIDS:
        config = build(shapes(torch.device("cuda"))[workload], torch.device("meta")).config.to_dict()
        layers = Layers(build_without_memory(config, workload, NAME, ATTENTION), fused=False)
        for call in layers._calls.values():
            fn, args, _ = call.at(TOKENS)
            clock = ByPart(machine)
            with torch.no_grad(), layers._running(1, 1, clock):
                fn(*args)
            for part, (seconds, kept) in clock.parts.items():
                per = f"{kept / TOKENS:8.0f} bytes, {1e12 * seconds / kept:7.2f} ns a KB" if kept else ""
                print(f"{workload:10s} {call.layer.name:16s} {part:10s} {1e9 * seconds / TOKENS:8.1f} ns  {per}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
