"""Time that the tuner adds to the first training pass: with nothing cached, and with the profile of the run before.

    python -m benchmarks.warm_start [--device cpu|cuda] [--model CONFIG.json] [--seq-length N] [--rounds N] [--json PATH]

A start is attaching, finding the profile (measured or read), agreeing and solving, until the first layer could run; planned
addresses are off. Cold and warm starts take turns. Printed: medians, the warm one against its
bar; ends with 1 if that is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ds_memo
from benchmarks.environment import environment

BAR_S = 1.0
"""For a warm start with everything cached."""
CONFIG = Path(__file__).parents[2] / "ds_configs" / "models" / "tiny.json"


def start(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, bool]:
    """Return the seconds, and True if the profile was read."""
    begin = time.perf_counter()
    handle = ds_memo.attach(model, {"plan": {"enabled": False}})
    pilot = handle._session.tuner
    pilot.choose("the first pass", model, (), {"input_ids": tokens, "labels": tokens}, handle.calls)
    if tokens.device.type == "cuda":
        torch.cuda.synchronize(tokens.device)
    seconds = time.perf_counter() - begin
    handle.detach()
    return seconds, pilot.report()["from_cache"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=CONFIG)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the raw samples here")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)).to(device).train()
    tokens = torch.randint(0, model.config.vocab_size, (1, options.seq_length), device=device)
    samples: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            for name in samples:
                seconds, from_cache = start(model, tokens)
                assert from_cache == (name == "warm")
                samples[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{options.model.stem}, {options.seq_length} tokens on {device}, medians of {options.rounds} starts")
    print(f"  cold  {medians['cold']:8.3f} s")
    print(f"  warm  {medians['warm']:8.3f} s   bar {BAR_S:g} s: {'ok' if medians['warm'] < BAR_S else 'MISSED'}")
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(device), "samples_s": samples}, indent=1) + "\n")
    return int(medians["warm"] >= BAR_S)


if __name__ == "__main__":
    raise SystemExit(main())
