"""A rival in a process of its own. What it leaves in PyTorch's allocator, on the host and on the device, reaches no other: in one
process for all, blocks that rivals had split once cost ds_memo 2.93 GB of its device budget on an H200."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import plain


def tell(found: dict[str, Any]) -> None:
    """Give the parent what was found; called in the child."""
    print(json.dumps(plain(found)), flush=True)


def found_by_child(module: str, *arguments: str) -> tuple[list[dict[str, Any]], str | None]:
    """Run a module in a process of its own.

    Returns:
        What it told until it ended, and why it ended early if it did.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{") and line.endswith("}")]
    return found, f"exit {done.returncode}: {done.stderr[-500:]}" if done.returncode else None
