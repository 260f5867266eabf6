"""What the verbs of `ds-memo` read, say and write alike. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from ds_memo.errors import MemoError, brief, quoted
from ds_memo.files import read_bounded, write_atomic

MOST_MESSAGE = 2000
"""Characters of a line on stderr; what names and values take of it is cut in their middle."""
MOST_CONFIG_BYTES = 1 << 24
"""The JSON of a model or of a machine."""
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


def short(length: int) -> str:
    """Tokens as people write them: 64 Ki, 1 Mi, 1,000."""
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if length >= factor and length * 8 % factor == 0:
            return f"{length / factor:g} {unit}"
    return f"{length:,}"


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


def size(nbytes: float) -> str:
    """Bytes as people write them: 512 B, 3.266 MiB, 18.88 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.4g} {units[0]}" if nbytes < 1000 else f"{nbytes:.0f} {units[0]}"


def read_text(place: str | Path, most: int) -> str:
    """Return the text of an input file, without the mark that some editors begin it with.

    Args:
        most: bytes.

    Raises:
        MemoError: it cannot be read, is not UTF-8, or is longer.
    """
    try:
        return read_bounded(place, most).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # a UnicodeDecodeError, a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise MemoError(f"cannot read {quoted(str(place), 400)}: {why}") from None


def write_output(place: str | Path, data: str | bytes) -> None:
    """Write what an option like -o names: whole, or not at all.

    Raises:
        MemoError: it cannot be written.
    """
    try:
        write_atomic(Path(place), data)
    except (OSError, ValueError) as error:  # a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise MemoError(f"cannot write {quoted(str(place), 400)}: {why}") from None
