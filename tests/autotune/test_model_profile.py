"""Profiles on disk: who takes which, and files that are no good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ds_memo
from tests.models import Batch, build, step

BATCH = Batch.random(2, 300)


pytestmark = pytest.mark.usefixtures("own_cache")


def attached(model: Any) -> Any:
    return ds_memo.attach(model, {"enabled": True, "plan": {"enabled": False}})


def profiled(model: Any = None) -> dict[str, Any]:
    model = model or build("llama")
    handle = attached(model)
    step(model, BATCH)
    report = handle.report()
    handle.detach()
    return report


def test_the_second_start_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not profiled()["profile"]["from_cache"]
    monkeypatch.setattr("ds_memo.profile.run.measure", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr("ds_memo.profile.run.CopyBench", lambda *args: pytest.fail("copied"))
    assert profiled()["profile"]["from_cache"]


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
def test_another_run_measures_for_itself() -> None:
    profiled()
    assert not profiled(build("plain"))["profile"]["from_cache"]
    assert not profiled(build("llama").double())["profile"]["from_cache"]
    assert profiled()["profile"]["from_cache"]


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda text: text[: len(text) // 2], "no JSON"),
        (lambda text: text.replace('"format": 3', '"format": 0'), "no profile of format 3"),
        (lambda text: json.dumps({**json.loads(text), "key": {"layers": 7}}), "another run"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # each kind of damage is in tests/profile/test_sample.py
            for case in [
                (lambda text: text.replace('"forward_s": ', '"forward_s": -'), "negative"),
                (lambda text: text.replace('"forward_s"', '"forwards"'), "fields"),
                (lambda text: json.dumps({**json.loads(text), "layers": [99]}), "fit together"),
                (lambda text: "", "no JSON"),
            ]
        ),
    ],
    ids=["truncated", "other version", "other model", "negative", "fields", "layers", "empty"],
)
def test_a_bad_file_is_ignored_with_a_warning(own_cache: Path, damage: Any, says: str) -> None:
    profiled()
    (file,) = own_cache.iterdir()
    file.write_text(damage(file.read_text()))
    with pytest.warns(ds_memo.MemoWarning, match=f"is not used: .*{says}.*measuring again"):
        report = profiled()
    assert not report["profile"]["from_cache"]
    assert profiled()["profile"]["from_cache"]  # it was written anew
