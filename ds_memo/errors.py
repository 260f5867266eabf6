"""Errors and warnings of ds_memo. Imports nothing of ds_memo, so every part can use it."""

import warnings
from reprlib import Repr

MOST_NAME = 200
"""Characters of a name (a phase, a tensor, a layer, a machine) that a file may give."""


class MemoError(RuntimeError):
    """Raised where ds_memo cannot go on. The message says what was seen, what was expected, and what to do."""


class MemoConfigError(MemoError, ValueError):
    """Raised for a refused value of the "memo" section. The message has the field, the value, and what is allowed."""


class MemoWarning(UserWarning):
    """Training goes on, but not as configured; ``ds_memo.report()`` shows the warning too."""


def warn(message: str) -> None:
    """Issue a MemoWarning for the caller of the function that warns."""
    warnings.warn(f"ds_memo: {message}", MemoWarning, stacklevel=3)


def quoted(text: object, most: int = 120) -> str:
    """Return a name or value as a message may show it: on one line, without terminal escapes, cut in its middle.

    Args:
        text: anything; a string that is plain and short is returned as it is, anything else as :func:`brief` shows it.
        most: characters to keep.
    """
    shown = text if isinstance(text, str) else _bounded_repr(text)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in shown)
    if len(shown) > most:
        cut = len(shown) - most
        shown = f"{shown[: most * 2 // 3]}…[{cut:,} characters]…{shown[-(most - most * 2 // 3) :]}"
    return shown


def brief(value: object) -> str:
    """Return the repr of a value from outside, bounded in length and in the time that it takes: 'auto', [1, 2, [...]]."""
    return quoted(_bounded_repr(value))


_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 3, 100, 60, 60


def _bounded_repr(value: object) -> str:
    try:
        return _REPR.repr(value)  # repr() of a list that holds itself twice, 26 deep, is 2^26 brackets
    except ValueError:  # an integer of more digits than Python writes out
        return f"<{type(value).__name__}>"
