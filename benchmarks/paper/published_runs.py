"""The estimator beside published measurements that name their settings: python -m benchmarks.published_runs [-o FILE.json]

All of them checkpoint every layer. published_runs.json has measurements, sources and settings:

    kernel    of attention, at the rates that the FlashAttention-3 paper measured on H100
    inputs    layer inputs on the device at once: "all", or a number where they go to the host
    waits     compute waits for their copies: ALST's, and those of Transformers' `offload`, which run on its stream
    mlp       "tiled": DeepSpeed's TiledMLP, which runs the MLP once more
    loss      "chunked": no logits of all tokens
    full      the longest that trained: the device was full
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.methods import LOGIT_BYTES, gathered_bytes, state_bytes
from ds_memo.estimate.model import Model, from_config, load
from ds_memo.placement import PlacementKind
from ds_memo.solve.run_costs import LayerCosts, RunCosts
from ds_memo.solve.schedule import Schedule
from ds_memo.units import GIB, short

DATA = Path(__file__).with_suffix(".json")
MODELS = Path(__file__).resolve().parents[2] / "ds_configs" / "models"
TILED_UNITS = 12.1
"""Peak of a layer's backward with TiledMLP, in hidden states: docs/benchmarks.md, by the emulator."""


class Answer(NamedTuple):
    seconds: float
    optimizer_s: float
    """The optimizer's step in these, with what is sent for it."""
    parts: dict[str, float]
    """Bytes of a GPU."""

    @property
    def gib(self) -> float:
        return sum(self.parts.values()) / GIB


def machine(kernel: str) -> Hardware:
    forward, backward = (rate * 1e12 for rate in json.loads(DATA.read_text())["kernels"][kernel])
    h100 = hardware.load("h100")
    return replace(h100, attention_forward_efficiency=forward / h100.peak, attention_backward_efficiency=backward / h100.peak)


def model(name: str, fused: bool) -> Model:
    """Return a model of ds_configs, or one whose config is in the data."""
    config = json.loads(DATA.read_text())["models"].get(name)
    return from_config(config, name, fused) if config else load(str(MODELS / f"{name}.json"), fused)


def answer(run: dict[str, Any]) -> Answer:
    """Estimate one of the runs."""
    layout = Layout(run["gpus"], cp=run.get("cp", 1), sp=run.get("sp", 1), offload=run.get("offload", "none"))
    costs = Costs(model(run["model"], run.get("fused", False)), machine(run["kernel"]), layout, run["tokens"])
    layers = tuple(_checkpointed(layer, costs, run) for layer in costs.layers())
    plain = RunCosts(layers, costs.hardware.d2h, costs.h2d, host_budget=0, device_budget=0, head_s=costs.head_s)
    optimizer_s = costs.optimizer_s(1)
    seconds = Schedule(plain, [PlacementKind.ON_DEVICE] * len(layers)).at(1.0).seconds + optimizer_s
    return Answer(seconds, optimizer_s, _device_bytes(costs, run))


def _checkpointed(layer: LayerCosts, costs: Costs, run: dict[str, Any]) -> LayerCosts:
    again_s, backward_s = layer.replay_s + layer.gemm_s + layer.attention_s, layer.backward_s
    waits = costs.hidden_bytes if run.get("waits") else 0
    if run.get("mlp") == "tiled":  # the MLP is all that follows attention's projection; its weights' gradients are summed in bf16
        projected = next(o.born for o in layer.outputs if o.role == "gemm" and o.born > layer.outputs[-1].born / 3)
        sums = math.ceil(costs.tokens / costs.model.hidden) * 6 * costs.model.layer_parameters
        rate = costs.hardware.device_bandwidth * costs.hardware.device_bandwidth_efficiency
        backward_s += (1 - projected) * layer.forward_s + sums / rate
    return replace(
        layer,
        outputs=(),
        forward_s=layer.forward_s + waits / costs.hardware.d2h,
        backward_s=backward_s,
        replay_s=max(again_s, costs.gather_s) + waits / costs.h2d,
        gemm_s=0.0,
    )


def _device_bytes(costs: Costs, run: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of a GPU by part, without what an allocator loses between its blocks."""
    layers, hidden = costs.layers(), costs.hidden_bytes
    inputs = len(layers) if run["inputs"] == "all" else run["inputs"]
    whole = max(max(layer.working.forward, layer.working_without_attention.backward) for layer in layers)
    parts = state_bytes(costs) | {
        "gathered parameters": gathered_bytes(costs),
        "inputs of layers": hidden * inputs,
        "a layer's backward": TILED_UNITS * hidden if run.get("mlp") == "tiled" else whole,
        "logits": costs.tokens * costs.model.vocab * LOGIT_BYTES if run["loss"] == "whole" else 0.0,
        "context and communication": costs.hardware.device_reserve,
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


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
