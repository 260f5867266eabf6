"""The table of longest lengths: what the file has is what the page says, and is not run again."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks import longest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "lengths-emulated.json"


def test_the_page_has_the_table_of_the_file() -> None:
    assert "\n".join(longest.table(json.loads(KEPT.read_text())["rows"])) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_what_the_file_has_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = json.loads(KEPT.read_text())
    less = copy.deepcopy(kept)
    del less["rows"]["llama8b 24/16"]["rivals"]["upipe"], less["rows"]["gpt7b 20/48"]["solved"]
    file, asked = tmp_path / "lengths.json", []
    file.write_text(json.dumps(less))

    def emulate(*words: str) -> object:
        asked.append(words)
        if words[0] == "step":
            assert json.loads(file.read_text())["unfinished"]
            return kept["rows"]["gpt7b 20/48"]["solved"]["steps"]
        return {"rivals": {"upipe": kept["rows"]["llama8b 24/16"]["rivals"]["upipe"]}}

    monkeypatch.setattr(longest, "emulate", emulate)
    assert longest.main(["-o", str(file)]) == 0
    assert json.loads(file.read_text()) == kept
    assert asked == [
        ("capacity", "llama8b", "--device-gib", "24", "--host-gib", "16", "--rivals", "upipe"),
        ("step", "gpt7b", "212992", "--device-gib=20", '--memo={"host_memory_gib": 48}'),
    ]
