"""Announce that DeepSpeed compiles. Its collectives for CPU ranks take g++ a minute at the first start, without a word of it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch.utils.cpp_extension
from deepspeed.accelerator import get_accelerator

backend: Any = importlib.import_module("deepspeed.comm.torch")  # deepspeed.comm's attribute of that name may be PyTorch
_OP = "deepspeed_shm_comm"
COMPILES = (
    "ds_memo: DeepSpeed compiles its collectives for CPU ranks into {}, once. That takes a minute or more; "
    'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False in the script spares it'
)
WAITS = (
    "ds_memo: DeepSpeed waits for another process, which made {} {:.0f} minutes ago to compile collectives for CPU ranks. If "
    "that process has ended, remove the file"
)


def announce_first_compile() -> None:
    """Print a line on rank 0 before DeepSpeed compiles its collectives for CPU ranks, or waits for a process that does."""
    stock = getattr(backend, "build_shm_op", None)  # the name in DeepSpeed 0.17 to 0.19
    if stock is None or hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def build_shm_op() -> Any:
        on_cpu = get_accelerator().device_name() == "cpu"
        if on_cpu and deepspeed.ops.__compatible_ops__.get(_OP) and not int(os.environ.get("RANK") or 0):
            _say_what_is_to_come()
        return stock()

    backend.build_shm_op = build_shm_op


def _say_what_is_to_come() -> None:
    folder = Path(torch.utils.cpp_extension._get_build_directory(_OP, False))
    lock = folder / "lock"
    if lock.exists():
        print(WAITS.format(lock, (time.time() - lock.stat().st_mtime) / 60), file=sys.stderr, flush=True)
    elif not (folder / f"{_OP}.so").exists():
        print(COMPILES.format(folder), file=sys.stderr, flush=True)
