"""ds-memo report, and what printing a report shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ds_memo
from ds_memo.cli.main import main
from ds_memo.show.report_table import ReportError, as_text, read_report
from tests.models import LAYERS, Batch, build, step
from tests.processes import python


@pytest.fixture(scope="module")
def report() -> dict:
    """Return the report of three real steps, read back from JSON."""
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    for _ in range(4):
        step(model, Batch.random(4, 96))
    found = ds_memo.report(handle)
    handle.detach()
    assert isinstance(found, dict) and found["layers_on_device"] == [LAYERS - 1]
    assert str(found) == as_text(found)
    return json.loads(json.dumps(found))


def test_what_is_shown(report: dict) -> None:
    lines = dict((line[:17].strip(), line[17:]) for line in as_text(report).splitlines())
    assert lines["ds_memo"] == f"active: {LAYERS} layers, 1 of them resident, alpha 0.5"
    assert lines["set by"] == report["binding"]
    assert "on the host" in lines[f"layers 0-{LAYERS - 2}"] and "on the device" in lines[f"layer {LAYERS - 1}"]
    assert lines[f"layer {LAYERS - 1}"].endswith("█" * 30)
    assert f"{report['gemm_flops_recomputed_fraction']:.1%}" in lines["recomputed"]
    assert lines["addresses"].startswith("plan of ") and f"{report['plan']['hits']} of " in lines[""]
    assert set(lines) >= {"over the link", "host memory", "stalls"}


@pytest.mark.processes
def test_the_command(report: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads a report, and a run's metrics with one; nothing heavy is imported."""
    for name, data in (("report.json", report), ("metrics.json", {"steps": [], "report": report})):
        (tmp_path / name).write_text(json.dumps(data))
        assert main(["report", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == as_text(report) + "\n"
    code = "import sys; from ds_memo.cli.main import main; main(['report', '-']); sys.exit('torch' in sys.modules)"
    found = python("-c", code, stdin=json.dumps(report))
    assert (found.returncode, found.stdout) == (0, as_text(report) + "\n"), found.stderr


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[1]", "got a list"),
        ('{"report": null}', "metrics of a run without memo"),
        ('{"alpha": 1}', "no report of ds_memo: it has no binding"),
    ],
)
def test_what_is_no_report(text: str, says: str) -> None:
    with pytest.raises(ReportError, match=says):
        read_report(text, "x.json")
