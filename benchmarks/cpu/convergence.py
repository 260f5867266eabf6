"""Loss curves of stock DeepSpeed and of memo at alpha 0, 1/8, 1/4, 1/2 and 1, on one rank and with two ranks to a sequence.

    python -m benchmarks.convergence [--steps 300] [--seq-length 256] [--out benchmarks/results]

Trains ds_configs/models/tiny.json in fp32 on this Python's own sources with launch/train.py, one run after another, on the same
batches. One more stock run has linear layers that add up their inner dimension in two parts: how far that drifts from
stock is the floating-point noise of a reordered GEMM, and memo's curves must stay within as much. Writes convergence-DEVICE.json
(every loss) and docs/convergence.png; prints a table; ends with 1 where a curve leaves the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.results import FOLDER

REPO = Path(__file__).parents[2]
ALPHAS = {"0": 0.0, "1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0}
NOISE = "stock, GEMMs reordered"
WINDOW = 20
"""Steps in a mean: single steps cross each other by chance."""
FACTOR = 3.0
"""Allowed drift of a curve over that of the reordered one: both are single draws."""
FLOOR = 1e-6
"""Below this, relative, there is nothing to compare."""


def deepspeed_config(ranks: int, alpha: float | None) -> dict:
    config = json.loads((REPO / "ds_configs" / "quickstart.json").read_text())
    config["sequence_parallel_size"] = ranks
    if alpha is None:
        del config["memo"]
    else:
        config["memo"] = {"enabled": True, "alpha": alpha, "resident_layers": 0}
    return config


def every_run(rank_counts: list[int]) -> dict[str, tuple[int, float | None]]:
    """Return ranks and alpha by name; alpha None: stock."""
    runs: dict[str, tuple[int, float | None]] = {}
    for ranks in rank_counts:
        where = "1 rank" if ranks == 1 else f"Ulysses {ranks}"
        runs[f"stock, {where}"] = ranks, None
        runs.update({f"alpha {name}, {where}": (ranks, alpha) for name, alpha in ALPHAS.items()})
    return runs | {NOISE: (1, None)}


def train(name: str, ranks: int, alpha: float | None, folder: Path, steps: int, length: int) -> dict:
    """Run launch/train.py in processes of its own and return its metrics."""
    stem = folder / name.replace(", ", "-").replace(" ", "_").replace("/", "over")
    metrics, config = stem.with_suffix(".json"), stem.with_suffix(".deepspeed")
    config.write_text(json.dumps(deepspeed_config(ranks, alpha)))
    entry = [__file__, "--reordered"] if name == NOISE else [REPO / "launch" / "train.py"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *entry]
    command += ["--deepspeed_config", config, "--model", REPO / "ds_configs/models/tiny.json", "--seq-length", length]
    command += ["--steps", steps, "--metrics-json", metrics]
    where = {"LOCAL_SIZE": str(ranks), "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)]))}
    if not torch.cuda.is_available():
        where |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with stem.with_suffix(".log").open("w") as log:
        done = subprocess.run([str(word) for word in command], env=os.environ | where, stdout=log, stderr=log, check=False)
    if done.returncode:
        sys.exit(f"{name} failed: see {log.name}")
    return json.loads(metrics.read_text())


def train_reordered(arguments: list[str]) -> None:
    """Run launch/train.py in this process, with linear layers that sum in another order."""

    def forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        half = layer.in_features // 2
        return F.linear(x[..., half:], layer.weight[:, half:], layer.bias) + F.linear(x[..., :half], layer.weight[:, :half])

    torch.nn.Linear.forward = forward
    sys.argv = ["train.py", *arguments]
    sys.path.insert(0, str(REPO / "launch"))
    runpy.run_path(str(REPO / "launch" / "train.py"), run_name="__main__")


def drift(losses: list[float], stock: list[float]) -> float:
    """The largest relative difference between means over WINDOW steps."""
    width = min(WINDOW, len(stock))
    mean = lambda values, start: sum(values[start : start + width]) / width  # noqa: E731
    return max(abs(mean(losses, i) - mean(stock, i)) / mean(stock, i) for i in range(len(stock) - width + 1))


def table(curves: dict[str, list[float]]) -> tuple[str, bool]:
    """Return the table, and True if all is within the noise."""
    one = curves["stock, 1 rank"]
    noise = drift(curves[NOISE], one)
    lines = [f"{'run':<26}{'first loss':>12}{'last loss':>12}{'equal steps':>13}{'drift':>10}{'from one rank':>15}"]
    within = True
    for name, losses in curves.items():
        stock = curves["stock, " + name.split(", ")[1]] if name != NOISE else one
        equal = sum(a == b for a, b in zip(losses, stock, strict=True))
        away, across = drift(losses, stock), drift(losses, one)
        good = max(away, across) <= max(FACTOR * noise, FLOOR)
        within &= good
        numbers = f"{losses[0]:>12.6f}{losses[-1]:>12.6f}{equal:>13}{away:>10.1e}{across:>15.1e}"
        lines.append(f"{name:<26}{numbers}{'' if good else '  TOO FAR'}")
    lines.append(
        f"""
equal steps: whose loss equals, to the bit, that of the stock run on as many ranks. Drift: largest relative difference of
means over {WINDOW} steps from that run, and from the one on one rank; allowed are {FACTOR:g} times a reordered GEMM's."""
    )
    return "\n".join(lines), within


def picture(curves: dict[str, list[float]], path: Path) -> None:
    """Draw all curves, and below them how far each is from stock."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    stock = curves["stock, 1 rank"]
    for number, (name, losses) in enumerate(curves.items()):
        look = {"color": "black"} if "stock" in name else {"color": colormaps["viridis"](number / len(curves))}
        look |= {"linestyle": ":" if name == NOISE else "--" if "Ulysses" in name else "-", "label": name, "linewidth": 1.2}
        steps = range(1, len(losses) + 1)
        upper.plot(steps, losses, **look)
        lower.plot(steps, [max(abs(a - b) / b, 1e-9) for a, b in zip(losses, stock, strict=True)], **look)
    upper.set_ylabel("training loss")
    upper.set_title(f"{len(curves)} runs of {len(stock)} steps")
    upper.legend(fontsize=7, ncols=2)
    lower.set_yscale("log")
    lower.set_ylabel("relative difference from stock, 1 rank")
    lower.set_xlabel("optimizer step")
    figure.savefig(path, dpi=110)


def main() -> int:
    if sys.argv[1:2] == ["--reordered"]:
        train_reordered(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-length", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "convergence", help="where the runs' own files are kept")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = [1, 2] if device == "cpu" or torch.cuda.device_count() > 1 else [1]
    args.runs.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    curves, facts = {}, {}
    for name, (ranks, alpha) in (bar := tqdm(every_run(counts).items(), unit="run")):
        bar.set_description(name)
        run = train(name, ranks, alpha, args.runs, args.steps, args.seq_length)
        curves[name] = [step["loss"] for step in run["steps"]]
        report = run["report"] or {}
        facts[name] = {key: report.get(key) for key in ("alpha", "bytes_to_host", "gemm_flops_recomputed_fraction")}
    text, within = table(curves)
    print(text)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "device": device, "machine": platform.machine()}
    versions |= {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"cpus": os.cpu_count()}
    done = {"versions": versions, "steps": args.steps, "seq_length": args.seq_length, "runs": facts, "losses": curves}
    (args.out / f"convergence-{device}.json").write_text(json.dumps(done) + "\n")
    picture(curves, REPO / "docs" / "convergence.png" if args.out == FOLDER else args.out / "convergence.png")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
