"""Models of which most layers have no attention: the longest length in tiles, step times, and what holds the device at the peak.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.hybrids [--workloads qwen3next nemotronh] [--budgets 16/64 24/115] [-o FILE.json]

For each width and budget (GiB of the device / of the host) three ways are searched for their longest length: ds_memo as it is,
with layers without attention whole, and checkpointing with layer inputs on the host. Then ds_memo trains where whole layers end.
The allocator's history of a step at three quarters of its longest length says what stands at the peak. Figures are the
emulator's, none is a GPU's. Parts that a file has already are not run again.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.capacity import longest, search_here
from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.emulated_time import keeping_time
from benchmarks.environment import environment
from benchmarks.layer_backward import function_of
from benchmarks.peak import at_peak
from benchmarks.rivals import MIXERS_WHOLE, PLANNED, RIVALS, Budget
from benchmarks.timing import Trainer
from benchmarks.workloads import HYBRIDS, batch, build, shapes
from ds_memo.estimate import hardware
from ds_memo.units import GIB

OFFLOAD = "hf_offload"
STARTS = {PLANNED: 1 << 18, MIXERS_WHOLE: 1 << 16, OFFLOAD: 1 << 16}
"""Where searches begin."""
BARS = {MIXERS_WHOLE: 3.0, OFFLOAD: 2.0}
"""Least ratios of ds_memo's longest length and each other's."""
EQUALLY_FAST = 1.0
PARTS = {
    "tiles/weight_gradients.py": "sums of weight gradients in fp32",
    "tiles/chain.py:_tile_backward": "a tile without attention, forward again and backward",
    "tiles/chain.py:_run_tile": "a tile without attention, forward again and backward",
    "tiles/attention.py": "attention's operands, output and their gradients",
    "tiles/attention_call.py": "attention's operands, output and their gradients",
    "tiles/layer.py:_tile": "a tile of an attention layer",
    "tiles/layer.py": "attention's operands, output and their gradients",
    "tiles/call_in_tiles.py": "hidden states and their gradient",
    "tiles/chain.py": "hidden states and their gradient",
    "swap/": "reload buffers",
    "remat/": "layers that run whole",
    "timing.py": "weights' gradients",
    "workloads.py:build": "weights",
}
"""Parts by the begin of a function of a request's stack. The first that is found counts."""


def parts_at_peak(trace: list[dict[str, Any]], unit: int) -> dict[str, float]:
    """Return the units of each part when most bytes are allocated, and of the code that asked for the largest of the rest."""
    nbytes: collections.Counter[str] = collections.Counter()
    for event in at_peak(trace).values():
        functions = [function_of(frame) for frame in event["frames"]]
        named = (part for begin, part in PARTS.items() if any(function.startswith(begin) for function in functions))
        inner = next((function for function in functions if "/torch/" not in function), "autograd")
        nbytes[next(named, f"other: {inner}")] += event["size"]
    return {part: round(size / unit, 4) for part, size in nbytes.most_common() if size > unit / 200}


def peak(workload: str, length: int, rival: str, budget: Budget) -> dict[str, Any]:
    """Train steps of a length and return what holds the device at the peak of the last."""
    shape, device = shapes(budget.device)[workload], budget.device
    model = build(shape, device)
    trainer = Trainer(model, batch(shape, length, device))
    before, unit = torch.cuda.memory_allocated(device), length * model.config.hidden_size * 2
    with RIVALS[rival].on(model, budget) as installed:
        for _ in range(3):
            trainer.step(installed)
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10**7)
        trainer.step(installed)
        (trace,) = torch.cuda.memory._snapshot(device)["device_traces"][:1]
        torch.cuda.memory._record_memory_history(enabled=None)
        tiles = installed.report()["tiles"]
    parts = parts_at_peak(trace, unit)
    return {"length": length, "unit": unit, "weights_and_gradients": before, "parts": parts, "tiles": tiles}


def child(options: argparse.Namespace) -> None:
    """Run one part in this process, whose CUDA is the emulator's, and write what it found."""
    without_values(options.host_gib)
    device, found = torch.device("cuda", 0), []
    with keeping_time(hardware.load("h200")), tempfile.TemporaryDirectory() as cache:
        budget = Budget(device, int(options.host_gib * GIB), int(options.device_gib * GIB), bandwidth=50e9, cache_dir=cache)
        if options.child == "peak":
            results.write(options.output, peak(options.workload, options.length, options.rival, budget), unfinished=False)
            return

        def tell(probe: dict[str, Any]) -> None:
            found.append({name: probe.get(name) for name in ("length", "fits", "steps", "step_s", "device_peak", "why")})
            report = probe.get("report") or {}
            found[-1] |= {name: report.get(name) for name in ("alpha", "resident_layers", "tiles", "binding")}
            print(f"    {options.rival}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
            results.write(options.output, {"probes": found, "torch": torch.__version__}, unfinished=True)

        lengths = [options.length] if options.length else []
        search_here(shapes(device)[options.workload], options.rival, budget, tell, lengths, STARTS[options.rival])
        results.write(options.output, {"probes": found, "torch": torch.__version__}, unfinished=False)


def run_part(what: str, workload: str, rival: str, gib: tuple[float, float], length: int = 0) -> dict[str, Any]:
    """Run a part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        given = {"child": what, "workload": workload, "rival": rival, "length": length, "output": path}
        given |= {"device-gib": gib[0], "host-gib": gib[1]}
        status = run_emulated("benchmarks.hybrids", [f"--{name}={value}" for name, value in given.items()], 139.8)
        if status:
            raise SystemExit(f"hybrids: {what} of {rival}, {workload}: exit {status}")
        return json.loads(path.read_text())


def measure(found: dict[str, Any], save: Any, workload: str, gib: tuple[float, float]) -> None:
    """Run all parts of one width and budget that are not there yet."""
    row = found["rows"].setdefault(f"{workload} {gib[0]:g}/{gib[1]:g}", {})

    def part(name: str, *arguments: Any, length: int = 0) -> dict[str, Any]:
        if name not in row:
            row[name] = run_part(*arguments, gib, length)
            save()
        return row[name]

    lengths = {}
    for rival in STARTS:
        best = longest(part(rival, "search", workload, rival)["probes"])
        lengths[rival] = best["length"] if best else 0
    if lengths[MIXERS_WHOLE]:
        part("where whole mixers end", "search", workload, PLANNED, length=lengths[MIXERS_WHOLE])
    if lengths[PLANNED]:
        unplanned = lengths[PLANNED] * 3 // 4 // 1024 * 1024  # an arena is one block, and has no parts
        part("peak", "peak", workload, "ds_memo", length=unplanned)


def claims(name: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bars of one width and budget."""
    best = {rival: longest(row[rival]["probes"]) for rival in STARTS}
    ours = best[PLANNED]
    if ours is None:
        return [results.unmeasured(f"{name}: longest length", "no length fits")]
    found = []
    for rival, bar in BARS.items():
        value = ours["length"] / best[rival]["length"] if best[rival] else float("inf")
        found.append({"claim": f"{name}: longest / longest of {rival}", "value": value, "bar": bar, "held": value >= bar})
    here = longest(row.get("where whole mixers end", {}).get("probes", []))
    if here and (whole := best[MIXERS_WHOLE]):
        value = here["step_s"] / whole["step_s"]
        what = f"{name}: step / step with mixers whole, at {here['length']:,} tokens"
        found.append({"claim": what, "value": value, "bar": EQUALLY_FAST, "held": value <= EQUALLY_FAST})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.hybrids", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=HYBRIDS, default=HYBRIDS)
    parser.add_argument("--budgets", nargs="+", default=["16/64", "24/115"], metavar="DEVICE/HOST", help="GiB")
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "hybrids-emulated.json", metavar="FILE.json")
    for hidden in ("child", "workload", "rival"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    for hidden in ("device-gib", "host-gib"):
        parser.add_argument(f"--{hidden}", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options)
        return 0
    found: dict[str, Any] = {"emulated": "bytes are real, times are a table's: no result of a GPU", "rows": {}}
    if options.output.exists():
        found |= json.loads(options.output.read_text())
    found["environment"] = environment(torch.device("cpu"))
    for workload in options.workloads:
        for budget in options.budgets:
            device, host = map(float, budget.split("/"))
            measure(found, lambda: results.write(options.output, found, unfinished=True), workload, (device, host))
    bars = [claim for name, row in found["rows"].items() for claim in claims(name, row)]
    found.pop("unfinished", None)
    results.write(options.output, found | {"claims": bars}, unfinished=False)
    for name, row in found["rows"].items():
        best = {rival: longest(row[rival]["probes"]) for rival in STARTS}
        print(name, *(f"{rival}: {probe['length'] if probe else 0:,}" for rival, probe in best.items()), sep="\n    ")
        print("    at the peak, units:", json.dumps(row.get("peak", {}).get("parts")))
    results.say_claims(bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
