"""The estimator against measurements of others: rows have sources, long steps are met, the docs show what is printed."""

import json
from pathlib import Path

import pytest

from benchmarks.published_runs import DATA, answer, main

PUBLISHED = json.loads(DATA.read_text())
DOCS = Path(__file__).parents[2] / "docs"


def test_every_row_has_its_source():
    assert {run["source"] for run in PUBLISHED["runs"]} == set(PUBLISHED["sources"])
    assert all(len(why) > 10 for why in PUBLISHED["not_estimated"].values())


@pytest.mark.slow
def test_trl_s_million_tokens():
    run = PUBLISHED["runs"][0]
    found = answer(run)
    assert found.seconds == pytest.approx(run["s"], rel=0.05)
    assert found.gib == pytest.approx(run["gib"], rel=0.03)
    assert answer(run | {"kernel": "flash"}).seconds == pytest.approx(606, rel=0.06)


@pytest.mark.slow
def test_steps_beyond_two_minutes_are_met_and_the_docs_show_all(tmp_path, capsys):
    main(["-o", str(tmp_path / "runs.json")])
    rows = json.loads((tmp_path / "runs.json").read_text())["runs"]
    long = [row for row in rows if row.get("s", 0) > 130]
    assert len(long) == 15
    assert all(row["estimated_s"] == pytest.approx(row["s"], rel=0.055) for row in long)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "\n".join(printed) in (DOCS / "estimate.md").read_text()
