"""Results of 24 configurations on a CPU, to compare two states of the code.

    python -m tests.golden OUT.json          # in each state: gradients, stored bytes, placements and peaks of three steps
    python -m tests.golden A.json B.json     # what differs; exit status 1 if anything does

Alpha and placements are configured: those that are solved for rest on measured times. `ds-memo estimate` compares these.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ds_memo
from ds_memo.profile.live import LiveBytes
from tests import architectures, models
from tests.compiled_layers.rig import compiled

HALF = {"alpha": 0.5, "resident_layers": 1}
TILES = HALF | {"tile_tokens": 16}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, HALF) for name in ("llama", "qwen3", "mixtral", "qwen3_moe", "gpt2", "neox", "opt", "gemma2")},
    **{name: (name, HALF) for name in ("gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1")},
    **{f"{name} in tiles": (name, TILES) for name in ("llama", "mixtral", "gpt_oss", "qwen3_next", "falcon_h1")},
    "alpha 0": ("llama", {"alpha": 0.0, "resident_layers": 0}),
    "all resident": ("llama", {"alpha": 1.0, "resident_layers": models.LAYERS}),
    "groups of heads": ("llama", TILES | {"resident_layers": 0, "head_groups": 2}),
    "full recompute": ("llama", {"ablation": "full_recompute"}),
    "full swap": ("llama", {"ablation": "full_swap"}),
    "whole logits": ("llama", HALF | {"kernels": {"cross_entropy": "whole"}}),
    "compiled": ("llama", HALF),
}
"""Model and "memo" section by name."""
MEASURED = ("stall_s", "step_s", "tokens_per_s", "mfu", "host", "binding", "plan")
"""Keys of the report that time or the machine decides."""


def digest(tensor: torch.Tensor | None) -> str | None:
    if tensor is None:
        return None
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def results(name: str) -> dict[str, Any]:
    """Return what a configuration gives, as JSON has it."""
    kind, memo = CONFIGURATIONS[name]
    model = models.build(kind) if kind in models.MODELS else architectures.build(kind)
    if name == "compiled":
        torch._dynamo.reset()
        compiled(model, backend="aot_eager")
    handle, steps, peaks = ds_memo.attach(model, memo | {"plan": {"enabled": False}}), [], []
    for seed in range(3):
        with nullcontext() if name == "compiled" else LiveBytes() as live:  # compilers know no dispatch mode around them
            found = models.step(model, models.Batch.random(1, 64, seed=seed))
        steps.append({"loss": found.loss.item().hex()} | {grad: digest(value) for grad, value in found.grads.items()})
        peaks.append(live and live.peak)
    report = {key: value for key, value in handle.report().items() if key not in MEASURED}
    handle.detach()
    return json.loads(json.dumps({"steps": steps, "peaks": peaks, "report": report}, default=str))


def differences(one: Any, other: Any, where: str) -> list[str]:
    """Return a line for each number or text that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [line for key in one | other for line in differences(one.get(key), other.get(key), f"{where}{key}: ")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{where}{index}: ")]
    return [] if one == other else [f"{where}{one} -> {other}"]


def main(out: str, other: str | None = None) -> int:
    if other is None:
        warnings.simplefilter("ignore")
        Path(out).write_text(json.dumps({name: results(name) for name in tqdm(CONFIGURATIONS)}, indent=1) + "\n")
        return 0
    one, two = (json.loads(Path(path).read_text()) for path in (out, other))
    lines = differences(one, two, "")
    print(*lines, f"{len(one | two)} configurations, {len(lines)} differences", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
