"""The cost of a planned request against the stock allocator, in the same run.

    python -m benchmarks.allocator [--rounds N] [--json PATH]

One sample is the mean of 2,000 pairs of an allocation and its free, made in C++ through c10 as torch makes them; the memory is
not touched. The variants take turns, so that other load of the machine falls on all of them:

    stock    torch's allocator, the op not installed
    off      the op installed, no pass running
    native   a pass runs and the plan leaves the request to torch's allocator
    hit      a pass runs and every request gets its planned address, with 1 and with 100 other blocks alive in the arena

Bars, on the medians and at each size: hit ≤ 1.0 × stock, off ≤ 1.3 × stock. Ends with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ds_memo.compiled import compiler
from ds_memo.ops.allocator import NATIVE, Allocator

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
NEIGHBOURS = (1, 100)
PAIRS = 2000
WITH_WARM_UP = PAIRS + PAIRS // 10
BARS = {"off": 1.3, **{f"hit among {n}": 1.0 for n in NEIGHBOURS}}


def pairs_of(folder: Path, device: torch.device) -> Any:
    """The timed loop, compiled: a function of a size and a number of pairs."""
    torch_folder, out = Path(torch.__file__).parent, folder / "pairs.so"
    source = Path(__file__).with_name("allocator_pairs.cpp")
    libraries = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    command = [*compiler(), "-O3", "-std=c++20", "-shared", "-fPIC", source, *libraries, "-o", out]
    subprocess.run(list(map(str, command)), check=True)
    function = ctypes.CDLL(str(out)).nanoseconds_per_pair
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    kind = {"cpu": 0, "cuda": 1}[device.type]  # c10::DeviceType

    def timed(size: int, pairs: int) -> float:
        function(kind, size, pairs // 10)  # the variant before has moved the end of the heap
        return function(kind, size, pairs)

    return timed


def measure(rounds: int, device: torch.device) -> dict[str, Any]:
    allocator = Allocator(device)
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pairs = pairs_of(Path(folder), device)
        for label, size in SIZES.items():
            if size < allocator.min_bytes:
                continue  # never planned on this device
            samples[label] = of = {name: [] for name in ("stock", "native", *BARS)}
            for _ in range(rounds):
                allocator.uninstall()
                of["stock"].append(pairs(size, PAIRS))
                allocator.install()
                of["off"].append(pairs(size, PAIRS))
                of["native"].append(_in_a_pass(allocator, pairs, size, "native", 1, device))
                for neighbours in NEIGHBOURS:
                    of[f"hit among {neighbours}"].append(_in_a_pass(allocator, pairs, size, "hit", neighbours, device))
    allocator.uninstall()
    missed = []
    for label, of in samples.items():
        stock = statistics.median(of["stock"])
        print(f"{label:>7s}: stock {stock:.0f} ns", end="")
        for name in ("native", *BARS):
            ratio = statistics.median(of[name]) / stock
            bar = BARS.get(name, float("inf"))
            print(f", {name} {statistics.median(of[name]):.0f} ns ({ratio:.2f}{'' if ratio <= bar else ', OVER'})", end="")
            if ratio > bar:
                missed.append(f"allocator: {label}, {name}: {ratio:.2f} × stock, the bar is {bar}")
        print()
    return {"unit": "ns of an allocation and its free", "pairs": PAIRS, "bars": BARS, "samples_ns": samples, "failures": missed}


def _in_a_pass(allocator: Allocator, pairs: Any, size: int, outcome: str, neighbours: int, device: torch.device) -> float:
    """Time requests that share one slot, with blocks that stay alive on both sides of it."""
    small = allocator.min_bytes
    begin = neighbours // 2 * small
    offsets = [i * small + (size if i * small >= begin else 0) for i in range(neighbours)]
    slot = (size, begin if outcome == "hit" else NATIVE)
    allocator.load_plan(0, [("neighbours", [(small, offset) for offset in offsets]), ("timed", [slot] * WITH_WARM_UP)])
    allocator.reserve(neighbours * small + size)
    allocator.follow(0)
    allocator.phase("neighbours")
    alive = [torch.empty(small, dtype=torch.uint8, device=device) for _ in offsets]
    allocator.phase("timed")
    before = allocator.stats()[outcome]
    nanoseconds = pairs(size, PAIRS)
    served = allocator.stats()[outcome] - before
    if served != WITH_WARM_UP or allocator.live_blocks != neighbours:
        raise RuntimeError(f"allocator: {served} of {WITH_WARM_UP} requests were a {outcome}; the measurement means nothing")
    del alive
    allocator.release()
    return nanoseconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"torch": torch.__version__, "processor": platform.machine(), **measure(options.rounds, torch.device("cpu"))}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(result["failures"]) or "all bars met")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
