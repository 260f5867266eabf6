"""`ds-memo`'s exit codes, and the one line that gives the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_memo.cli import main as cli
from tests.command import call, complaint
from tests.plan.instances import TRACES
from tests.processes import ROOT, python

TRACE = str(TRACES[0])
TINY = str(ROOT / "ds_configs" / "models" / "tiny.json")


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of sh, in which `ds-memo` is this checkout's."""
    line = line.replace("ds-memo", f"{sys.executable} -m ds_memo.cli")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["sh", "-c", line], env=variables, capture_output=True, text=True, timeout=120)


# ---- defects


@pytest.mark.parametrize("error", [RuntimeError("a\x1b[31m\nb" + "c" * 10_000), RecursionError("deep"), KeyError("x")])
def test_a_defect_has_an_exit_code_of_its_own(capsys, monkeypatch, error) -> None:
    """Exit code 1 would mean that nothing fits."""

    def raises(*_, **__):
        raise error

    monkeypatch.setattr("ds_memo.cli.plan.plan_trace", raises)
    ended = call(capsys, "plan", TRACE)
    assert ended.code == cli.UNEXPECTED == 70 and ended.err.count("\n") == 1 and len(ended.err) < 2000
    assert f"ds-memo plan: unexpected error: {type(error).__name__}" in ended.err and "\x1b" not in ended.err


@pytest.mark.processes
def test_the_traceback_of_a_defect_is_shown_when_asked_for() -> None:
    code = (
        "from ds_memo.cli import main as cli; import ds_memo.cli.plan as command; command.plan_trace = None\n"
        f"raise SystemExit(cli.main(['plan', {TRACE!r}]))"
    )
    quiet, loud = python("-c", code), python("-c", code, DS_MEMO_TRACEBACK="1")
    assert quiet.returncode == loud.returncode == 70
    assert quiet.stderr.count("\n") == 1 and "DS_MEMO_TRACEBACK=1" in quiet.stderr
    assert loud.stderr.startswith("Traceback") and loud.stderr.splitlines()[-1] == quiet.stderr.rstrip("\n")


# ---- what the system refuses


@pytest.mark.processes
@pytest.mark.parametrize(
    "closed, file, code",
    [("2>&-", "no-such-file", 2), (">&-", TRACE, 0), (">&- 2>&-", "no-such-file", 2), ("<&- >&- 2>&-", TRACE, 0)],
)
def test_closed_streams(closed: str, file: str, code: int) -> None:
    ended = shell(f"exec ds-memo plan {file} {closed}")
    assert ended.returncode == code and "Traceback" not in ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout(unbuffered: str) -> None:
    ended = shell(f"exec ds-memo plan {TRACE} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (ended.returncode, ended.stderr) == (2, "ds-memo plan: standard output: No space left on device\n")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "/dev/zero"),
        ("show", "/dev/zero"),
        ("report", "/dev/zero"),
        ("estimate", "--model", TINY, "--hardware", "h200", "--gpus", "1", "--seq-length", "1K", "--profile", "/dev/zero"),
    ],
    ids=lambda words: words[-1] if words[0] == "plan" else words[0],
)
def test_input_without_end(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.pickle").symlink_to("/dev/zero")
    assert "the most that is read" in complaint(capsys, *words)


# ---- words


@pytest.mark.parametrize(
    "words, says",
    [
        (("plan", "\x1b[31m"), "\\x1b[31m"),
        (("plan", TRACE, "--time-limit", "1e9"), "at most 1,000,000"),
        (("run", "--memo", "[" * 100_000, "true"), "nested too deeply"),
    ],
    ids=range(3),
)
def test_words_that_are_refused(capsys, words, says) -> None:
    assert says in complaint(capsys, *words)
