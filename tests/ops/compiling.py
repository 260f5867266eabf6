"""The C++ compiler that tests of the op use directly."""

from __future__ import annotations

from ds_memo.compiled import Unavailable, compiler

__all__ = ["compiler", "lacks"]


def lacks() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    try:
        compiler()
    except Unavailable as error:
        return str(error)
    return None
