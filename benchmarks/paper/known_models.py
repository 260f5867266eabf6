"""The estimator on known models: python -m benchmarks.known_models [NAME …]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from ds_memo.estimate import hardware
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.model import load
from ds_memo.estimate.question import Question
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


def main(names: list[str]) -> None:
    print("| model | tokens | GPUs | status | step s | MFU | attention | alpha | device GiB | host GiB of a node |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if names and case.model not in names:
            continue
        found = estimate(question(case))
        step, mfu = ("", "") if found.step_s is None else (f"{found.step_s:,.1f}", f"{found.mfu:.1%}")
        alpha = "" if found.alpha is None else f"{found.alpha:.3g}"
        where = f"{case.gpus} × {case.hardware}, {found.layout}"
        sizes = f"{found.device_total / GIB:.1f} | {found.host_bytes / GIB:,.0f}"
        kernels = ", ".join(kernel.name for kernel in found.attention)
        row = (case.model, f"{short(case.tokens)} × {found.sequences}", where, found.status, step, mfu, kernels, alpha, sizes)
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
