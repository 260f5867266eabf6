"""`ds-memo` called in the test's own process, as users call it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ds_memo.cli import main as cli


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *words: object) -> Ended:
    """Call `ds-memo WORDS…`. Return its exit code and output, which has no traceback."""
    capsys.readouterr()
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    ended = Ended(code, *capsys.readouterr())
    assert "Traceback" not in ended.err, ended.err
    return ended


def complaint(capsys: pytest.CaptureFixture[str], verb: str, *words: object, after_progress: bool = False) -> str:
    """Return the error of a wrong call: one line with the command's name, on stderr alone, and exit code 2."""
    code, out, err = call(capsys, verb, *words)
    assert code == 2 and not out, (code, out, err)
    *before, last = err.splitlines()
    assert last.startswith(f"ds-memo {verb}: ") and (after_progress or not before), err
    return last
