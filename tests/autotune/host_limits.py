"""Training as an ordinary user under RLIMIT_MEMLOCK. Blocks are locked with mlock(2) where CUDA would lock them.

test_host_limits.py calls it in a process of its own, which it spoils.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import Any

import torch

import ds_memo
from ds_memo.memory import host as host_memory
from ds_memo.runtime import session
from ds_memo.swap import host_pool as pool
from ds_memo.swap import pinned_segments
from tests.inside import inside
from tests.models import Batch, build, step

MIB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
SWAPPED = {"enabled": True, "resident_layers": 0, "plan": {"enabled": False}}
BATCH = Batch.random(8, 256)


def be_bound_by_limits() -> None:
    """Give up CAP_IPC_LOCK, which the superuser's processes have: the kernel asks those for no limit."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: twice 32 capabilities
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for which in range(3):
        sets[which] &= ~(1 << 14)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def mlock(segment: pinned_segments.Segment) -> None:
    if libc.mlock(ctypes.c_void_p(segment.memory.data_ptr()), ctypes.c_size_t(segment.nbytes)):
        raise ds_memo.MemoError(f"mlock refused {segment.nbytes} bytes: {os.strerror(ctypes.get_errno())}")


def locked_by_kernel() -> int:
    """Bytes that this process has locked."""
    return int(re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def lock_as_cuda_would(look: bool) -> None:
    """The slab of a CPU is not locked; here it is, past the same lines that ask CUDA to."""
    pinned_segments.pin = mlock
    torch.cuda.synchronize = lambda *args: None
    unlocked = pool.HostPool.__init__

    def locked(self: pool.HostPool, device: torch.device) -> None:
        unlocked(self, device)
        self.pinned = True

    pool.HostPool.__init__ = locked
    torch.cuda.set_device = lambda *args: None
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    budget = host_memory.budget_bytes
    session.budget_bytes = lambda gib, ranks, _, *rest: budget(gib, ranks, look and pinned_segments.memlock_binds(), *rest)


def train(batch: Batch, device_memory_gib: float, said: dict[str, Any]) -> None:
    """Four steps; what is to be known of them goes into `said`."""
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = "/dev/null"
    model = build("llama")
    handle = ds_memo.attach(model, {**SWAPPED, "device_memory_gib": device_memory_gib})
    said["budget_at_start"] = inside(handle).slab.budget.nbytes
    for _ in range(4):
        try:
            step(model, batch)
        except ds_memo.MemoError as error:
            said.setdefault("errors", []).append(str(error))
            model.zero_grad()
    report = handle.report()
    said["report"] = {key: report[key] for key in ("host", "alpha", "binding", "predicted", "bytes_to_host")}
    said["changes"], said["warnings"] = report["profile"]["changes"], report["warnings"]


def memlock(nbytes: int, look: bool) -> dict[str, Any]:
    """
    Args:
        look: True if the limit is asked for beforehand.
    """
    said: dict[str, Any] = {}
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    be_bound_by_limits()
    lock_as_cuda_would(look)
    train(BATCH, 0.022, said)
    return said | {"locked": locked_by_kernel()}
