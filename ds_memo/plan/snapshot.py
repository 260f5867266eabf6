"""Traces from PyTorch memory snapshots, to plan an existing run.

    torch.cuda.memory._record_memory_history(); ...one training step...; torch.cuda.memory._dump_snapshot("run.pickle")

The pickle is a dict whose `device_traces` holds, per device, the allocator's events in order. Only `alloc` and
`free_completed` matter here (torch/cuda/_memory_viz.py documents the format). It has no phases: the trace is one phase
called step. Frees of memory from before the recording are left out and counted.

Pickles can run code, and few bytes can take all memory. This one is read by plain_pickle, which builds plain containers
and counts its steps.
"""

from __future__ import annotations

from pathlib import Path

from ds_memo.errors import brief, quoted
from ds_memo.files import read_bounded
from ds_memo.plan import plain_pickle
from ds_memo.plan.errors import MalformedInput, PlanError
from ds_memo.plan.formats import MAX_SIZE, MOST_REQUESTS, make_trace
from ds_memo.plan.trace import Request, Trace

MOST_SNAPSHOT_BYTES = 1 << 28
SUFFIXES = (".pickle", ".pkl")


def read_snapshot(path: str | Path) -> Trace:
    """Return the requests of the device with most events.

    Raises:
        UnsafePickle, MalformedInput: See errors.py.
        TooLong: The file has more than MOST_SNAPSHOT_BYTES.
    """
    return _requests(*read_events(path))


def read_events(path: str | Path) -> tuple[list, str]:
    """Return the events of the device with most of them, unchecked, and a name of it for messages. Raises as `read_snapshot`."""
    source = str(path)
    try:
        content = read_bounded(path, MOST_SNAPSHOT_BYTES)
    except OSError as e:
        raise PlanError(f"{quoted(source, 400)}: {e.strerror}") from None
    data = plain_pickle.load(content, source)
    traces = data.get("device_traces") if isinstance(data, dict) else None
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces) or not any(traces):
        raise MalformedInput(source, 0, "no device_traces", "a snapshot recorded with torch.cuda.memory._record_memory_history()")
    device = max(range(len(traces)), key=lambda d: len(traces[d]))
    return traces[device], f"{source} device {device}"


def _requests(events: list, source: str) -> Trace:
    requests: list[Request] = []
    alive: dict[int, str] = {}  # address -> id
    unknown = 0
    for at, event in enumerate(events, 1):
        words = "a dict with action, addr and size"
        if not isinstance(event, dict) or "action" not in event:
            raise MalformedInput(source, at, brief(event), words)
        if event["action"] not in ("alloc", "free_completed"):
            continue
        address, size = event.get("addr"), event.get("size")
        if type(address) is not int or type(size) is not int:
            raise MalformedInput(source, at, f"addr {brief(address)}, size {brief(size)}", words)
        if event["action"] == "alloc":
            if not 0 <= size < MAX_SIZE:
                raise MalformedInput(source, at, brief(size), "a size in bytes, 0 to 2^63 - 1")
            if address in alive:
                raise MalformedInput(source, at, f"alloc at {address:#x}, which is in use", "a free address")
            if len(requests) >= MOST_REQUESTS:
                raise MalformedInput(source, at, f"more than {MOST_REQUESTS:,} requests", "a recording of one training step")
            alive[address] = str(at)
            requests.append(Request(str(at), size))
        elif address in alive:
            requests.append(Request(alive.pop(address), None))
        else:
            unknown += 1
    if not requests:
        raise MalformedInput(source, 0, "no alloc events", "at least one")
    notes = [f"{unknown} frees of memory from before the recording were left out"] if unknown else []
    return make_trace(requests, [], notes)
