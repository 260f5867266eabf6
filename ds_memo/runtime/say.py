"""Lines on rank 0's stderr, for those who put memo around a script and changed nothing in it."""

from __future__ import annotations

import os
import sys

import torch

from ds_memo.runtime.report import report as made_report
from ds_memo.runtime.session import Session
from ds_memo.show.report_table import budget_in_words
from ds_memo.units import MIB


def say(line: str) -> None:
    started = torch.distributed.is_initialized()
    if (torch.distributed.get_rank() if started else int(os.environ.get("RANK", 0))) == 0:
        print(f"ds_memo {line}", file=sys.stderr)


def tell_what_moved(session: Session) -> bool:
    """Print what memo did, since the script was not changed and its user wants to see an effect. Return True if it is told.

    What is solved automatically is solved again after the first step, which shows the memory of head and loss.
    """
    report = made_report(session)
    first = session.speed.steps == 1
    if first and not report["active"] and report["predicted"] is not None:
        return False
    steps = "step" if first else "two steps"
    if report["active"]:
        line = (
            f"is active: {report['bytes_to_host'] / MIB:.1f} MiB went to the host in the first {steps} "
            f"(alpha {report['alpha']:.3g}, {report['resident_layers']} of {report['layers']} layers resident)"
        )
        if report["predicted"] is not None:
            line += f"; device budget: {budget_in_words(report['predicted']['device_budget'])}"
    else:
        line = f"moved no bytes in the first {steps}: {report['binding']}"
    say(line)
    return True
