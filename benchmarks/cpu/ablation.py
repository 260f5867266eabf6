"""The paper's ablations on one model in one go: full recompute, full swap, memo, each with and without planned addresses.

    python -m benchmarks.ablation [--layers 8] [--hidden 256] [--length 2048] [--steps 8] [--device-memory-gib G]

One process, the same weights and batches for all; methods take turns, so that other load of the machine falls on all of them
alike. Prints the median step time of each, the solver's prediction for the layers, and bytes over the link; --json keeps
all samples. On a CPU copies and compute share cores: only CUDA numbers say how well copies hide.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo
from benchmarks.environment import environment
from benchmarks.timing import seconds
from benchmarks.workloads import dtype_of
from ds_memo.units import MIB

METHODS: dict[str, dict[str, Any]] = {
    "full recompute": {"ablation": "full_recompute"},
    "full swap": {"ablation": "full_swap"},
    "memo": {},
}


def model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 256),
        max_position_embeddings=args.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device, dtype_of(device)).train()


def run(net: nn.Module, memo: dict[str, Any], args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train some steps with one method; the first three, in which layers are analysed and planned, give no samples."""
    handle = ds_memo.attach(net, {"enabled": True, **memo})
    tokens = torch.randint(0, 512, (1, args.length), generator=torch.Generator().manual_seed(1)).to(device)
    samples = []
    try:
        for _ in range(3 + args.steps):
            samples.append(seconds(lambda: net(input_ids=tokens, labels=tokens).loss.backward(), device))
            net.zero_grad(set_to_none=True)
        return {"samples_s": samples[3:], "report": handle.report()}
    finally:
        handle.detach()


def row(turns: list[dict[str, Any]]) -> str:
    """A line of the table. The prediction is for the layers alone; embedding, head and loss come on top."""
    report, predicted = turns[-1]["report"], turns[-1]["report"]["predicted"] or {}
    step = statistics.median(seconds for turn in turns for seconds in turn["samples_s"])
    steps = report["frames"] // report["layers"] or 1
    alpha = f"{report['alpha']:.3f}" if report["checkpointing"] else "-"
    layers = f"{predicted['layers_s'] * 1e3:.0f}" if predicted else "-"
    arena = f"{report['plan']['arena'] / MIB:.1f}" if report["plan"] else "-"
    device = f"{predicted['device_bytes'] / MIB:.1f}" if predicted else "-"
    return (
        f"{step * 1e3:>9.0f}{layers:>7}{alpha:>8}{report['resident_layers']:>11}"
        f"{report['bytes_to_host'] / steps / MIB:>13.1f}{arena:>10}{device:>8}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each method and turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device-memory-gib", type=float, help="less than there is, so that not everything fits")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = model(args, device)
    limit = {"device_memory_gib": args.device_memory_gib} if args.device_memory_gib else {}
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.turns):
        for name, memo in METHODS.items():
            for planned in (False, True):
                label = f"{name}, {'plan' if planned else 'no plan'}"
                results.setdefault(label, []).append(run(net, {**memo, **limit, "plan": {"enabled": planned}}, args, device))
    print(f"{'':28}{'step ms':>16}{'alpha':>8}{'residents':>11}{'MiB to host':>13}{'arena MiB':>18}")
    print(f"{'':28}{'and predicted':>16}{'':32}{'and predicted':>18}")
    for label, turns in results.items():
        print(f"{label:28}{row(turns)}")
    print(f"memo: {results['memo, no plan'][-1]['report']['binding']}")
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items() if name != "json"}
        data = {"environment": environment(device), "arguments": arguments, "results": results}
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
