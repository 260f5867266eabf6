"""Files that are written atomically, and folders and files that are trusted."""

import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ds_memo import files
from ds_memo.errors import quoted
from ds_memo.files import NotPrivate, TooLong

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_a_new_file_has_what_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    files.write_atomic(tmp_path / "new", "text")
    assert mode(tmp_path / "new") == 0o640


@pytest.mark.parametrize("modes", [0o600, 0o664, 0o755])
def test_an_existing_file_keeps_its_modes_and_its_owner(tmp_path: Path, modes: int) -> None:
    place = tmp_path / "old"
    place.write_text("old")
    owner = (1234, 2345) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(place, *owner)
    place.chmod(modes)
    files.write_atomic(place, "new")
    assert place.read_text() == "new" and mode(place) == modes
    assert (place.stat().st_uid, place.stat().st_gid) == owner


def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / ("n" * 255), "text")
    assert (tmp_path / ("n" * 255)).read_text() == "text"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "to").write_text("old")
    (tmp_path / "link").symlink_to("to")
    files.write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "to").read_text() == "new"


@pytest.mark.processes
def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    code = "from pathlib import Path; from ds_memo.files import write_atomic; write_atomic(Path('/dev/stdout'), 'text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "text", done.stderr


@pytest.mark.processes
def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk: the write fails halfway."""
    place = tmp_path / "plan.json"
    place.write_text("old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from ds_memo.files import write_atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: write_atomic(Path(sys.argv[1]), 'x' * (1 << 20))\n"
        "except OSError as error: print(error.errno)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "27" and place.read_text() == "old", done.stderr
    assert os.listdir(tmp_path) == ["plan.json"]


def test_bounded_reading_ends() -> None:
    with pytest.raises(TooLong, match="more than 1,000 bytes"):
        files.read_bounded("/dev/zero", 1000)


# ---- trust


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert mode(files.private_folder(tmp_path / "a" / "b")) == mode(tmp_path / "a") == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("modes", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, modes: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(modes)
    with pytest.raises(NotPrivate, match="others may write"):
        files.private_folder(tmp_path / "open")


@pytest.mark.parametrize("modes, refused", [(0o770, True), (0o707, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_in_which_others_rename_is_refused(tmp_path: Path, modes: int, refused: bool) -> None:
    """They could put a folder of their own in the cache's place, and files that are executed into it."""
    above = tmp_path / "above"
    (above / "cache").mkdir(mode=0o700, parents=True)
    above.chmod(modes)
    makers = [lambda: files.private_folder(above / "cache"), lambda: files.private_folder(above / "new" / "cache")]
    for make in [*makers, files.scratch_folder("scratch", above).__enter__]:
        with pytest.raises(NotPrivate, match=f"{above}: others may write") if refused else nullcontext():
            make()
    assert (above / "new").exists() is not refused


@ROOT_ONLY
def test_a_folder_of_another_user_is_refused_also_above(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "cache").mkdir(mode=0o700, parents=True)
    os.chown(tmp_path / "theirs", 1234, -1)
    for folder in ("theirs", "theirs/cache"):
        with pytest.raises(NotPrivate, match="theirs: belongs to user 1234"):
            files.private_folder(tmp_path / folder)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotPrivate):
            files.private_folder(place)


def test_a_private_file_is_written_and_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write_private(tmp_path / "mine", "text")
    finally:
        os.umask(before)
    assert files.read_private(tmp_path / "mine", 100) == b"text" and mode(tmp_path / "mine") == 0o600
    with pytest.raises(TooLong):
        files.read_private(tmp_path / "mine", 3)


def test_links_pipes_and_open_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "to").write_text("secret")
    (tmp_path / "link").symlink_to("to")
    os.mkfifo(tmp_path / "pipe")  # opened without O_NONBLOCK it would wait for ever
    (tmp_path / "open").write_text("anyone's")
    (tmp_path / "open").chmod(0o666)
    for name in ("link", "pipe", "open", "."):
        with pytest.raises(NotPrivate):
            files.read_private(tmp_path / name, 100)


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cached").symlink_to("victim")
    files.write_private(tmp_path / "cached", "new")
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "cached").is_symlink()


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert files.cache_home() == tmp_path / ".cache" / "ds_memo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_home() == tmp_path / "xdg" / "ds_memo"


@pytest.mark.parametrize("path", ["~nosuchuser/x", "a\0b"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(NotPrivate):
        files.expanded(path)


# ---- names in messages


def test_names_in_messages_are_harmless() -> None:
    assert quoted("decoder.layer 0 é ×") == "decoder.layer 0 é ×"
    assert quoted("a\x1b[31m\nb\ud800") == "a\\x1b[31m\\nb\\ud800"
    assert len(quoted("x" * 1_000_000)) < 160 and "[999,880 characters]" in quoted("x" * 1_000_000)
