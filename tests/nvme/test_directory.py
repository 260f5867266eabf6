"""Directories: what is refused, warned about and left behind."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import pytest

from ds_memo.errors import MemoError
from ds_memo.nvme import directory as module
from ds_memo.nvme.directory import Directory, buffers_silently, grow, near, open_directory, private_file, room
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import GIB
from tests.nvme.files import directory


@pytest.fixture
def here(tmp_path):
    return directory(tmp_path)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int, when=lambda *args: True) -> list[tuple]:
    """Have a call of the system fail where `when` says so. Return the calls so far."""
    calls, real = [], getattr(os, name)

    def failing(*args, **kwargs):
        calls.append(args)
        if when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(module.os, name, failing)
    return calls


# ---- what lies below


def test_a_directory_on_this_disk(tmp_path):
    found = open_directory(str(tmp_path), pytest.fail)
    assert found.path == tmp_path.resolve()
    assert found.device == os.stat(tmp_path).st_dev
    assert found.kind not in ("unknown", *module.IN_MEMORY)
    assert found.free > 0


def test_memory_is_refused_with_the_reason():
    with pytest.raises(MemoError, match="/dev/shm is on tmpfs, which is host memory itself"):
        open_directory("/dev/shm", pytest.fail)


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "missing", tmp_path / "file" / "below"):
        with pytest.raises(MemoError, match=r"memo\.nvme\.path"):
            open_directory(str(path), pytest.fail)


def mounted(root: Path, *mounts: tuple[str, str, str]) -> Path:
    """Write a mountinfo of (mount point, device, kind) below a root. Return the root."""
    (root / "proc/self").mkdir(parents=True)
    lines = [f"20 1 {device} / {point} rw,relatime shared:1 - {kind} /dev/x rw" for point, device, kind in mounts]
    (root / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    return root


def number_of(path: Path) -> str:
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "9p"])
def test_a_network_is_warned_about(kind, tmp_path):
    (tmp_path / "data").mkdir()
    root = mounted(tmp_path / "root", ("/", "1:1", "ext4"), (str(tmp_path), number_of(tmp_path), kind))
    told = []
    assert open_directory(str(tmp_path / "data"), told.append, root).kind == kind
    assert len(told) == 1 and f"is on {kind}, over a network" in told[0]


def test_the_nearest_mount_counts_and_its_number_more(tmp_path):
    own = number_of(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    nearest = mounted(tmp_path / "1", ("/", "1:1", "ext4"), (str(tmp_path / "a"), "1:2", "btrfs"))
    assert open_directory(str(tmp_path / "a/b"), pytest.fail, nearest).kind == "btrfs"
    by_number = mounted(tmp_path / "2", ("/", own, "xfs"), (str(tmp_path / "a"), "1:2", "btrfs"))
    assert open_directory(str(tmp_path / "a/b"), pytest.fail, by_number).kind == "xfs"


# ---- near


def drive(root: Path, tmp_path: Path, node: str | None) -> None:
    """Make a /sys with this file system's partition on an NVMe drive of a NUMA node."""
    device = root / "sys/devices/pci0000:00/0000:00:1f.0"
    (partition := device / "nvme/nvme0/nvme0n1/nvme0n1p1").mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(node)
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block" / number_of(tmp_path)).symlink_to(partition)


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None), ("?\n", None)])
def test_the_numa_node_of_a_drive(told, node, tmp_path):
    root = mounted(tmp_path / "root", ("/", number_of(tmp_path), "ext4"))
    drive(root, tmp_path, told)
    assert open_directory(str(tmp_path), pytest.fail, root).node == node


def test_near_takes_those_of_the_node_or_all():
    on = [Directory(Path(f"/{number}"), number, "ext4", node) for number, node in enumerate([0, 1, 1, None])]
    assert near(on, 1) == on[1:3]
    assert near(on, 0) == on[:1]
    assert near(on, 2) == near(on, None) == on


def test_room_counts_a_shared_file_system_once(tmp_path):
    one, two = directory(tmp_path / "1"), directory(tmp_path / "2")
    assert room([one, two]) == pytest.approx(room([one]), rel=0.01)
    assert room([one]) == pytest.approx(one.free * 0.9, rel=0.01)


# ---- files


def is_private(handle: int, path: Path) -> bool:
    found = os.fstat(handle)
    return found.st_nlink == 0 and stat.S_IMODE(found.st_mode) == 0o600 and not os.listdir(path)


def test_a_file_is_private_and_has_no_name(here):
    handle = private_file(here)
    assert is_private(handle, here.path)
    assert not os.get_inheritable(handle)
    assert os.path.realpath(f"/proc/self/fd/{handle}").startswith(str(here.path.resolve()))
    os.close(handle)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL])
def test_where_files_need_a_name_they_have_it_for_a_moment(number, here, monkeypatch):
    old = os.umask(0)
    calls = refuse(monkeypatch, "open", number, lambda path, flags, *_: flags & os.O_TMPFILE == os.O_TMPFILE)
    handle = private_file(here)
    os.umask(old)
    assert is_private(handle, here.path)
    assert len(calls) == 2 and calls[1][1] & os.O_NOFOLLOW and calls[1][1] & os.O_EXCL
    os.close(handle)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_with_numbers(number, here, monkeypatch):
    handle = private_file(here)
    grow(handle, here, 0, 4 * PAGE)
    real = os.posix_fallocate

    def half(handle, begin, nbytes):
        real(handle, begin, nbytes // 2 // PAGE * PAGE)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "posix_fallocate", half)
    with pytest.raises(MemoError, match=rf"no room for 2 GiB more beside this rank's .* GiB are free \({os.strerror(number)}\)"):
        grow(handle, here, 4 * PAGE, 2 * GIB)
    assert os.fstat(handle).st_size == 4 * PAGE
    assert os.fstat(handle).st_blocks * 512 <= 8 * PAGE, "its own and the file system's list of them"
    os.close(handle)


def test_a_file_system_that_allocates_nothing_is_not_called_full(here, monkeypatch):
    handle = private_file(here)
    refuse(monkeypatch, "posix_fallocate", errno.EINVAL)
    with pytest.raises(MemoError, match="takes no file that bypasses the page cache"):
        grow(handle, here, 0, PAGE)
    os.close(handle)


@pytest.mark.parametrize("direct", [True, False])
def test_direct_files_are_not_kept_in_the_page_cache(direct, here):
    """The negative control: the same file without O_DIRECT."""
    page = memoryview(mmap.mmap(-1, PAGE))
    handle = private_file(here) if direct else os.open(here.path, os.O_TMPFILE | os.O_RDWR, 0o600)
    assert buffers_silently(handle, page) is not direct
    os.close(handle)
