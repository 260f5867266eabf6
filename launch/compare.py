"""Compare a run with memo with the same run without, from the metrics that train.py wrote.

    python launch/compare.py with.json without.json

Prints the losses side by side, then memory, traffic and recomputation. Ends with 1 where the losses differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

# Largest relative difference of a step's loss. The first step is bit-equal. Later ones follow gradients that may differ
# in the last bit (part of a GEMM's rows computed by themselves), which Adam's division by small numbers magnifies.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def differences(memo: dict, plain: dict) -> list[float]:
    """Return the relative difference of the loss, step by step; infinite if a loss is not a number.

    Raises:
        ValueError: Where the two runs are not of the same steps.
    """
    steps = [[step["step"] for step in run["steps"]] for run in (memo, plain)]
    if steps[0] != steps[1] or not steps[0]:
        raise ValueError(f"the runs are not of the same steps: {steps[0]} and {steps[1]}")
    pairs = [(a["loss"], b["loss"]) for a, b in zip(memo["steps"], plain["steps"], strict=True)]
    return [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def table(memo: dict, plain: dict) -> str:
    """Return the closing table of a quickstart; bytes are those of rank 0."""
    report, share = memo["report"], memo["report"]["gemm_flops_recomputed_fraction"]
    lines = [f"{'step':>20}{'loss with memo':>20}{'loss without':>20}{'difference':>14}"]
    for a, b, difference in zip(memo["steps"], plain["steps"], differences(memo, plain), strict=True):
        lines.append(f"{a['step']:>20}{a['loss']:>20.6f}{b['loss']:>20.6f}{difference:>14.1e}")
    peaks = [max(step["peak_live_bytes"] for step in run["steps"]) for run in (memo, plain)]
    solution = f"alpha {report['alpha']}, resident layers {report['resident_layers']}"
    rows = [
        ("peak live activation bytes", mib(peaks[0]), f"without memo {mib(peaks[1])}: {peaks[0] / peaks[1]:.0%} of it"),
        ("bytes to the host", mib(report["bytes_to_host"]), f"over all steps; {solution}"),
        ("GEMM FLOPs recomputed", "unknown" if share is None else f"{share:.1%}", "of the forward's"),
        ("attention recomputed", str(report["attention_recomputed"]), "times"),
    ]
    if plan := report["plan"]:
        requests = plan["hits"] + sum(plan["misses"].values())
        bound = f"lower bound {mib(plan['lower_bound'])}" if plan["lower_bound"] else "which is planned anew"
        note = f"since they were planned; arena {mib(plan['arena'])}, {bound}"
        rows.append(("requests served from the plan", f"{plan['hits'] / max(1, requests):.1%}", note))
    lines.append("")
    lines += [f"{name:>31}{value:>16}   {note}" for name, value, note in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("compare.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("memo", type=Path, help="metrics of the run with memo")
    parser.add_argument("plain", type=Path, help="metrics of the run without")
    args = parser.parse_args()
    try:
        memo, plain = (json.loads(path.read_text()) for path in (args.memo, args.plain))
        if not all(isinstance(run, dict) and {"memo", "steps", "report", "dtype"} <= run.keys() for run in (memo, plain)):
            raise ValueError("they are not what train.py --metrics-json writes")
        if not memo["memo"] or plain["memo"]:
            raise ValueError("the first must be of a run with memo, the second of one without")
        differences(memo, plain)
    except (OSError, ValueError) as error:
        parser.exit(2, f"compare.py: {args.memo} and {args.plain} cannot be compared: {error}\n")
    print(table(memo, plain))
    worst, allowed = max(differences(memo, plain)), TOLERANCE[memo["dtype"]]
    verdict = "equal" if worst <= allowed else "DIFFERENT"
    print(f"\nlosses {verdict}: largest relative difference {worst:.1e}, tolerance {allowed:.0e} in {memo['dtype']}")
    return 0 if worst <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
