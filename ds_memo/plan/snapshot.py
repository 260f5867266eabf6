"""Traces from PyTorch memory snapshots: anyone can plan a run that they already have.

    torch.cuda.memory._record_memory_history(); ...one training step...; torch.cuda.memory._dump_snapshot("run.pickle")

The pickle is a dict whose `device_traces` holds, per device, the allocator's events in order; `alloc` and
`free_completed` are the ones that matter here (torch/cuda/_memory_viz.py documents the format). There are no phases
in it: the trace is one phase called step. Frees of memory that was allocated before the recording began are left out
and counted.

Pickles can run code. This one is loaded by an unpickler that refuses every class and function: plain containers,
numbers and strings only.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from ds_memo.plan.errors import BadSize, MalformedInput, PlanError, TruncatedInput, UnsafePickle
from ds_memo.plan.formats import MAX_SIZE, make_trace
from ds_memo.plan.trace import Request, Trace


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase, source: str):
        super().__init__(file)
        self.source = source

    def find_class(self, module: str, name: str) -> Any:
        raise UnsafePickle(f"{self.source}: the pickle asks for {module}.{name}; a snapshot has plain containers only")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickle(f"{self.source}: the pickle refers to an outside object; a snapshot has plain containers only")


def read_snapshot(path: str | Path) -> Trace:
    """The requests of the device with most events.

    Raises:
        UnsafePickle, TruncatedInput, MalformedInput, BadSize: See errors.py.
    """
    source = str(path)
    try:
        with open(path, "rb") as file:
            data = _PlainUnpickler(file, source).load()
    except PlanError:
        raise
    except EOFError:
        raise TruncatedInput(source, 0, "the end of the file", "a whole pickle") from None
    except OSError as e:
        raise PlanError(f"{path}: {e.strerror}") from None
    except Exception as e:  # a damaged pickle raises nearly anything
        error = TruncatedInput if "truncated" in str(e) else MalformedInput
        raise error(source, 0, f"{type(e).__name__}: {e}", "a pickle by torch.cuda.memory._dump_snapshot") from None
    traces = data.get("device_traces") if isinstance(data, dict) else None
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces) or not any(traces):
        raise MalformedInput(source, 0, "no device_traces", "a snapshot recorded with torch.cuda.memory._record_memory_history()")
    device = max(range(len(traces)), key=lambda d: len(traces[d]))
    return _requests(traces[device], f"{source} device {device}")


def _requests(events: list, source: str) -> Trace:
    requests: list[Request] = []
    alive: dict[int, str] = {}  # address -> id
    unknown = 0
    for at, event in enumerate(events, 1):
        words = "a dict with action, addr and size"
        if not isinstance(event, dict) or "action" not in event:
            raise MalformedInput(source, at, repr(event)[:80], words)
        if event["action"] not in ("alloc", "free_completed"):
            continue
        address, size = event.get("addr"), event.get("size")
        if type(address) is not int or type(size) is not int:
            raise MalformedInput(source, at, f"addr {address!r}, size {size!r}", words)
        if event["action"] == "alloc":
            if not 0 <= size < MAX_SIZE:
                raise BadSize(source, at, str(size), "a size in bytes, 0 to 2^63 - 1")
            if address in alive:
                raise MalformedInput(source, at, f"alloc at {address:#x}, which is in use", "a free address")
            alive[address] = str(at)
            requests.append(Request(str(at), size))
        elif address in alive:
            requests.append(Request(alive.pop(address), None))
        else:
            unknown += 1
    if not requests:
        raise TruncatedInput(source, 0, "no alloc events", "at least one")
    notes = [f"{unknown} frees of memory from before the recording were left out"] if unknown else []
    return make_trace(requests, [], notes)
