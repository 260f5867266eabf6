"""Time of a training step with compiled layers, side by side in one run.

    python -m benchmarks.compiled [--backend inductor] [--rounds 9] [--json PATH]

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_memo
from benchmarks.timing import in_turns
from benchmarks.workloads import small_models

LAYERS = 4
SIZES = {"tiny": (64, 128, 64), "small": (256, 896, 512)}
"""Width, width of the MLP, tokens."""
WARM_UP = 3
"""Steps that are not counted; they compile."""


def variant(base: nn.Module, name: str, backend: str) -> nn.Module:
    """Return a copy of the model that runs in this way."""
    model = copy.deepcopy(base)
    for layer in model.model.layers:
        if "checkpoint" in name:
            run = torch.compile(layer.forward, backend=backend) if "compiled" in name else layer.forward
            layer.forward = partial(checkpoint, run, use_reentrant=False)
        elif "compiled" in name:
            layer.compile(backend=backend)
    return model


def measure(size: tuple[int, int, int], backend: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the samples of each variant, in seconds, and the bytes that a layer of it stores."""
    hidden, ffn, tokens = size
    heads = hidden // 16 if hidden < 128 else hidden // 64
    base = small_models(128, LAYERS, hidden=hidden, heads=heads, kv_heads=heads // 2, llama_ffn=ffn)["llama"].train()
    names = ("stock, checkpoint", "stock, compiled", "checkpoint, compiled", "memo, eager", "memo, compiled")
    models = {name: variant(base, name, backend) for name in names}
    memo = {"alpha": 0.5, "resident_layers": 0}
    handles = {name: ds_memo.attach(model, memo) for name, model in models.items() if name.startswith("memo")}
    ids = torch.randint(0, 128, (1, tokens), generator=torch.Generator().manual_seed(0))
    losses: dict[str, float] = {}

    def step(name: str) -> None:
        models[name].zero_grad(set_to_none=True)
        loss = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses[name] = loss.item()

    samples = in_turns({name: partial(step, name) for name in models}, rounds, WARM_UP, ids.device)
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    stored = {name: handle.report()["stored_bytes_per_layer"][0] for name, handle in handles.items()}
    for handle in handles.values():
        assert handle.report()["attention_recomputed"] == 0
        handle.detach()
    return {name: {"samples_s": times, "stored_bytes": stored.get(name, 0)} for name, times in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, size in SIZES.items():
        torch._dynamo.reset()
        found[name] = measure(size, options.backend, options.rounds)
        print(f"{name}: width {size[0]}, MLP {size[1]}, {size[2]} tokens, {LAYERS} layers")
        for way, of in found[name].items():
            times = [1e3 * seconds for seconds in of["samples_s"]]
            spread = f"({min(times):.1f} to {max(times):.1f})"
            print(f"    {way:22s} {statistics.median(times):8.1f} ms  {spread}  {of['stored_bytes']:>10,} bytes stored a layer")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
