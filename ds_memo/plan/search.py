"""Exact search: a placement below a capacity, or the proof that there is none.

ops/csrc/dsa_search.cpp does the work and explains the method. It is compiled at first use (some 3 s; ds_memo/compiled.py) and
loaded with ctypes; `load` does so ahead of time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ds_memo import compiled
from ds_memo.compiled import Library, Unavailable
from ds_memo.errors import warn
from ds_memo.plan.dsa import MAX_TOTAL, Buffer, Offset, sections

SOURCE = Path(__file__).parents[1] / "ops" / "csrc" / "dsa_search.cpp"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")

STACK = 512 << 20  # bytes of address space for the recursion, one frame a decision; touched only as deep as it goes
NO_LIMIT = 2**62
MOST = 5_000  # buffers; the memory grows with their square
MOST_COVERED = 10_000_000  # sections covered by all buffers together; 50 bytes each


class Answer(NamedTuple):
    """The search's result. Without offsets, `proven` is True if no placement exists."""

    offsets: list[Offset] | None
    proven: bool
    nodes: int


_library: ctypes.CDLL | str | None = None
"""The compiled search, or why there is none in this process: an error object would keep the tensors of the frames it passed."""


def load(deadline: float = float("inf")) -> ctypes.CDLL:
    """Return the library with its argument types set; compile it if necessary.

    Args:
        deadline: `time.monotonic()` at which a compilation is stopped.

    Raises:
        Unavailable: no source, no compiler, a failed build, or not done before the deadline.
    """
    global _library
    if _library is None:
        try:
            library = compiled.load(Library("dsa_search", SOURCE, FLAGS), ctypes.CDLL, deadline)
        except Unavailable as error:
            _library = str(error)
        else:
            ints, longs, doubles = (ctypes.POINTER(c) for c in (ctypes.c_int, ctypes.c_int64, ctypes.c_double))
            library.ds_memo_dsa_search.argtypes = [
                ctypes.c_int, ctypes.c_int, ints, ints, longs, ctypes.c_int64, ints, doubles, ctypes.c_int, ctypes.c_double,
                ctypes.c_int64, longs, longs,
            ]  # fmt: skip
            _library = library
    if isinstance(_library, str):
        raise Unavailable(_library)
    return _library


def too_large(buffers: Sequence[Buffer]) -> str:
    """Return why the search would take more than 1 GiB for these buffers, or an empty string."""
    if (n := len(buffers)) > MOST:
        return f"{n} buffers, more than {MOST}"
    first, last, _ = sections(buffers)
    covered = sum(last) - sum(first) + n
    return f"the buffers cover {covered} sections, more than {MOST_COVERED}" if covered > MOST_COVERED else ""


def search(buffers: Sequence[Buffer], capacity: int, seconds: float, *, max_nodes: int = NO_LIMIT) -> Answer:
    """Place all buffers below `capacity`, both in the same unit.

    Args:
        seconds: Time limit, kept to within some milliseconds.
        max_nodes: Limit of the decisions tried. A run is repeatable unless the time limit ends it.

    Raises:
        Unavailable: The search cannot be compiled or loaded.
    """
    if not buffers:
        return Answer([], True, 0)
    library = load()
    capacity = min(capacity, MAX_TOTAL)  # Problem keeps the sizes below it
    first, last, count = sections(buffers)
    size = [b.size for b in buffers]
    latest: dict[tuple, int] = {}
    twin = []
    for i, key in enumerate(zip(first, last, size, strict=True)):
        twin.append(latest.get(key, -1))
        latest[key] = i
    # Tried first at a corner: the buffer of most sections, of the largest area in time, or in sections.
    preference = [
        [float(hi - lo + 1) for lo, hi in zip(first, last, strict=True)],
        [float(b.area) for b in buffers],
        [float(z * (hi - lo + 1)) for lo, hi, z in zip(first, last, size, strict=True)],
    ]
    n = len(buffers)
    ints, longs = ctypes.c_int * n, ctypes.c_int64 * n
    flat = [p for order in preference for p in order]
    offsets, nodes = longs(), ctypes.c_int64()
    arguments = (
        n, count, ints(*first), ints(*last), longs(*size), capacity, ints(*twin),
        (ctypes.c_double * len(flat))(*flat), len(preference), min(seconds, 1e9), max_nodes, offsets, ctypes.byref(nodes),
    )  # fmt: skip
    verdict = _with_deep_stack(lambda: library.ds_memo_dsa_search(*arguments))
    if verdict == -3:
        warn(f"exact search over {n} buffers ran out of memory; the best plan so far is used")
    return Answer(list(offsets) if verdict == 1 else None, verdict in (0, 1), nodes.value)


def _with_deep_stack(work: Callable[[], int]) -> int:
    """Run `work` in a thread whose stack holds one frame per decision."""
    out: list[int] = []
    old_size = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=lambda: out.append(work()), daemon=True)
        thread.start()
    finally:
        threading.stack_size(old_size)
    thread.join()
    return out[0]
