"""Compiled libraries: built from C++ at first use, kept in a cache that only this user can write, checked before loading.

    found = load(Library("dsa_search", source, flags=("-O2", "-shared", "-fPIC")), ctypes.CDLL)

A library is kept as ``<cache>/<name>-<key>.so``; the key is a hash of its sources, compiler and flags, so any change builds anew.
The file ends in its own checksum, because loading a damaged library would crash the process. If the cache is not trusted, or
cannot be written, each process builds in a scratch folder and keeps nothing.
docs/trust.md states the rules.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from ds_memo.errors import MemoError, quoted, warn
from ds_memo.files import NotPrivate, cache_home, open_private, private_folder, scratch_folder, write_private

T = TypeVar("T")
COMPILERS = ("c++", "g++", "clang++")
LONGEST_S = 600.0
"""Longest compilation; a compiler that takes longer hangs."""
_CHECKSUM = 64  # bytes of hexadecimal digits
_SCRATCH = "build-"
_FAULT = re.compile(r"\b(error|cannot|undefined|No space)\b")


class Unavailable(MemoError):
    """A library that cannot be compiled or loaded here; the message says why."""


class Library(NamedTuple):
    name: str
    source: Path
    flags: tuple[str, ...]
    """Flags before the source."""
    links: tuple[str, ...] = ()
    """Flags after the source."""
    headers: tuple[Path, ...] = ()
    """Included files that may change."""
    made_for: str = ""
    """Version of another program that loads it, such as torch; part of the key."""


def compiler() -> list[str]:
    """Return the words of the compiler's command: ``$CXX``, or the first of COMPILERS on the PATH.

    Raises:
        Unavailable: there is no compiler, or CXX cannot be parsed.
    """
    cxx = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(cxx)] if cxx else [[name] for name in COMPILERS]
    except ValueError as error:
        raise Unavailable(f"CXX is {quoted(cxx)}: {str(error).lower()}; correct it or unset it") from None
    for words in commands:
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    if cxx:
        raise Unavailable(f"no C++ compiler (CXX is {quoted(cxx)}, which is not on the PATH; correct it or unset it)")
    raise Unavailable(f"no C++ compiler (looked for {', '.join(COMPILERS)} on the PATH; install g++ or set CXX)")


def load(library: Library, opened: Callable[[str], T], deadline: float = float("inf"), warn: Callable[[str], None] = warn) -> T:
    """Load a library from the cache; compile it first if it is missing, damaged, or not this user's.

    Args:
        opened: loads the library at a path; raises OSError or ImportError if it cannot.
        deadline: by time.monotonic(); LONGEST_S from now at the latest.
        warn: called with one line if the cache, or a file in it, is not used.

    Raises:
        Unavailable: the library cannot be compiled or loaded.
    """
    deadline = min(deadline, time.monotonic() + LONGEST_S)
    try:
        cxx = compiler()
        with ExitStack() as held:
            folder = path = None
            try:
                folder = private_folder(private_folder(cache_home()) / "compiled")
                path = folder / f"{library.name}-{_key(library, cxx)}.so"
                if (loaded := _kept(path, opened)) is not None:
                    return loaded
                held.enter_context(_alone_in(folder, deadline))
                if (loaded := _kept(path, opened, warn)) is not None:  # another process has compiled it meanwhile
                    return loaded
            except NotPrivate as error:
                warn(
                    f"{error}; {library.name} is compiled for this process alone, at every start. "
                    "Make the folder yours alone, or set XDG_CACHE_HOME to one that is"
                )
                folder = path = None
            scratch = held.enter_context(scratch_folder(_SCRATCH if folder else "ds_memo-build-", folder))
            made = _compiled(library, cxx, scratch, deadline)
            loaded = _opened(made, opened)
            if path is not None:
                os.replace(made, path)  # complete and loadable
            return loaded
    except (Unavailable, NotPrivate, OSError, ImportError) as error:
        raise Unavailable(f"{library.name} is not available: {error}") from None


def _key(library: Library, cxx: list[str]) -> str:
    key = hashlib.sha256()
    python = str(sysconfig.get_config_var("EXT_SUFFIX"))  # version, system and processor
    for word in (python, library.made_for, *cxx, *library.flags, *library.links):
        key.update(word.encode() + b"\0")
    for file in (library.source, *library.headers):
        key.update(hashlib.sha256(file.read_bytes()).digest())
    return key.hexdigest()[:16]


def _kept(path: Path, opened: Callable[[str], T], warn: Callable[[str], None] = lambda _: None) -> T | None:
    """Load a library from the cache; None: there is none, or it must be compiled anew."""
    try:
        return _opened(path, opened)
    except FileNotFoundError:
        return None
    except NotPrivate as error:
        warn(f"{error}; it is compiled anew")
    except (OSError, ImportError):  # a full disk, a crash, an older system that shares the folder
        pass
    return None


def _opened(path: Path, opened: Callable[[str], T]) -> T:
    """Check a file and load it by the descriptor that was checked."""
    handle = open_private(path)
    try:
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
        if content[-_CHECKSUM:] != _checksum(content[:-_CHECKSUM]):
            raise OSError(f"{path}: is damaged")
        # The descriptor stays open: the loader knows libraries by name, and would take a later file of this number for this one.
        # The name holds the process's number, as others open it: for its stacks, torch gives it to addr2line, and throws if that
        # finds no file.
        return opened(f"/proc/{os.readlink('/proc/self')}/fd/{handle}")
    except BaseException:
        os.close(handle)
        raise


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@contextmanager
def _alone_in(folder: Path, deadline: float) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process: one process of a node compiles and the others wait for it."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotPrivate(f"{folder}: cannot be written to ({error.strerror})") from None
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable("another process was still compiling when the time limit ended") from None
                time.sleep(0.05)
            except OSError as error:
                raise NotPrivate(f"{folder}: cannot be locked ({error.strerror})") from None
        for left in folder.glob(f"{_SCRATCH}*"):  # left by a crash: under the lock nothing else builds
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def _compiled(library: Library, cxx: list[str], scratch: Path, deadline: float) -> Path:
    """Compile a library in a scratch folder; return the file, with its checksum appended."""
    out = scratch / "out.so"
    command = [*cxx, *library.flags, str(library.source), "-o", str(out), *library.links]
    with open(os.memfd_create("log"), "w+b") as log:  # the disk may be full; a compiler's leftovers hold a pipe open
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{cxx[0]} was not done when the time limit ended") from None
        finally:
            if process.returncode is None:  # a compiler is several processes
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    if status or not out.is_file():
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        why = next((line for line in lines if _FAULT.search(line)), lines[-1] if lines else f"exit status {status}")
        raise Unavailable(f"{' '.join(cxx)} failed: {quoted(why, 400)}")
    content = out.read_bytes()
    made = scratch / "checked.so"
    write_private(made, content + _checksum(content))
    return made
