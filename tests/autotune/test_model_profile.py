"""Profiles on disk: who takes which, and files that are no good."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
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


# ---- files that are no good


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


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile that a run has written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        profiled()
        return next(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json"))


def cut_short(file: Path) -> None:
    file.write_text(file.read_text()[:200])


def another_key(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "key": {"layers": 7}}))


def a_link(file: Path) -> None:
    file.rename(file.with_name("victim"))
    file.symlink_to(file.with_name("victim"))


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


BAD = {
    cut_short: "is not used: .*no JSON.*measuring again",
    another_key: "is not used: .*another run.*measuring again",
    a_link: "is a link",
    a_pipe: "is no regular file",
    lambda file: os.truncate(file, 1 << 40): "more than 16,777,216 bytes",
    lambda file: file.parent.chmod(0o777): "profiles are not cached: .*others may write",
}
"""Each kind of damage to the text is in tests/profile/test_json_file.py."""


@pytest.mark.parametrize("damage", BAD, ids=range(len(BAD)))
def test_a_bad_file_is_measured_again_with_a_warning(damage: Callable[[Path], object], good: Path, own_cache: Path) -> None:
    own_cache.mkdir(0o700, parents=True)
    file = Path(shutil.copy(good, own_cache))
    file.chmod(0o600)
    own_cache.parent.chmod(0o700)
    damage(file)
    warned(BAD[damage])
    if damage is a_link:
        assert not file.is_symlink() and file.with_name("victim").read_text() == good.read_text()
    if own_cache.stat().st_mode & 0o777 == 0o777:
        warned(BAD[damage])
        own_cache.chmod(0o700)
    assert profiled()["profile"]["from_cache"]


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as a container may have it."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    warned("profiles are not cached: .*home")
