"""The comparison of two states of the code finds what differs, and nothing else."""

import json

import pytest

from tests import golden


def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(golden, "CONFIGURATIONS", {"alpha 0": golden.CONFIGURATIONS["alpha 0"]})
    files = [str(tmp_path / name) for name in ("before.json", "after.json", "other.json")]
    for file in files[:2]:
        assert golden.main(file) == 0
    monkeypatch.setattr(golden, "CONFIGURATIONS", {"alpha 0": ("llama", golden.HALF)})
    assert golden.main(files[2]) == 0
    capsys.readouterr()
    assert golden.main(*files[:2]) == 0 and capsys.readouterr().out == "1 configurations, 0 differences\n"
    assert golden.main(*files[1:]) == 1
    shown = capsys.readouterr().out
    assert "alpha 0: report: alpha: 0.0 -> 0.5\n" in shown and "alpha 0: report: bytes_to_host: " in shown
    steps = json.loads((tmp_path / "before.json").read_text())["alpha 0"]["steps"]
    assert len(steps) == 3 and len(steps[0]) > 30
