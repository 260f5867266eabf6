"""Files: written whole or not at all, and trusted only where this user alone can write. docs/trust.md states the rules."""

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
"""Of the JSON of a model or of a machine."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(MemoError):
    """A folder or file that others may have written, or that cannot be made; says which and why."""


class TooLong(MemoError):
    """A file that holds more than its reader takes; says how much that is."""


# ---- what the user asks to have written


def write_atomic(place: Path, data: str | bytes) -> None:
    """Replace a file, or leave it as it is: readers never see a half, and a full disk truncates nothing.

    A new file has the modes that the umask leaves. An existing one keeps its modes, and its owner and group where the system
    lets this user set them. Links are followed; a pipe or a device (``/dev/stdout``) is written to as it is.

    Args:
        place: the file.
        data: all of it; text is written as UTF-8.

    Raises:
        OSError: it cannot be written. An existing file without write permission is not replaced either.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        there = os.stat(place)
    except FileNotFoundError:
        there = None
    if str(place).startswith(("/dev/", "/proc/")) or (there is not None and not stat.S_ISREG(there.st_mode)):
        Path(place).write_bytes(content)  # a folder is an error here
        return
    place = Path(os.path.realpath(place))
    if there is not None and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    _replace(place, content, there)


def _replace(place: Path, content: bytes, there: os.stat_result | None, mode: int = 0o666) -> None:
    scratch = place.with_name(f".ds_memo-{secrets.token_hex(8)}.part")  # the name itself may be 255 bytes
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if there is not None:
                with suppress(PermissionError):  # another user's file, in a folder that this one may write
                    os.fchown(handle, there.st_uid, there.st_gid)
                os.fchmod(handle, stat.S_IMODE(there.st_mode))  # after the owner, whose change clears set-id bits
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(scratch, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
    _sync_folder(place.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a crash, on file systems that need it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_output(place: str | Path, data: str | bytes) -> None:
    """Write what an option like -o names: whole, or not at all.

    Raises:
        MemoError: it cannot be written.
    """
    try:
        write_atomic(Path(place), data)
    except (OSError, ValueError) as error:  # a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise MemoError(f"cannot write {quoted(str(place), 400)}: {why}") from None


# ---- what the user asks to have read


def read_bounded(place: str | Path, most: int) -> bytes:
    """Return all bytes of a file, pipe or device.

    Args:
        most: bytes; ``/dev/zero`` has no end, and a file may be larger than memory.

    Raises:
        TooLong: there is more.
        OSError: it cannot be read.
    """
    with open(place, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLong(f"{place}: has more than {most:,} bytes, the most that is read")
    return content


def read_text(place: str | Path, most: int) -> str:
    """Return the text of an input file, without the mark that some editors begin it with.

    Args:
        most: bytes.

    Raises:
        MemoError: it cannot be read, is not UTF-8, or is longer.
    """
    try:
        return read_bounded(place, most).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # a UnicodeDecodeError, a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise MemoError(f"cannot read {quoted(str(place), 400)}: {why}") from None


# ---- what ds_memo keeps for itself


def cache_home() -> Path:
    """Return the folder for ds_memo's own files: ``$XDG_CACHE_HOME/ds_memo`` where that is absolute, else ``~/.cache/ds_memo``.

    A relative XDG_CACHE_HOME is ignored, as its specification says: it would name a folder of whatever directory this is.

    Raises:
        NotPrivate: this user has no home.
    """
    return _xdg() / "ds_memo"


def _xdg() -> Path:
    told = os.environ.get("XDG_CACHE_HOME", "")
    return Path(told) if os.path.isabs(told) else expanded("~/.cache")


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
        The folder, links resolved. It may be on a read-only file system: what is in it can be trusted all the same.

    Raises:
        NotPrivate: another user owns it or may write to it, or it cannot be made.
    """
    try:
        folder = Path(os.path.realpath(folder))
        for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
            with suppress(FileExistsError):
                missing.mkdir(mode=0o700)
        seen = os.lstat(folder)
    except (OSError, ValueError) as error:
        raise NotPrivate(f"{folder}: cannot be made ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISDIR(seen.st_mode):
        raise NotPrivate(f"{folder}: is no folder")
    _refuse_others(folder, seen)
    return folder


def open_private(place: Path) -> int:
    """Open a file of this user for reading, never through a link, without waiting at a pipe.

    Returns:
        A file descriptor. What was checked is what it reads, whatever is renamed meanwhile: load a library from
        ``/proc/self/fd/N``, not by its name.

    Raises:
        FileNotFoundError: there is none.
        NotPrivate: it is a link, a pipe or a device, or others own it or may write to it.
        OSError: it cannot be opened.
    """
    try:
        handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(f"{place}: is a link") from None
        raise
    try:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            raise NotPrivate(f"{place}: is no regular file")
        _refuse_others(place, seen)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_private(place: Path, most: int) -> bytes:
    """Return all bytes of a file that :func:`open_private` opens.

    Raises:
        FileNotFoundError, NotPrivate, OSError: as open_private.
        TooLong: it has more than `most` bytes.
    """
    with os.fdopen(open_private(place), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLong(f"{place}: has more than {most:,} bytes, the most that is read")
    return content


def write_private(place: Path, data: str | bytes) -> None:
    """Replace a file of :func:`private_folder` by a rename: what stood there, a link too, is replaced and not written through.

    Raises:
        OSError: it cannot be written.
    """
    _replace(place, data.encode() if isinstance(data, str) else data, None, 0o600)


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder with an unpredictable name that only this user can enter, and remove it afterwards.

    Raises:
        NotPrivate: there is no folder to make it in.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:  # no folder for temporary files, above all
        raise NotPrivate(f"{parent or 'TMPDIR'}: cannot be written to ({error.strerror})") from None
    with folder as name:
        yield Path(name)


def _refuse_others(place: Path, seen: os.stat_result) -> None:
    if seen.st_uid != os.geteuid():
        raise NotPrivate(f"{place}: belongs to user {seen.st_uid}, expected {os.geteuid()}")
    if seen.st_mode & OTHERS_WRITE:
        raise NotPrivate(f"{place}: others may write to it (mode {stat.S_IMODE(seen.st_mode):04o}); chmod go-w makes it private")
