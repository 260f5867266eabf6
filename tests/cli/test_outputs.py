"""Output files of `ds-memo`: complete or not written, with the modes of the umask or of the old file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.command import call
from tests.plan.instances import TRACES
from tests.processes import ROOT, python

TRACE = str(TRACES[0])
ESTIMATE = ("estimate", "--model", str(ROOT / "ds_configs" / "models" / "tiny.json"), "--hardware", "h200", "--gpus", "1")
WRITERS = {
    "plan": ("plan", TRACE, "-o", "out.json"),
    "show png": ("show", "plan.json", "-o", "out.png"),
    "timeline html": (*ESTIMATE, "--seq-length", "1K", "--timeline", "out.html"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "plan", TRACE, "-o", "plan.json").code == 0
    return tmp_path


@pytest.mark.parametrize("what", WRITERS)
def test_who_reads_the_old_file_reads_all_of_it(here: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """Also where the name is too long for a longer one. An old file keeps its modes; a new one gets the umask's."""
    before, words = os.umask(0o027), WRITERS[what]
    try:
        out = here / words[-1].replace("out", "o" * 240)
        words = (*words[:-1], str(out))
        assert call(capsys, *words).code == 0
        assert stat.S_IMODE(out.stat().st_mode) == 0o640
        written = out.read_bytes()
        out.write_text("old")
        out.chmod(0o604)
        with open(out) as reader:
            assert call(capsys, *words).code == 0
            assert reader.read() == "old"
        assert stat.S_IMODE(out.stat().st_mode) == 0o604 and len(out.read_bytes()) > 0.9 * len(written) > 20
    finally:
        os.umask(before)


@pytest.mark.processes
def test_a_full_disk_leaves_the_old_file(here: Path) -> None:
    """RLIMIT_FSIZE stands for a full disk."""
    words = WRITERS["show png"]
    (here / words[-1]).write_text("old")
    code = (
        "import resource, signal, sys; from ds_memo.cli import main as cli; import matplotlib\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = python("-c", code, *words, cwd=here)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"ds-memo {words[0]}: cannot write {words[-1]}: File too large"
    assert (here / words[-1]).read_text() == "old" and sorted(os.listdir(here)) == sorted(["plan.json", words[-1]])


def test_surrogates_are_written_as_escapes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CSV problem is read as UTF-8, but a plan's JSON may hold what no file can: half of a pair."""
    text = (here / "plan.json").read_text().replace('"name": "L0.f"', r'"name": "\ud800\u001b[31m<\/script>"')
    (here / "plan.json").write_text(text)
    for form in ("png", "html"):
        assert call(capsys, "show", "plan.json", "-o", f"out.{form}").code == 0
    page = (here / "out.html").read_text()
    assert "\x1b" not in page.rpartition("Plotly.newPlot(")[2] and "[31m</script>" not in page


def test_names_that_are_no_formulas_and_letters_that_no_font_has(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (here / "plan.json").read_text()
    for kind, phase in (("$_{$", "$x^{y$"), ("kind", "層ሴ")):
        (here / "plan.json").write_text(
            text.replace('"name": "L0.f"', f'"name": "{phase}"').replace('"kind": "', f'"kind": "{kind}')
        )
        assert call(capsys, "show", "plan.json") == (0, "plan.png\n", "")


def test_names_of_models_and_machines_that_are_no_formulas(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "$x^{y$.json").write_text(Path(ESTIMATE[2]).read_text())
    words = ("estimate", "--model", "$x^{y$.json", "--hardware", "h200", "--gpus", "1", "--sweep", "1K,2K", "-o", "out.svg")
    assert call(capsys, *words).code == 0
