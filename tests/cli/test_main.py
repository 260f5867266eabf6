"""`ds-memo`'s exit codes, and the one line that gives the cause."""

from __future__ import annotations

import json
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
def test_what_is_printed_to_a_closed_stderr_is_not_on_stdout() -> None:
    assert shell("exec ds-memo plan no-such-file 2>&-").stdout == ""


@pytest.mark.processes
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout(unbuffered: str) -> None:
    ended = shell(f"exec ds-memo plan {TRACE} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (ended.returncode, ended.stderr) == (2, "ds-memo plan: standard output: No space left on device\n")


@pytest.mark.processes
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stderr(unbuffered: str) -> None:
    assert shell("exec ds-memo plan no-such-file 2>/dev/full", PYTHONUNBUFFERED=unbuffered).returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "/dev/zero"),
        ("plan", "zero.pickle"),
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


def test_a_model_without_end(capsys) -> None:
    pytest.importorskip("transformers")
    assert "no regular file" in complaint(capsys, "profile", "--model", "/dev/zero", "--seq-length", "1K", "--device", "cpu")


def test_a_library_that_cannot_be_replaced(capsys, monkeypatch) -> None:
    """An OSError becomes one line with the file's name."""

    def raises(*_, **__):
        raise PermissionError(13, "Permission denied", "/cache/plan.so")

    monkeypatch.setattr("ds_memo.cli.plan.plan_trace", raises)
    assert complaint(capsys, "plan", TRACE) == "ds-memo plan: /cache/plan.so: Permission denied"


# ---- words


def test_words_without_end(capsys) -> None:
    for words in (("plan", TRACE, "--time-limit", "9" * 100_000), ("plan", TRACE, "--" + "x" * 100_000), ("d" * 100_000,)):
        ended = call(capsys, *words)
        assert ended.code == 2 and len(ended.err) < 4000


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


def test_the_launchers_option_takes_a_number(capsys) -> None:
    """Otherwise `--local_rank plan show` passes the arguments of one verb to the other."""
    assert call(capsys, "--local_rank", "plan", "show").code == 2


@pytest.mark.parametrize("name, code, says", [("\x1b[31mred", 0, "\\x1b[31mred"), ("x" * 201, 2, "at most 200 characters")])
def test_a_machine_s_name(capsys, tmp_path: Path, name: str, code: int, says: str) -> None:
    machine = json.loads((ROOT / "ds_memo" / "estimate" / "hardware_data" / "h200.json").read_text())
    (tmp_path / "machine.json").write_text("\ufeff" + json.dumps({**machine, "name": name}))
    hardware = tmp_path / "machine.json"
    ended = call(capsys, "estimate", "--model", TINY, "--hardware", hardware, "--gpus", "1", "--seq-length", "1K")
    assert ended.code == code and says in ended.out + ended.err and "\x1b" not in ended.out + ended.err
