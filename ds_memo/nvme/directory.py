"""Directories for files of activations: what lies below them, how much room there is, and a private file in each."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ds_memo.errors import MemoError, quoted
from ds_memo.units import GIB

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "afs")
HEADROOM = 0.1
"""Share of a file system's free bytes that is left alone if memo.nvme.gib is absent."""


@dataclass(frozen=True)
class Directory:
    """A directory that exists, and what lies below it."""

    path: Path
    device: int
    """Number of its file system."""
    kind: str
    """What the file system is, e.g. "ext4"."""
    node: int | None
    """NUMA node of the drive; None: not known."""

    @property
    def free(self) -> int:
        """Bytes that this user can still allocate on the file system."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize


def open_directory(path: str, warn: Callable[[str], None], root: Path = Path("/")) -> Directory:
    """Look at a directory.

    Args:
        warn: told of a path over a network.
        root: the folder that holds /proc and /sys.

    Raises:
        MemoError: there is no such directory, or its files would be memory.
    """
    real = Path(os.path.realpath(path))
    try:
        if not real.is_dir():
            raise MemoError(f"memo.nvme.path: {quoted(path)} is no directory; make one on the drive, or name another")
        device = os.stat(real).st_dev
    except (OSError, ValueError) as error:
        raise MemoError(f"memo.nvme.path: {quoted(path)} cannot be used ({error}); name another directory") from error
    kind = _file_system(real, device, root)
    if kind in IN_MEMORY:
        raise MemoError(
            f"memo.nvme.path: {quoted(path)} is on {kind}, which is host memory itself; name a directory on a drive, "
            "or raise memo.host_memory_gib"
        )
    if kind in OVER_NETWORK or kind.startswith("fuse."):
        warn(
            f"memo.nvme.path: {quoted(path)} is on {kind}, over a network: its bandwidth is shared with others. "
            "Name a drive of this node"
        )
    return Directory(real, device, kind, _node(device, root))


def near(directories: Sequence[Directory], node: int | None) -> list[Directory]:
    """Return the directories on drives of a NUMA node; all, if none is known to be."""
    return [directory for directory in directories if node is not None and directory.node == node] or list(directories)


def room(directories: Sequence[Directory]) -> int:
    """Return the bytes that files of equal size, one in each directory, can take, less headroom."""
    sharing = [sum(other.device == directory.device for other in directories) for directory in directories]
    each = min(directory.free // count for directory, count in zip(directories, sharing, strict=True))
    return int(each * (1 - HEADROOM)) * len(directories)


def private_file(directory: Directory) -> int:
    """Make a file without a name, for this user alone, that bypasses the page cache. Return its descriptor.

    The system frees its space when the process ends, however it ends.

    Raises:
        MemoError: the system refuses.
    """
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(directory.path, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise _refused(directory, error) from error
    name = directory.path / f".ds_memo-{secrets.token_hex(8)}"
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _refused(directory, error) from error
    finally:  # where O_DIRECT is refused, and at Ctrl-C, it has been made, too
        with suppress(OSError):
            os.unlink(name)


def grow(handle: int, directory: Directory, size: int, more: int) -> None:
    """Allocate `more` bytes behind a file's `size`, so that a full disk is an error now.

    Raises:
        MemoError: the system refuses; says how much there is.
    """
    try:
        os.posix_fallocate(handle, size, more)
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(handle, size)  # what was allocated before the refusal
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _refused(directory, error) from error
        raise MemoError(
            f"files for activations: {directory.path} has no room for {more / GIB:.3g} GiB more beside this rank's "
            f"{size / GIB:.3g} GiB; {directory.free / GIB:.3g} GiB are free ({error.strerror}). Free some, or lower "
            "memo.nvme.gib or memo.alpha"
        ) from error


def buffers_silently(handle: int, page: memoryview) -> bool:
    """Return True if what is written to the file stays in the page cache, though it bypasses it by name.

    Args:
        page: memory to write from, aligned; the file's first bytes are overwritten.
    """
    os.pwritev(handle, [page], 0)
    through_cache = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.preadv(through_cache, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
    except OSError:  # it would have to wait for the drive, or the file system cannot tell
        return False
    finally:
        os.close(through_cache)


def _refused(directory: Directory, error: OSError) -> MemoError:
    return MemoError(
        f"memo.nvme.path: {quoted(str(directory.path))} ({directory.kind}) takes no file that bypasses the page cache "
        f"({error.strerror}); name a directory of yours on ext4 or xfs"
    )


def _file_system(path: Path, device: int, root: Path) -> str:
    """Return the kind of the file system of a path, from the mount whose mount point is nearest above it."""
    number, best, kind = f"{os.major(device)}:{os.minor(device)}", -1, "unknown"
    with suppress(OSError):
        for line in os.fsdecode((root / "proc/self/mountinfo").read_bytes()).splitlines():
            fields, _, rest = line.partition(" - ")
            _, _, its_number, _, mount_point, *_ = fields.split()
            mount_point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount_point)
            if path.is_relative_to(mount_point) and len(mount_point) + (its_number == number) * 4096 > best:
                best, kind = len(mount_point) + (its_number == number) * 4096, rest.split()[0]
    return kind


def _node(device: int, root: Path) -> int | None:
    """Return the NUMA node of a block device, from the nearest of its ancestors that says one."""
    block = Path(os.path.realpath(root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"))
    for level in (block, *block.parents):
        with suppress(OSError, ValueError):
            number = int((level / "numa_node").read_text())
            return number if number >= 0 else None
    return None
