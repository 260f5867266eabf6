"""Time of a training step with compiled layers, side by side in one run.

    python -m benchmarks.compiled [--backend inductor] [--sizes tiny small] [--rounds 9] [--json PATH]

    stock, checkpoint       torch.utils.checkpoint around each layer, uncompiled
    stock, compiled         layers compiled one by one; nothing is computed again but what inductor chooses
    checkpoint, compiled    layers compiled one by one, each under torch.utils.checkpoint
    memo, eager             ds_memo at alpha 0.5, uncompiled
    memo, compiled          ds_memo at alpha 0.5, layers compiled

The model is a Llama with a small vocabulary. Variants take turns within a round. Printed: the median milliseconds of a step,
after the steps that compile, and the bytes that a layer stores on the host. A CPU's copies take the same cores as its products,
so swapping hides behind nothing here: the rows compare host time and kernels, not the speed of a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_memo
from benchmarks.workloads import small_models

MEMO = {"alpha": 0.5, "resident_layers": 0}
LAYERS = 4
SIZES = {"tiny": (64, 128, 64), "small": (256, 896, 512)}
"""Width, width of the MLP, tokens."""
WARM_UP = 3
"""Steps that are not counted; they compile."""


def _layers(model: nn.Module) -> nn.ModuleList:
    return model.model.layers


def _compile(model: nn.Module, backend: str) -> None:
    for layer in _layers(model):
        layer.compile(backend=backend)


def _checkpointed(model: nn.Module, backend: str | None) -> None:
    for layer in _layers(model):
        run = layer.forward if backend is None else torch.compile(layer.forward, backend=backend)
        layer.forward = partial(checkpoint, run, use_reentrant=False)


def variants(base: nn.Module, backend: str) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Return the models by variant, and the handles of those under memo."""
    names = ("stock, checkpoint", "stock, compiled", "checkpoint, compiled", "memo, eager", "memo, compiled")
    models = {name: copy.deepcopy(base) for name in names}
    _checkpointed(models["stock, checkpoint"], None)
    _compile(models["stock, compiled"], backend)
    _checkpointed(models["checkpoint, compiled"], backend)
    _compile(models["memo, compiled"], backend)
    return models, {name: ds_memo.attach(models[name], MEMO) for name in names if name.startswith("memo")}


def measure(size: tuple[int, int, int], backend: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the samples of each variant, in seconds, and the bytes that a layer of it stores."""
    hidden, ffn, tokens = size
    heads = hidden // 16 if hidden < 128 else hidden // 64
    base = small_models(128, LAYERS, hidden=hidden, heads=heads, kv_heads=heads // 2, llama_ffn=ffn)["llama"].train()
    models, handles = variants(base, backend)
    ids = torch.randint(0, 128, (1, tokens), generator=torch.Generator().manual_seed(0))
    losses: dict[str, float] = {}

    def step(name: str) -> float:
        begin = time.perf_counter()
        models[name].zero_grad(set_to_none=True)
        loss = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses[name] = loss.item()
        return time.perf_counter() - begin

    for name in models:
        for _ in range(WARM_UP):
            step(name)
    samples: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name in models:
            samples[name].append(step(name))
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    stored = {name: handle.report()["stored_bytes_per_layer"][0] for name, handle in handles.items()}
    for handle in handles.values():
        assert handle.report()["attention_recomputed"] == 0
        handle.detach()
    return {name: {"samples_s": times, "stored_bytes": stored.get(name, 0)} for name, times in samples.items()}


def show(size: str, found: dict[str, dict[str, Any]], tell: Callable[[str], None] = print) -> None:
    """Print the medians."""
    hidden, ffn, tokens = SIZES[size]
    tell(f"{size}: width {hidden}, MLP {ffn}, {tokens} tokens, {LAYERS} layers, {torch.get_num_threads()} threads")
    for name, of in found.items():
        times = of["samples_s"]
        spread = f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}"
        median = statistics.median(times) * 1e3
        tell(f"    {name:22s} {median:8.1f} ms  ({spread})  {of['stored_bytes']:>10,} bytes stored a layer")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for size in options.sizes:
        torch._dynamo.reset()
        found[size] = measure(SIZES[size], options.backend, options.rounds)
        show(size, found[size])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
