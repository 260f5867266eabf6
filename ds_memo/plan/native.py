"""Compile ops/csrc/dsa_search.cpp at first use (some 3 s; ds_memo/compiled.py) and load it with ctypes.

`ds_memo.plan.native.load()` does so ahead of time.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ds_memo import compiled
from ds_memo.compiled import Library

SOURCE = Path(__file__).parents[1] / "ops" / "csrc" / "dsa_search.cpp"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")


_loaded: ctypes.CDLL | None = None


def load(deadline: float = float("inf")) -> ctypes.CDLL:
    """Return the library with its argument types set; compile it if necessary.

    Args:
        deadline: `time.monotonic()` at which a compilation is stopped.

    Raises:
        Unavailable: no source, no compiler, a failed build, or not done before the deadline.
    """
    global _loaded
    if _loaded is None:
        library = compiled.load(Library("dsa_search", SOURCE, FLAGS), ctypes.CDLL, deadline)
        ints, longs, doubles = (ctypes.POINTER(c) for c in (ctypes.c_int, ctypes.c_int64, ctypes.c_double))
        library.ds_memo_dsa_search.argtypes = [
            ctypes.c_int, ctypes.c_int, ints, ints, longs, ctypes.c_int64, ints, doubles, ctypes.c_int, ctypes.c_double,
            ctypes.c_int64, longs, longs,
        ]  # fmt: skip
        _loaded = library
    return _loaded
