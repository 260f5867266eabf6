"""Read and write files: written completely or not at all, and trusted only where this user alone can write. See docs/trust.md."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds_memo.errors import MemoError, quoted

MOST_CONFIG_BYTES = 1 << 24
"""Most bytes of a model's or machine's JSON."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(MemoError):
    """A folder or file that others may have written, or that cannot be made; the message says which and why."""


class TooLong(MemoError):
    """A file that is longer than its reader allows; the message has the limit."""


# ---- output files of the user


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file, or leave it unchanged: readers never see a partial file, and a full disk truncates nothing.

    A new file has the modes that the umask leaves. An existing one keeps its modes, and its owner and group if the system lets
    this user set them. Links are followed; a pipe or a device (``/dev/stdout``) is written to directly.

    Args:
        path: the file.
        data: the content; text is written as UTF-8.

    Raises:
        OSError: the file cannot be written, or exists without write permission.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    if str(path).startswith(("/dev/", "/proc/")) or (there is not None and not stat.S_ISREG(there.st_mode)):
        Path(path).write_bytes(content)  # raises for a folder
        return
    path = Path(os.path.realpath(path))
    if there is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    _replace(path, content, there)


def _replace(path: Path, content: bytes, there: os.stat_result | None, mode: int = 0o666) -> None:
    scratch = path.with_name(f".ds_memo-{secrets.token_hex(8)}.part")  # the name itself may be 255 bytes
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if there is not None:
                with suppress(PermissionError):  # another user's file in a folder that this user may write
                    os.fchown(handle, there.st_uid, there.st_gid)
                os.fchmod(handle, stat.S_IMODE(there.st_mode))  # after the owner, whose change clears set-id bits
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a crash, on file systems that need it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_output(path: str | Path, data: str | bytes) -> None:
    """Write the file of an option like -o, completely or not at all.

    Raises:
        MemoError: the file cannot be written.
    """
    try:
        write_atomic(Path(path), data)
    except (OSError, ValueError) as error:  # a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise MemoError(f"cannot write {quoted(str(path), 400)}: {why}") from None


# ---- input files of the user


def read_bounded(path: str | Path, most: int) -> bytes:
    """Return all bytes of a file, pipe or device.

    Args:
        most: limit in bytes, since ``/dev/zero`` has no end and a file may exceed memory.

    Raises:
        TooLong: the file is longer.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLong(f"{path}: has more than {most:,} bytes, the most that is read")
    return content


def read_text(path: str | Path, most: int) -> str:
    """Return the text of an input file, without a byte order mark.

    Args:
        most: limit in bytes.

    Raises:
        MemoError: the file cannot be read, is not UTF-8, or is longer.
    """
    try:
        return read_bounded(path, most).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # a UnicodeDecodeError, a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise MemoError(f"cannot read {quoted(str(path), 400)}: {why}") from None


# ---- ds_memo's own files


def cache_home() -> Path:
    """Return the folder for ds_memo's own files: ``$XDG_CACHE_HOME/ds_memo`` where that is absolute, else ``~/.cache/ds_memo``.

    A relative XDG_CACHE_HOME is ignored, as its specification says: it would depend on the working directory.

    Raises:
        NotPrivate: this user has no home directory.
    """
    return _xdg() / "ds_memo"


def _xdg() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home) if os.path.isabs(home) else expanded("~/.cache")


def expanded(path: str | os.PathLike) -> Path:
    """Return the path with its ``~`` or ``~user`` replaced.

    Raises:
        NotPrivate: there is no such user or home, or the path holds a NUL.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError as error:
        raise NotPrivate(f"{os.fspath(path)}: {error}") from None
    if "\0" in str(found):
        raise NotPrivate(f"{os.fspath(path)!r}: a path cannot hold a NUL")
    return found


def private_folder(folder: Path) -> Path:
    """Make a folder and those above it that are missing (mode 0700), or check the one that is there.

    Returns:
        The folder, links resolved. It may be on a read-only file system: its content can still be trusted.

    Raises:
        NotPrivate: another user owns it or may write to it, or could move it away, or it cannot be made.
    """
    try:
        folder = Path(os.path.realpath(folder))
        for above in reversed(folder.parents):
            _refuse_movers(above)
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            with suppress(FileExistsError):
                missing.mkdir(mode=0o700)
        status = os.lstat(folder)
    except (OSError, ValueError) as error:
        raise NotPrivate(f"{folder}: cannot be made ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivate(f"{folder}: is no folder")
    _refuse_others(folder, status)
    return folder


def open_private(path: Path) -> int:
    """Open a file of this user for reading, never through a link, without waiting at a pipe.

    Returns:
        A file descriptor of the checked file, even if the name changes meanwhile: load a library from ``/proc/PID/fd/N``,
        not by its name.

    Raises:
        FileNotFoundError: there is no file.
        NotPrivate: the file is a link, a pipe or a device, or another user owns it or may write to it.
        OSError: the file cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(f"{path}: is a link") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivate(f"{path}: is no regular file")
        _refuse_others(path, status)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_private(path: Path, most: int) -> bytes:
    """Return all bytes of a file, opened by :func:`open_private`.

    Raises:
        FileNotFoundError, NotPrivate, OSError: as open_private.
        TooLong: the file has more than `most` bytes.
    """
    with os.fdopen(open_private(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLong(f"{path}: has more than {most:,} bytes, the most that is read")
    return content


def write_private(path: Path, data: str | bytes) -> None:
    """Replace a file in a folder of :func:`private_folder` by a rename; a link is replaced, not followed.

    Raises:
        OSError: the file cannot be written.
    """
    _replace(path, data.encode() if isinstance(data, str) else data, None, 0o600)


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder with an unpredictable name that only this user can enter, and remove it afterwards.

    Raises:
        NotPrivate: its parent folder cannot be written to, or others could move it away.
    """
    try:
        for above in (place := Path(os.path.realpath(parent or tempfile.gettempdir())), *place.parents):
            _refuse_movers(above)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:  # above all: no folder for temporary files
        raise NotPrivate(f"{parent or 'TMPDIR'}: cannot be written to ({error.strerror})") from None
    with folder as name:
        yield Path(name)


def _refuse_movers(folder: Path) -> None:
    """Refuse a folder in which others than root may rename what this user owns."""
    try:
        status = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):  # this user is to make it
        return
    if status.st_uid not in (0, os.geteuid()):
        raise NotPrivate(
            f"{folder}: belongs to user {status.st_uid}, who can replace what is in it; expected {os.geteuid()} or 0"
        )
    if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise NotPrivate(
            f"{folder}: others may write to it (mode {stat.S_IMODE(status.st_mode):04o}) and replace what is in it; chmod go-w "
            "or chmod +t prevents that"
        )


def _refuse_others(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivate(f"{path}: belongs to user {status.st_uid}, expected {os.geteuid()}")
    if status.st_mode & OTHERS_WRITE:
        raise NotPrivate(f"{path}: others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w makes it private")
