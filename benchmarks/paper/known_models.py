"""The estimator on known models, and beside two published measurements: python -m benchmarks.known_models [NAME …]"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import load
from ds_memo.estimate.question import Question
from ds_memo.estimate.simulate import simulate
from ds_memo.placement import ON_DEVICE
from ds_memo.solve.run_costs import RunCosts
from ds_memo.units import GIB, short

MODELS = Path(__file__).resolve().parents[2] / "ds_configs" / "models"


class Case(NamedTuple):
    model: str
    hardware: str
    gpus: int
    tokens: int
    batch: int = 1


CASES = (
    Case("gpt-7b", "a800", 8, 1 << 20),
    Case("mixtral-8x7b", "h200", 16, 1 << 19),
    Case("gpt-oss-120b", "h200", 32, 1 << 18),
    Case("gemma-3-27b", "h200", 8, 1 << 18),
    Case("qwen2.5-vl-7b", "h100", 4, 1 << 18),
    Case("qwen3-next-80b-a3b", "h200", 32, 1 << 16, 32),
    Case("deepseek-v3", "h200", 512, 1 << 14, 512),
)


def question(case: Case) -> Question:
    machine = hardware.load(case.hardware)
    return Question(load(str(MODELS / f"{case.model}.json")), machine, case.gpus, case.tokens, case.batch)


def alst_s(asked: Question, hidden: bool = False) -> float:
    """Return the seconds of a step by ALST's recipe: layers are checkpointed, compute waits for their inputs' way to the host and
    back, and what follows attention's projection (the MLP, in DeepSpeed's tiles) runs once more in the backward.

    Args:
        hidden: copies run beside compute, and it never waits for them.
    """
    costs = Costs(asked.model, asked.hardware, Layout(asked.gpus, sp=asked.gpus), asked.seq_length)
    layer, wide = costs.layers()[0], 0 if hidden else costs.hidden_bytes
    projected = next(o.born for o in layer.outputs if o.role == "gemm" and o.born > layer.outputs[-1].born / 3)
    mlp_s = (1 - projected) * layer.forward_s
    tiles = math.ceil(costs.tokens / asked.model.hidden)
    sums_s = 6 * tiles * asked.model.layer_parameters / (asked.hardware.device_bandwidth * 0.75)  # bf16 gradients of weights
    again_s = layer.replay_s + layer.gemm_s + layer.attention_s
    checkpointed = replace(
        layer,
        outputs=(),
        forward_s=layer.forward_s + wide / asked.hardware.d2h,
        backward_s=layer.backward_s + mlp_s + sums_s,
        replay_s=again_s + wide / costs.h2d,
        gemm_s=0.0,
    )
    n = asked.model.layers
    run = RunCosts((checkpointed,) * n, asked.hardware.d2h, costs.h2d, 0, 0, head_s=costs.head_s)
    return simulate(run, (ON_DEVICE,) * n).seconds + costs.optimizer_s(1)


def main(names: list[str]) -> None:
    print("| model | tokens | GPUs | status | step s | MFU | alpha | device GiB | host GiB of a node |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if names and case.model not in names:
            continue
        found = estimate(question(case))
        step, mfu = ("", "") if found.step_s is None else (f"{found.step_s:,.1f}", f"{found.mfu:.1%}")
        alpha = "" if found.alpha is None else f"{found.alpha:.3g}"
        where = f"{case.gpus} × {case.hardware}, {found.layout}"
        sizes = f"{found.device_total / GIB:.1f} | {found.host_bytes / GIB:,.0f}"
        row = (case.model, f"{short(case.tokens)} × {found.sequences}", where, found.status, step, mfu, alpha, sizes)
        print(f"| {' | '.join(row)} |")
    if names:
        return
    trl, upipe = question(Case("qwen3-8b", "h100", 8, 1 << 20)), question(Case("llama3-8b", "h100", 8, 1 << 17))
    roomy = replace(trl.hardware, device_memory=1000 * GIB)
    checkpointed = estimate(replace(trl, method="full_recompute", hardware=roomy))
    for name, answer in (("checkpointing", checkpointed), ("ds_memo", estimate(trl))):
        gib = answer.device_total / GIB
        print(f"TRL 1.13, Qwen3-8B, 1 Mi tokens, 8 H100, measured 380 s and 56.2 GiB; estimated for {name}:", end=" ")
        print(f"{answer.step_s:.0f} s ({answer.step_s / 380:.2f}) and {gib:.1f} GiB ({gib / 56.2:.2f})")
    tgs = upipe.seq_length / upipe.gpus / alst_s(upipe)
    print("UPipe's row for ALST, Llama-3-8B, 128 Ki tokens, 8 H100, measured 2,280 tokens per GPU and second; estimated", end=" ")
    print(f"{tgs:,.0f} ({tgs / 2280:.2f})")


if __name__ == "__main__":
    main(sys.argv[1:])
