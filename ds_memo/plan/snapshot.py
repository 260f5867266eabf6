"""Traces from PyTorch memory snapshots, to plan an existing run.

    torch.cuda.memory._record_memory_history(); ...one training step...; torch.cuda.memory._dump_snapshot("run.pickle")

The pickle is a dict whose `device_traces` holds, per device, the allocator's events in order. Only `alloc` and
`free_completed` matter here (torch/cuda/_memory_viz.py documents the format). It has no phases: the trace is one phase
called step. Frees of memory from before the recording are left out and counted.

Pickles can run code, so `_Unpickler` imports nothing and builds plain containers only. It is the unpickler that is
written in Python: in that of C, few bytes of a damaged file reserve gigabytes.
"""

from __future__ import annotations

import gc
import io
import pickle
from pathlib import Path
from typing import Any

from ds_memo.errors import brief, quoted
from ds_memo.files import read_bounded
from ds_memo.plan.errors import MalformedInput, PlanError, UnsafePickle
from ds_memo.plan.formats import MAX_SIZE, make_trace
from ds_memo.plan.trace import Request, Trace

MOST_SNAPSHOT_BYTES = 1 << 28
SUFFIXES = (".pickle", ".pkl")
_WRITTEN_BY = "a pickle of plain containers, as torch.cuda.memory._dump_snapshot writes it"
_PythonsUnpickler: Any = vars(pickle)["_Unpickler"]
"""The one that is written in Python, which typeshed takes for C's."""


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
    data = load_plain(content, source)
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


def load_plain(content: bytes, source: str) -> Any:
    """Return the object of a pickle that holds containers, strings, numbers and nothing else.

    Args:
        source: File name for messages.

    Raises:
        UnsafePickle: It imports something.
        MalformedInput: It is cut or damaged.
    """
    collects = gc.isenabled()
    gc.disable()  # it would scan millions of live containers again and again
    try:
        return _Unpickler(content, source).load()
    except PlanError:
        raise
    except EOFError:
        raise MalformedInput(source, 0, "the end of the file", "a whole pickle") from None
    except Exception as error:  # whatever the unpickler meets in a damaged pickle
        seen = f"damage ({type(error).__name__}: {error})"
        raise MalformedInput(source, 0, seen, _WRITTEN_BY) from None
    finally:
        if collects:
            gc.enable()


class _Unpickler(_PythonsUnpickler):
    def __init__(self, content: bytes, source: str) -> None:
        super().__init__(io.BytesIO(content))
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        wanted = quoted(f"{module}.{name}")
        raise UnsafePickle(f"{quoted(self._source, 400)}: the pickle asks for {wanted}; a snapshot has plain containers only")
