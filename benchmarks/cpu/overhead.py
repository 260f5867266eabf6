"""Time that record and replay add to a layer, over torch.utils.checkpoint in the same run.

    python -m benchmarks.overhead [--device cpu|cuda] [--json PATH]

The layers are tiny, so the samples are Python and launch time, which does not grow with the length. Each sample is one
training step of one variant; variants take turns. Printed: median milliseconds per layer of a forward and of a backward with
its replay, and what ds_memo adds to each. On a CPU the clock is the compute thread's own CPU time, so that copies, which run on
threads of this process there, and other load do not count. On CUDA, where backward has its own thread, it is wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import ds_memo
from benchmarks.workloads import small_models

LAYERS = 8
GOAL_MS = 1.0


def step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    clock = time.thread_time if tokens.device.type == "cpu" else time.perf_counter
    model.zero_grad(set_to_none=True)
    begin = clock()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    middle = clock()
    loss.backward()
    return middle - begin, clock() - middle


def measure(model: torch.nn.Module, tokens: torch.Tensor, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Raw samples per variant: (forward, backward) seconds per layer."""
    samples: dict[str, list[tuple[float, float]]] = {"checkpoint": [], "memo alpha 0.5": [], "memo resident": []}

    def sample(variant: str) -> None:
        step(model, tokens)
        step(model, tokens)  # the first one analyses; neither counts
        for _ in range(5):
            forward, backward = step(model, tokens)
            samples[variant].append((forward / LAYERS, backward / LAYERS))

    for _ in range(rounds):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sample("checkpoint")
        model.gradient_checkpointing_disable()
        for variant, residents in (("memo alpha 0.5", 0), ("memo resident", LAYERS)):
            handle = ds_memo.attach(model, {"enabled": True, "alpha": 0.5, "resident_layers": residents})
            sample(variant)
            handle.detach()
    return samples


def measure_all(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print the medians of every model and return them with the raw samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokens = torch.randint(0, 128, (1, 16), device=device)
    result: dict[str, Any] = {"goal_ms": GOAL_MS, "unit": "ms per layer and pass", "models": {}}
    for name, model in small_models(128, LAYERS, hidden=64, heads=4, kv_heads=2, llama_ffn=128).items():
        samples = measure(model.to(device).train(), tokens, rounds)
        medians = {
            variant: [statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1)]
            for variant, pairs in samples.items()
        }
        result["models"][name] = {"median_ms": medians, "samples_s": samples}
        base = medians["checkpoint"]
        print(f"{name}: torch.utils.checkpoint {base[0]:.3f} ms forward, {base[1]:.3f} ms backward per layer")
        for variant in ("memo alpha 0.5", "memo resident"):
            added = [medians[variant][side] - base[side] for side in (0, 1)]
            verdict = "within" if max(added) <= GOAL_MS else "OVER"
            print(f"    {variant:15s} adds {added[0]:+.3f} ms forward, {added[1]:+.3f} ms backward ({verdict} {GOAL_MS} ms)")
    torch.set_num_threads(threads)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure_all(torch.device(options.device), options.rounds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
