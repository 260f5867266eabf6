"""The searches for longest lengths: what the file has is not run again."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks import longest
from benchmarks.results import FOLDER


def asked(monkeypatch: pytest.MonkeyPatch, file: Path, kept: dict, less: dict, *words: str) -> list[tuple[str, ...]]:
    """Complete the file, and return what was run for it; each run finds what `kept` has."""
    found: list[tuple[str, ...]] = []
    file.write_text(json.dumps(less))

    def emulate(*call: str) -> object:
        found.append(call)
        rows = [row for name, row in kept["rows"].items() if name.split()[0] == call[1]]
        if call[0] == "step":
            return rows[0]["solved"]["steps"]
        if "--lengths" in call:
            return {"rivals": {longest.PLANNED: rows[0]["where whole mixers end"]}}
        (row,) = [row for name, row in kept["rows"].items() if name == f"{call[1]} {call[3]}/{call[5]}"]
        return {"rivals": {call[7]: row["rivals"][call[7]]}}

    monkeypatch.setattr(longest, "emulate", emulate)
    assert longest.main([*words, "-o", str(file)]) == 0
    assert json.loads(file.read_text()) == kept
    return found


def test_what_the_file_has_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = json.loads((FOLDER / "lengths-emulated.json").read_text())
    less = copy.deepcopy(kept)
    del less["rows"]["llama8b 24/16"]["rivals"]["upipe"], less["rows"]["gpt7b 20/48"]["solved"]
    assert asked(monkeypatch, tmp_path / "lengths.json", kept, less) == [
        ("capacity", "llama8b", "--device-gib", "24", "--host-gib", "16", "--rivals", "upipe"),
        ("step", "gpt7b", "212992", "--device-gib=20", '--memo={"host_memory_gib": 48}'),
    ]
    kept = json.loads((FOLDER / "hybrids-emulated.json").read_text())
    less = copy.deepcopy(kept)
    del less["rows"]["nemotronh 16/64"]["where whole mixers end"]
    assert asked(monkeypatch, tmp_path / "hybrids.json", kept, less, "--hybrids") == [
        ("capacity", "nemotronh", "--device-gib", "16", "--host-gib", "64", "--rivals", longest.PLANNED, "--lengths", "46080"),
    ]
