"""Models of which most layers have no attention: the longest length in tiles, step times, and what holds the device at the peak.

    export DS_MEMO_CUDA_TORCH=/path/to/python
    python -m benchmarks.hybrids [--workloads qwen3next nemotronh] [--budgets 16/64 24/115] [-o FILE.json]

For each width and budget (GiB of the device / of the host) three ways are searched for their longest length: ds_memo as it is,
with layers without attention whole, and checkpointing with layer inputs on the host. Then ds_memo trains where whole layers end.
At the first budget the allocator's history of a step at three quarters of ds_memo's longest length says what stands at the peak.
Figures are the emulator's, none is a GPU's. Each point runs in a process of its own. Points that the file has are not run again:
name a new one to run all.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.capacity import Search, begin, longest, probe
from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.emulated_time import keeping_time
from benchmarks.environment import environment
from benchmarks.layer_backward import function_of
from benchmarks.peak import at_peak, source
from benchmarks.rivals import MIXERS_WHOLE, PLANNED, RIVALS, Budget
from benchmarks.timing import Trainer
from benchmarks.workloads import HYBRIDS, batch, build, shapes
from ds_memo.estimate import hardware
from ds_memo.units import GIB

OFFLOAD = "hf_offload"
STARTS = {
    OFFLOAD: {"qwen3next": 3.6, "nemotronh": 2.5},
    MIXERS_WHOLE: {"qwen3next": 4, "nemotronh": 2.5},
    PLANNED: {"qwen3next": 15, "nemotronh": 14},
}
"""Where searches begin: lengths in GRAIN for each GiB of the device."""
GRAIN = 1024
STRIDE = 1.125
BARS = {MIXERS_WHOLE: 3.0, OFFLOAD: 2.0}
"""Least ratios of ds_memo's longest length and each other's."""
EQUALLY_FAST = 1.0
PARTS = {
    "tiles/weight_gradients.py": "sums of weight gradients in fp32",
    "tiles/attention.py": "attention's operands, output and their gradients",
    "tiles/attention_call.py": "attention's operands, output and their gradients",
    "tiles/layer.py:_tile": "a tile",
    "tiles/tile_runs.py": "a tile",
    "tiles/layer.py:_pre": "attention's operands, output and their gradients",
    "tiles/layer.py:_new_result": "attention's operands, output and their gradients",
    "tiles/layer.py": "hidden states and their gradient",
    "swap/": "reload buffers",
    "remat/": "layers that run whole",
}
"""Parts by the begin of a function of a request's stack. The first that is found counts."""


def parts_at_peak(trace: list[dict[str, Any]], unit: int) -> dict[str, float]:
    """Return the units of each part when most bytes are allocated, and of the code that asked for the largest of the rest."""
    nbytes: collections.Counter[str] = collections.Counter()
    for event in at_peak(trace).values():
        functions = [function_of(frame) for frame in event["frames"]]
        named = (part for begin, part in PARTS.items() if any(function.startswith(begin) for function in functions))
        nbytes[next(named, f"other: {source(event['frames'])}")] += event["size"]
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
    """Run one point in this process, whose CUDA is the emulator's, and write what it found."""
    without_values(options.host_gib)
    device = torch.device("cuda", 0)
    shape = shapes(device)[options.workload]
    with keeping_time(hardware.load("h200")):
        gib = options.host_gib, options.device_gib
        budget = Budget(device, *(int(of * GIB) for of in gib), bandwidth=50e9, cache_dir=str(options.profile))
        if options.child == "peak":
            found = peak(options.workload, options.length, options.rival, budget)
        else:
            model, _ = begin(shape, options.rival, budget)
            found = probe(shape, options.length, options.rival, budget, model, options.steps - 1)
            report = found.pop("report", None) or {}
            found |= {name: report.get(name) for name in ("alpha", "resident_layers", "tiles", "binding")}
    results.write(options.output, found, unfinished=False)


@dataclass(frozen=True)
class Points:
    """Points of one width and budget, each in a process of its own.

    Args:
        gib: of the device, and of the host.
        folder: for what is compiled, and for the profiles that the points of a search share.
    """

    workload: str
    gib: tuple[float, float]
    folder: Path

    def run(self, what: str, rival: str, length: int, steps: int = 0, profile: str = "") -> dict[str, Any]:
        """Run a point.

        Args:
            profile: name of the profile that it shares; empty: it makes one of its own.
        """
        with tempfile.TemporaryDirectory() as own:
            output, kept = Path(own) / "point.json", self.folder / profile if profile else Path(own)
            given = {"child": what, "workload": self.workload, "rival": rival, "length": length, "steps": steps}
            given |= {"device-gib": self.gib[0], "host-gib": self.gib[1], "profile": kept, "output": output}
            words = [f"--{name}={value}" for name, value in given.items()]
            if status := run_emulated("benchmarks.hybrids", words, 139.8, compiled_in=self.folder):
                raise SystemExit(f"hybrids: {what} of {rival}, {self.workload}, {length:,} tokens: exit {status}")
            found = json.loads(output.read_text())
        results.say(f"    {rival}: {json.dumps(found)[:200]}")
        return found

    def search(self, rival: str, probes: list[dict[str, Any]], save: Callable[[], None]) -> None:
        """Add probes until the longest length is known: two steps of each length, and at the end all steps of the longest."""
        search = Search(GRAIN, start=round(STARTS[rival][self.workload] * self.gib[0]) * GRAIN, most=1 << 22, stride=STRIDE)
        full = RIVALS[rival].warm_up + 1

        def learn(found: dict[str, Any]) -> None:
            search.learn(found["length"], found["fits"])

        for known in probes:
            learn(known)
        while True:
            for length in search.lengths():
                probes.append(self.run("probe", rival, length, 2, f"{self.workload}, {rival}"))
                learn(probes[-1])
                save()
            if not search.longest or any(found["length"] == search.longest and found["steps"] >= full for found in probes):
                return
            probes.append(self.run("probe", rival, search.longest, full))
            learn(probes[-1])
            save()


def measure(points: Points, row: dict[str, Any], save: Callable[[], None], with_peak: bool) -> None:
    """Run all points that the row does not have."""
    best = {}
    for rival in STARTS:
        probes = row.setdefault(rival, [])
        points.search(rival, probes, save)
        best[rival] = longest(probes)
    if (whole := best[MIXERS_WHOLE]) and "where whole mixers end" not in row:
        row["where whole mixers end"] = points.run("probe", PLANNED, whole["length"], RIVALS[PLANNED].warm_up + 1)
        save()
    if with_peak and (ours := best[PLANNED]) and "peak" not in row:
        unplanned = ours["length"] * 3 // 4 // GRAIN * GRAIN  # an arena is one block, and has no parts
        row["peak"] = points.run("peak", "ds_memo", unplanned)
        save()


def claims(name: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bars of one width and budget."""
    best = {rival: longest(row.get(rival, [])) for rival in STARTS}
    ours = best[PLANNED]
    if ours is None:
        return [results.unmeasured(f"{name}: longest length", "no length fits")]
    found = []
    for rival, bar in BARS.items():
        value = ours["length"] / best[rival]["length"] if best[rival] else float("inf")
        found.append({"claim": f"{name}: longest / longest of {rival}", "value": value, "bar": bar, "held": value >= bar})
    if (here := row.get("where whole mixers end")) and (whole := best[MIXERS_WHOLE]):
        what = f"{name}: step / step with mixers whole, at {here['length']:,} tokens"
        if not here["fits"]:
            return [*found, results.unmeasured(what, here["why"])]
        value = here["step_s"] / whole["step_s"]
        found.append({"claim": what, "value": value, "bar": EQUALLY_FAST, "held": value <= EQUALLY_FAST})
    return found


def table(rows: dict[str, Any]) -> list[str]:
    """Return the rows as docs/benchmarks.md has them."""
    lines = ["| width | device / host GiB | ds_memo | layers without attention whole | `hf_offload` | ratios | step there, ms |"]
    lines.append("|" + "---|" * 7)
    for name, row in rows.items():
        ours, whole, offload = (longest(row.get(rival, [])) for rival in (PLANNED, MIXERS_WHOLE, OFFLOAD))
        lengths = [found["length"] if found else 0 for found in (ours, whole, offload)]
        ratios = ", ".join(f"{lengths[0] / length:.1f}" if length else "–" for length in lengths[1:])
        here = row.get("where whole mixers end", {})
        steps = [f"{found['step_s'] * 1e3:,.0f}" if found and found.get("fits") else "–" for found in (here, whole)]
        lines.append(f"| {' | '.join([*name.split(), *(f'{n:,}' for n in lengths), ratios, ' / '.join(steps)])} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.hybrids", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=HYBRIDS, default=HYBRIDS)
    parser.add_argument("--budgets", nargs="+", default=["16/64", "24/115"], metavar="DEVICE/HOST", help="GiB")
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "hybrids-emulated.json", metavar="FILE.json")
    for hidden in ("child", "workload", "rival"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    for hidden, kind in {"device-gib": float, "host-gib": float, "length": int, "steps": int, "profile": Path}.items():
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options)
        return 0
    found: dict[str, Any] = {"emulated": "bytes are real, times are a table's: no result of a GPU", "rows": {}}
    if options.output.exists():
        found |= json.loads(options.output.read_text())
    found["environment"] = environment(torch.device("cpu"))

    def save() -> None:
        results.write(options.output, found, unfinished=True)

    with tempfile.TemporaryDirectory() as folder:
        for workload in options.workloads:
            for number, budget in enumerate(options.budgets):
                device, host = map(float, budget.split("/"))
                row = found["rows"].setdefault(f"{workload} {device:g}/{host:g}", {})
                results.say(f"{workload} {budget}")
                measure(Points(workload, (device, host), Path(folder)), row, save, with_peak=number == 0)
    bars = [claim for name, row in found["rows"].items() for claim in claims(name, row)]
    found.pop("unfinished", None)
    results.write(options.output, found | {"claims": bars}, unfinished=False)
    results.say("\n".join(table(found["rows"])))
    for name, row in found["rows"].items():
        if "peak" in row:
            results.say(f"{name}, units at the peak of {row['peak']['length']:,} tokens: {json.dumps(row['peak']['parts'])}")
    results.say_claims(bars)
    return 0 if all(claim["held"] for claim in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
