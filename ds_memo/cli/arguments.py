"""What the verbs of `ds-memo` read, say and write alike. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NoReturn

from ds_memo.errors import brief, quoted

MOST_MESSAGE = 2000
"""Characters of a line on stderr; what names and values take of it is cut in their middle."""
_MOST_TOKENS = 1 << 34


def one_line_errors(parser: argparse.ArgumentParser) -> None:
    """Have a wrong option end with one line and exit status 2; argparse would print the whole usage first."""

    def error(message: str) -> NoReturn:
        print(f"{parser.prog}: {quoted(message, MOST_MESSAGE)}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error  # type: ignore[method-assign]


def whole(text: str, low: int, high: int, expected: str) -> int:
    """A whole number within bounds, as an option's type."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{brief(text)}, expected {expected}")
    return value


def count(text: str) -> int:
    """A whole number above 0, as an option's type."""
    return whole(text, 1, 1 << 20, f"a whole number from 1 to {1 << 20}")


def tokens(text: str) -> int:
    """131072, 128K or 1M, as an option's type; lengths are counted in powers of two."""
    number = text.rstrip("i")  # 64Ki is 64K
    factor = {"K": 1 << 10, "M": 1 << 20}.get(number[-1:].upper(), 1)
    try:
        value = float(number[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = math.nan
    if not (1 <= value <= _MOST_TOKENS and value == int(value)):
        raise argparse.ArgumentTypeError(
            f"{brief(text)}, expected whole tokens from 1 to {_MOST_TOKENS}, e.g. 131072, 128K or 1M"
        )
    return int(value)


def number(text: str, low: float, high: float, expected: str) -> float:
    """A number within bounds, as an option's type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{brief(text)}, expected {expected}")
    return value


def gib(text: str) -> float:
    """GiB above 0, as an option's type."""
    return number(text, 1e-9, 1e9, "GiB above 0, at most 1e9")
