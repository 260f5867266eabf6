"""Time that record and replay add to a layer, over torch.utils.checkpoint in the same run.

    python -m benchmarks.overhead [--device cpu|cuda] [--json PATH]

The layers are tiny, so the samples are Python and launch time, which does not grow with the length. Each sample is one
training step of one variant; variants take turns. Printed: median milliseconds per layer of a forward and of a backward with
its replay, and what ds_memo adds to each. On a CPU the clock is the compute thread's own CPU time, so that copies, which run on
threads of this process there, and other load do not count. On CUDA, where backward has its own thread, it is wall time.

For layers in tiles: milliseconds of one tile, all its passes together, and how many times checkpoint's for a layer that is.
A tile is as long as the sequence of the other variants, and its time is what more tiles of a sequence add.
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
from benchmarks.workloads import dtype_of, small_models

LAYERS = 8
GOAL_MS = 1.0
TOKENS = 16
"""Tokens of a sequence, and of a tile."""
TILES = (2, 6)
GOAL_TILE = 1.5
"""Times the host time of a checkpointed layer that all passes of a tile may take."""


def step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    clock = time.thread_time if tokens.device.type == "cpu" else time.perf_counter
    model.zero_grad(set_to_none=True)
    begin = clock()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    middle = clock()
    loss.backward()
    return middle - begin, clock() - middle


def variants() -> dict[str, tuple[dict[str, Any] | None, int]]:
    """Return the "memo" section and the number of tiles by name; None: torch.utils.checkpoint."""
    found: dict[str, tuple[dict[str, Any] | None, int]] = {"checkpoint": (None, 1)}
    for name, residents in (("memo alpha 0.5", 0), ("memo resident", LAYERS)):
        found[name] = {"enabled": True, "alpha": 0.5, "resident_layers": residents}, 1
    in_tiles = {"enabled": True, "alpha": 0.0, "resident_layers": 0, "tile_tokens": TOKENS}
    return found | {f"{tiles} tiles": (in_tiles, tiles) for tiles in TILES}


def measure(model: torch.nn.Module, device: torch.device, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return raw samples per variant: (forward, backward) seconds per layer."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in variants()}
    for _ in range(rounds):
        for name, (section, tiles) in variants().items():
            tokens = torch.randint(0, 128, (1, TOKENS * tiles), device=device)
            if section is None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                handle = ds_memo.attach(model, section)
            step(model, tokens)
            step(model, tokens)  # the first one analyses; neither counts
            for _ in range(5):
                forward, backward = step(model, tokens)
                samples[name].append((forward / LAYERS, backward / LAYERS))
            if section is None:
                model.gradient_checkpointing_disable()
            else:
                assert tiles == 1 or len(handle.report()["tiles"]["layers"]) == LAYERS, "a layer ran whole"
                handle.detach()
    return samples


def of_a_tile(medians: dict[str, list[float]]) -> list[float]:
    """Return the milliseconds that one more tile adds to a layer's forward and to its backward."""
    few, many = TILES
    return [(medians[f"{many} tiles"][side] - medians[f"{few} tiles"][side]) / (many - few) for side in (0, 1)]


def measure_all(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print the medians of every model and return them with the raw samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"goal_ms": GOAL_MS, "goal_tile": GOAL_TILE, "unit": "ms per layer and pass", "models": {}}
    for name, model in small_models(128, LAYERS, hidden=64, heads=4, kv_heads=2, llama_ffn=128).items():
        samples = measure(model.to(device, dtype_of(device)).train(), device, rounds)
        medians = {
            variant: [statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1)]
            for variant, pairs in samples.items()
        }
        base, tile = medians["checkpoint"], of_a_tile(medians)
        ratio = sum(tile) / sum(base)
        result["models"][name] = {"median_ms": medians, "tile_ms": tile, "tile_ratio": ratio, "samples_s": samples}
        print(f"{name}: torch.utils.checkpoint {base[0]:.3f} ms forward, {base[1]:.3f} ms backward per layer")
        for variant in ("memo alpha 0.5", "memo resident"):
            added = [medians[variant][side] - base[side] for side in (0, 1)]
            verdict = "within" if max(added) <= GOAL_MS else "OVER"
            print(f"    {variant:15s} adds {added[0]:+.3f} ms forward, {added[1]:+.3f} ms backward ({verdict} {GOAL_MS} ms)")
        verdict = "within" if ratio <= GOAL_TILE else "OVER"
        times = f"{tile[0]:.3f} ms forward, {tile[1]:.3f} ms backward: {ratio:.2f} x checkpoint's layer"
        print(f"    {'a tile':15s} takes {times} ({verdict} {GOAL_TILE} x)")
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
