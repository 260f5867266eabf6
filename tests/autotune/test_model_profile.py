"""Profiles on disk: who takes which, and files that are no good."""

from __future__ import annotations

import json
import os
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


@pytest.mark.slow
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
        (lambda text: json.dumps({**json.loads(text), "key": {"layers": 7}}), "another run"),
    ],
    ids=["truncated", "other model"],
)
def test_a_bad_file_is_ignored_with_a_warning(own_cache: Path, damage: Any, says: str) -> None:
    """Each kind of damage is in tests/profile/test_json_file.py."""
    profiled()
    (file,) = own_cache.iterdir()
    file.write_text(damage(file.read_text()))
    with pytest.warns(ds_memo.MemoWarning, match=f"is not used: .*{says}.*measuring again"):
        report = profiled()
    assert not report["profile"]["from_cache"]
    assert profiled()["profile"]["from_cache"]  # it was written anew


# ---- trust


def warned(says: str, model: Any = None) -> dict[str, Any]:
    """A first step that warns of this alone."""
    with pytest.warns(ds_memo.MemoWarning, match=says) as caught:
        report = profiled(model)
    assert [str(warning.message) for warning in caught if "profile" in str(warning.message)] == report["warnings"]
    assert len(report["warnings"]) == 1 and not report["profile"]["from_cache"]
    return report


def test_folders_and_files_are_this_user_s_alone(own_cache: Path) -> None:
    before = os.umask(0)
    try:
        profiled()
    finally:
        os.umask(before)
    (file,) = own_cache.iterdir()
    assert (own_cache.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_link_in_the_cache_is_not_written_through(own_cache: Path, tmp_path: Path) -> None:
    profiled()
    (file,) = own_cache.iterdir()
    (tmp_path / "victim").write_text("precious")
    file.unlink()
    file.symlink_to(tmp_path / "victim")
    warned("is a link")
    assert (tmp_path / "victim").read_text() == "precious" and not file.is_symlink()
    assert profiled()["profile"]["from_cache"]


def test_a_pipe_in_the_cache_is_not_waited_for(own_cache: Path) -> None:
    profiled()
    (file,) = own_cache.iterdir()
    file.unlink()
    os.mkfifo(file)
    warned("is no regular file")
    assert profiled()["profile"]["from_cache"]


def test_a_file_without_end_in_the_cache(own_cache: Path) -> None:
    profiled()
    (file,) = own_cache.iterdir()
    os.truncate(file, 1 << 40)
    warned("more than 16,777,216 bytes")


@pytest.mark.slow
def test_a_folder_that_others_may_write_to_is_not_used(own_cache: Path) -> None:
    profiled()
    own_cache.chmod(0o777)
    for _ in range(2):
        warned("profiles are not cached: .*others may write")
    own_cache.chmod(0o700)
    assert profiled()["profile"]["from_cache"]


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as a container may have it."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    warned("profiles are not cached: .*home")


def test_a_profile_that_no_run_can_have_is_measured_again(own_cache: Path) -> None:
    profiled()
    (file,) = own_cache.iterdir()
    data = json.loads(file.read_text())
    data["kinds"][0]["samples"][0]["outputs"][0]["rows"] = 10**18
    file.write_text(json.dumps(data))
    warned("rows is 1000000000000000000, expected 0 to")
