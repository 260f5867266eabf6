"""The estimator beside published measurements that name their settings: python -m benchmarks.published_runs [-o FILE.json]

All of them checkpoint every layer. published_runs.json has measurements, sources and settings:

    kernel    of attention, as memo.attention names it
    inputs    layer inputs on the device at once: "all", or a number where they go to the host
    waits     compute waits for their copies: ALST's, and those of Transformers' `offload`, which run on its stream
    mlp       "tiled": DeepSpeed's TiledMLP, which runs the MLP once more
    loss      "chunked": no logits of all tokens
    full      the longest that trained: the device was full
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import GpuLayout
from ds_memo.estimate.methods import state_bytes
from ds_memo.estimate.model import Model, from_config, load
from ds_memo.estimate.stock import Checkpointing
from ds_memo.placement import PlacementKind
from ds_memo.solve.run_costs import RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.units import GIB, short

DATA = Path(__file__).with_suffix(".json")
MODELS = Path(__file__).resolve().parents[2] / "ds_configs" / "models"


class Answer(NamedTuple):
    seconds: float
    optimizer_s: float
    """The optimizer's step in these, with what is sent for it."""
    parts: dict[str, float]
    """Bytes of a GPU."""

    @property
    def gib(self) -> float:
        return sum(self.parts.values()) / GIB


def machine(kernel: str | None) -> Hardware:
    """Return an H100 on which attention runs by a kernel, as memo.attention names it; None: by PyTorch's choice."""
    return hardware.load("h100").attending_with(kernel)


def model(name: str, fused: bool) -> Model:
    """Return a model of ds_configs, or one whose config is in the data."""
    config = json.loads(DATA.read_text())["models"].get(name)
    return from_config(config, name, fused) if config else load(str(MODELS / f"{name}.json"), fused)


def answer(run: dict[str, Any]) -> Answer:
    """Estimate one of the runs."""
    sizes = {name: run.get(name, 1) for name in ("cp", "sp", "ring")}
    layout = GpuLayout(run["gpus"], **sizes, offload=run.get("offload", "none"))
    costs = Costs(model(run["model"], run.get("fused", False)), machine(run["kernel"]), layout, run["tokens"])
    way = _way(run)
    layers = tuple(way.layer(layer, costs) for layer in costs.layers())
    plain = RunCosts(layers, costs.hardware.d2h, costs.h2d, host_budget=0, device_budget=0, head_s=costs.head_s)
    optimizer_s = costs.optimizer_s(1)
    seconds = Schedule(plain, [PlacementKind.ON_DEVICE] * len(layers)).at(1.0).seconds + optimizer_s
    states, context = state_bytes(costs), {"context and communication": costs.hardware.device_reserve}
    parts = {name: nbytes for name, nbytes in (states | way.device_bytes(costs) | context).items() if nbytes}
    return Answer(seconds, optimizer_s, parts)


def _way(run: dict[str, Any]) -> Checkpointing:
    inputs = None if run["inputs"] == "all" else run["inputs"]
    return Checkpointing(inputs, run.get("waits", False), run.get("mlp") == "tiled", run["loss"] == "whole")


def table(runs: list[dict[str, Any]], answers: list[Answer]) -> list[str]:
    """Return the rows of the table."""
    lines = [
        "| run | model | tokens | GPUs | measured s | estimated s | of it | measured GiB | estimated GiB | of it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run, found in zip(runs, answers, strict=True):
        length = short(run["tokens"]) if run["tokens"] % 1024 == 0 else f"{run['tokens']:,}"
        times, memory = _beside(run.get("s"), found.seconds), _beside(run.get("gib"), found.gib)
        if run.get("full"):
            memory[0] = "full"
        lines.append(f"| {' | '.join((run['name'], run['model'], length, str(run['gpus']), *times, *memory))} |")
    return lines


def _beside(measured: float | None, estimated: float) -> list[str]:
    ours = f"{estimated:,.0f}" if estimated >= 100 else f"{estimated:.1f}"
    return ["", ours, ""] if measured is None else [f"{measured:,}", ours, f"{estimated / measured:.2f}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.published_runs", description=__doc__.splitlines()[0])
    parser.add_argument("-o", type=Path, metavar="FILE", help="write the table's numbers, and the memory by part, as JSON")
    options = parser.parse_args(arguments)
    data = json.loads(DATA.read_text())
    answers = [answer(run) for run in data["runs"]]
    print(*table(data["runs"], answers), sep="\n")
    print("\nNot estimated:", *(f"- {what}: {why}" for what, why in data["not_estimated"].items()), sep="\n")
    if options.o:
        rows = [
            run
            | {"estimated_s": found.seconds, "optimizer_s": found.optimizer_s, "estimated_gib": found.gib}
            | {"parts_gib": {name: nbytes / GIB for name, nbytes in found.parts.items()}}
            for run, found in zip(data["runs"], answers, strict=True)
        ]
        options.o.write_text(json.dumps({"hardware": asdict(hardware.load("h100")), "runs": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
