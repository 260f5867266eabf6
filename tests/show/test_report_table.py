"""ds-memo report, and what printing a report shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ds_memo
from ds_memo.cli.main import main
from ds_memo.show.report_table import ReportError, as_text, read_report
from tests.command import complaint
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


def test_warnings_and_what_was_solved_are_shown(report: dict) -> None:
    more = {
        "warnings": ["first", "second"],
        "predicted": {
            "layers_s": 0.125,
            "host_bytes": 1 << 20,
            "device_bytes": 3 << 30,
            "device_budget": {"solved_for": 4 << 30, "free": 6 << 30, "to_come": 1 << 30, "withheld": 1 << 30, "why": "headroom"},
            "device_bytes_by_part": {"frames": 1 << 30, "reload_buffers": 0, "layer": 2 << 30, "head": 0, "non_layer": 0},
            "beside_bytes": {"forward": 0, "head": 2 << 20, "backward": 3 << 20, "always": 5 << 20},
        },
        "profile": {
            "method": "fit",
            "from_cache": True,
            "d2h_bytes_per_s": 5e10,
            "h2d_bytes_per_s": 6e10,
            "changes": ["alpha lowered"],
        },
        "mfu": 0.5,
        "step_s": 2.0,
        "tokens_per_s": 4096.0,
    }
    text = as_text({**report, **more})
    for words in ("0.125 s for the layers of a pass; 1 MiB host, 3 GiB device", "fit, from the cache; 50 GB/s d2h, 60 GB/s h2d"):
        assert words in text
    states = "1 GiB for gradients and optimizer states to come"
    assert f"device budget    4 GiB of 6 GiB free, {states}, 1 GiB withheld (headroom)\n" in text
    assert "at the peak      1 GiB frames on the device, 2 GiB one layer\n" in text
    assert "non-layer memory 2 MiB head and loss, 3 MiB backward, 5 MiB other streams\n" in text
    for words in ("changed          alpha lowered", "2 s a step, 4,096 tokens/s of this rank, MFU 50.0%"):
        assert words in text
    assert text.splitlines()[-2:] == ["warning          first", "warning          second"]
    plain = as_text({**report, "checkpointing": False, "stored_bytes_per_layer": [0] * LAYERS, "plan": None})
    assert plain.startswith(f"ds_memo          plain training: no layer of {LAYERS} is checkpointed") and "on the" not in plain


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


def test_a_bar_of_less_than_nothing(report: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest bar has 30 characters; -1e12 would scale it by 1e12."""
    (tmp_path / "odd.json").write_text(json.dumps({**report, "stored_bytes_per_layer": [-1, -1e12]}))
    assert "negative" in complaint(capsys, "report", tmp_path / "odd.json")


def test_escapes_in_a_report(report: dict) -> None:
    text = as_text({**report, "binding": "\x1b[31m\n\ud800", "warnings": ["w" * 10**6]})
    assert "set by           \\x1b[31m\\n\\ud800\n" in text and len(text) < 10_000


def test_wrong_files_end_with_2(report: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.json").write_text(json.dumps({**report, "stall_s": "none"}))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name in ("missing.json", "bytes.json", "odd.json", "."):
        complaint(capsys, "report", tmp_path / name)
