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
