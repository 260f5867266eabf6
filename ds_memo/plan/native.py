"""Compiles ops/csrc/dsa_search.cpp at first use and loads it with ctypes.

The library is cached in $XDG_CACHE_HOME/ds_memo (~/.cache/ds_memo), named by a hash of source, compiler and flags, so a
changed source or compiler builds anew. `ds_memo.plan.native.build()` builds it ahead of time (some 3 s).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")


class Unavailable(Exception):
    """Why the compiled search cannot be used here; the message is for the user."""


def source() -> Path:
    spec = find_spec("ds_memo.ops")
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if (file := place / "csrc" / "dsa_search.cpp").is_file():
            return file
    raise Unavailable(f"dsa_search.cpp is not installed (looked in {', '.join(map(str, places))})")


def compiler() -> list[str]:
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        words = shlex.split(name)
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    raise Unavailable("no C++ compiler (looked for $CXX, c++, g++, clang++)")


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_memo"


def build(deadline: float = float("inf")) -> Path:
    """The library's path, compiled if need be.

    Raises:
        Unavailable: No source, no compiler, a failed build, or not done before `deadline` (time.monotonic()).
    """
    file, cxx = source(), compiler()
    key = hashlib.sha256(b"\0".join([file.read_bytes(), *(w.encode() for w in (*cxx, *FLAGS))])).hexdigest()[:16]
    folder = cache_dir()
    library = folder / f"dsa_search-{key}.so"
    if library.is_file():
        return library
    left = deadline - time.monotonic()
    if left <= 0:
        raise Unavailable("no time left to compile it")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            out = Path(scratch) / "dsa_search.so"
            run = subprocess.run(
                [*cxx, *FLAGS, str(file), "-o", str(out)],
                capture_output=True, text=True, timeout=None if left == float("inf") else left,
            )  # fmt: skip
            if run.returncode:
                raise Unavailable(f"{cxx[0]} failed: {run.stderr.strip()[-400:]}")
            os.replace(out, library)  # whole or not at all, whoever else builds at the same time
    except subprocess.TimeoutExpired:
        raise Unavailable("the time limit ended before it was compiled; `ds_memo.plan.native.build()` does it") from None
    except OSError as e:
        raise Unavailable(f"cannot build in {folder}: {e}") from None
    return library


_loaded: ctypes.CDLL | None = None


def load(deadline: float = float("inf")) -> ctypes.CDLL:
    """The loaded library, its argument types set. Raises Unavailable."""
    global _loaded
    if _loaded is None:
        path = build(deadline)
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # damaged: a full disk, a machine that went down
            path.unlink(missing_ok=True)
            path = build(deadline)
            try:
                library = ctypes.CDLL(str(path))
            except OSError as e:
                raise Unavailable(f"cannot load {path}: {e}") from None
        ints, longs, doubles = (ctypes.POINTER(c) for c in (ctypes.c_int, ctypes.c_int64, ctypes.c_double))
        library.ds_memo_dsa_search.argtypes = [
            ctypes.c_int, ctypes.c_int, ints, ints, longs, ctypes.c_int64, ints, doubles, ctypes.c_int, ctypes.c_double,
            ctypes.c_int64, longs, longs,
        ]  # fmt: skip
        _loaded = library
    return _loaded
