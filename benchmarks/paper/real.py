"""The estimator against real runs: python -m benchmarks.real [RESULT.json …]

Takes what `bash benchmarks/gpu.sh check` wrote (default: all of benchmarks/results/check-*.json) and prints, with errors: bytes
stored per layer (bar 2 %), and on a known GPU the time of a step by variant (bar 5 %), with the link speeds of the same result.
Ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.hardware import Hardware
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import from_config, load
from ds_memo.estimate.simulate import Simulated, simulate
from ds_memo.placement import ON_DEVICE, Placement, PlacementKind
from ds_memo.solve.run_costs import RunCosts

ROOT = Path(__file__).resolve().parents[2]

BYTES_BAR, TIME_BAR = 0.02, 0.05
_NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
SHAPES = {"gpt": "gpt-7b", "llama": "llama3-8b"}


class Row(NamedTuple):
    what: str
    measured: float
    predicted: float
    bar: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def stored_bytes(result: dict[str, Any]) -> Iterator[Row]:
    """Yield bytes per layer, in units of its hidden states: independent of width and length."""
    machine = hardware.load("a800")  # bytes know no machine
    for row in {(r["shape"], r["alpha"]): r for r in result["memory"]["rows"]}.values():
        model = load(str(ROOT / "ds_configs" / "models" / f"{SHAPES[row['shape']]}.json"))
        costs = Costs(model, machine, Layout(1, zero=0), 1 << 14)
        stored = costs.layers()[0].stored_bytes(Placement(PlacementKind.SWAPPED, row["alpha"])) / costs.hidden_bytes
        yield Row(f"stored per layer, {row['shape']}, alpha {row['alpha']:g}", row["stored"], stored, BYTES_BAR)


def machine_of(result: dict[str, Any]) -> Hardware | None:
    """Return the GPU of a result, with its measured link; None if the estimator does not know it."""
    if (name := hardware.named(result["environment"]["device"])) is None:
        return None
    rates = result["link"]["gb_per_s"]
    return replace(hardware.load(name), d2h=1e9 * rates["d2h"], h2d=1e9 * rates["h2d"])


def step_times(result: dict[str, Any], machine: Hardware) -> Iterator[Row]:
    """Forward and backward of the harness's GPT: vocabulary 512, one sequence, two resident layers."""
    step = result["step"]
    hidden, layers = step["hidden"], step["layers"]
    heads = max(1, hidden // 128)
    shape = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 512, "n_positions": step["tokens"]}
    gpt = {"model_type": "gpt2", "activation_function": "gelu_pytorch_tanh", "bos_token_id": 0, "eos_token_id": 0, **shape}
    costs = Costs(from_config(gpt | _NO_DROPOUT, "gpt"), machine, Layout(1, zero=0), step["tokens"])
    layer = costs.layers()[0]
    run = RunCosts((layer,) * layers, machine.d2h, machine.h2d, 0, 0, head_s=costs.head_s)
    bare = replace(layer, outputs=(), replay_s=0.0, gemm_s=0.0)
    alone, again = (replace(run, layers=(x,) * layers) for x in (bare, replace(bare, replay_s=layer.forward_s)))
    everyone, last = (ON_DEVICE,) * layers, (ON_DEVICE,) * 2

    def at(alpha: float) -> Simulated:
        return simulate(run, (Placement(PlacementKind.SWAPPED, alpha),) * (layers - 2) + last)

    predicted = {
        "no checkpointing": simulate(alone, everyone),
        "torch checkpoint": simulate(again, everyone),
    }
    predicted |= {f"alpha {alpha:g}": at(alpha) for alpha in (0.0, 0.5, 1.0)}
    for name, samples in step["samples_s"].items():
        yield Row(f"step, {name}, ms", 1e3 * statistics.median(samples), 1e3 * predicted[name].seconds, TIME_BAR)


def compare(path: Path) -> bool:
    """Print one result and return True if all bars hold."""
    result = json.loads(path.read_text())
    machine = machine_of(result)
    print(f"{path.name}: {result['environment']['device']}")
    rows = list(stored_bytes(result))
    if machine is None:
        print("    times are not predicted: not a GPU of ds_memo/estimate/hardware_data")
    else:
        rows += step_times(result, machine)
    for row in rows:
        missed = " MISSED" if abs(row.error) > row.bar else ""
        print(f"    {row.what:40s} measured {row.measured:10.3f}   predicted {row.predicted:10.3f}   {row.error:+7.1%}{missed}")
    return all(abs(row.error) <= row.bar for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, default=sorted((ROOT / "benchmarks" / "results").glob("check-*.json")))
    return 0 if all([compare(path) for path in parser.parse_args().results]) else 1


if __name__ == "__main__":
    sys.exit(main())
