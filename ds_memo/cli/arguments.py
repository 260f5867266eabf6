"""Option types and error output that the verbs of `ds-memo` share. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NoReturn

from ds_memo.errors import brief, quoted

MOST_MESSAGE = 2000
"""Most characters of a line on stderr; longer names and values are cut in their middle."""
_MOST_TOKENS = 1 << 34


def one_line_errors(parser: argparse.ArgumentParser) -> None:
    """Make a wrong option print one line and exit with status 2; argparse would print the full usage first."""

    def error(message: str) -> NoReturn:
        print(f"{parser.prog}: {quoted(message, MOST_MESSAGE)}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error  # type: ignore[method-assign]


def integer(text: str, low: int, high: int, expected: str) -> int:
    """Parse a whole number within bounds; an option's type."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{brief(text)}, expected {expected}")
    return value


def count(text: str) -> int:
    """Parse a whole number above 0; an option's type."""
    return integer(text, 1, 1 << 20, f"a whole number from 1 to {1 << 20}")


def tokens(text: str) -> int:
    """Parse 131072, 128K or 1M as tokens; an option's type. K and M are powers of two."""
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
    """Parse a number within bounds; an option's type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{brief(text)}, expected {expected}")
    return value


def gib(text: str) -> float:
    """Parse GiB above 0; an option's type."""
    return number(text, 1e-9, 1e9, "GiB above 0, at most 1e9")
