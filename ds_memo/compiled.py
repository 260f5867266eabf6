"""Compiled libraries: built from C++ at first use, kept in a cache that this user alone can write, loaded as they were checked.

    found = load(Library("dsa_search", source, flags=("-O2", "-shared", "-fPIC")), ctypes.CDLL)

A library is kept as ``<cache>/<name>-<key>.so``; the key is a hash of its sources, compiler and flags, so whatever changes builds
anew. It ends in its own checksum: a file that was cut or altered would take the process with it, not raise. Where the cache is
not to be trusted, or cannot be written, the build happens in a scratch folder of this process and nothing is kept.
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
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from ds_memo.errors import MemoError, MemoWarning, quoted
from ds_memo.files import NotPrivate, cache_home, open_private, private_folder, scratch_folder, write_private

T = TypeVar("T")
COMPILERS = ("c++", "g++", "clang++")
LONGEST_S = 600.0
"""A compiler that is not done by then hangs."""
_CHECKSUM = 64  # bytes of hexadecimal digits
_SCRATCH = "build-"
_FAULT = re.compile(r"\b(error|cannot|undefined|No space)\b")

_SUPERVISOR = """
import ctypes, os, shutil, signal, subprocess, sys

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)

parent, scratch, *command = sys.argv[1:]
signal.signal(signal.SIGTERM, end)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    end()
sys.exit(subprocess.call(command))
"""
"""Leads the process group of a compiler. When this process dies, however that happens, it ends the group and removes the folder:
the signal that the kernel sends then reaches one process only, and a compiler is several."""


class Unavailable(MemoError):
    """A library that cannot be compiled or loaded here; the message says why."""


class Library(NamedTuple):
    """A shared library and how it is made of one C++ file."""

    name: str
    source: Path
    flags: tuple[str, ...]
    """In front of the source."""
    links: tuple[str, ...] = ()
    """Behind it."""
    headers: tuple[Path, ...] = ()
    """Files that it includes and that may change."""
    made_for: str = ""
    """A version of something that it can be loaded into, beside this Python."""


def compiler() -> list[str]:
    """Return the words of the compiler's command: those of ``$CXX``, or the first of COMPILERS that is there.

    Raises:
        Unavailable: there is none, or CXX cannot be read.
    """
    told = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(told)] if told else [[name] for name in COMPILERS]
    except ValueError as error:
        raise Unavailable(f"CXX is {quoted(told)}: {str(error).lower()}; correct it or unset it") from None
    for words in commands:
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    if told:
        raise Unavailable(f"no C++ compiler (CXX is {quoted(told)}, which is not on the PATH; correct it or unset it)")
    raise Unavailable(f"no C++ compiler (looked for {', '.join(COMPILERS)} on the PATH; install g++ or set CXX)")


def warn(message: str) -> None:
    """Give a MemoWarning."""
    warnings.warn(f"ds_memo: {message}", MemoWarning, stacklevel=3)


def load(library: Library, opened: Callable[[str], T], deadline: float = float("inf"), warn: Callable[[str], None] = warn) -> T:
    """Load a library from the cache; compile it first where it is missing, damaged, or not this user's.

    Args:
        opened: loads the library that a path names; raises OSError or ImportError where it cannot.
        deadline: of time.monotonic(); LONGEST_S from now at the latest.
        warn: is told in one line why the cache, or what stood in it, is not used.

    Raises:
        Unavailable: it cannot be compiled, or what was compiled cannot be loaded.
    """
    deadline = min(deadline, time.monotonic() + LONGEST_S)
    try:
        cxx = compiler()
        with ExitStack() as held:
            folder = place = None
            try:
                folder = private_folder(private_folder(cache_home()) / "compiled")
                place = folder / f"{library.name}-{_key(library, cxx)}.so"
                if (loaded := _kept(place, opened)) is not None:
                    return loaded
                held.enter_context(_alone_in(folder, deadline))
                if (loaded := _kept(place, opened, warn)) is not None:  # another process has compiled it meanwhile
                    return loaded
            except NotPrivate as error:
                warn(f"{error}; {library.name} is compiled for this process alone, at every start")
                folder = place = None
            scratch = held.enter_context(scratch_folder(_SCRATCH if folder else "ds_memo-build-", folder))
            made = _compiled(library, cxx, scratch, deadline)
            loaded = _opened(made, opened)
            if place is not None:
                os.replace(made, place)  # whole and loadable, or not at all
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


def _kept(place: Path, opened: Callable[[str], T], warn: Callable[[str], None] = lambda _: None) -> T | None:
    """Load what the cache has. None: there is nothing that can be used, and it is to be compiled anew."""
    try:
        return _opened(place, opened)
    except FileNotFoundError:
        return None
    except NotPrivate as error:
        warn(f"{error}; it is compiled anew")
    except (OSError, ImportError):  # a full disk, a machine that went down; an older system that shares the folder
        pass
    return None


def _opened(place: Path, opened: Callable[[str], T]) -> T:
    """Check a file and load the one that was checked."""
    handle = open_private(place)
    try:
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
        if content[-_CHECKSUM:] != _checksum(content[:-_CHECKSUM]):
            raise OSError(f"{place}: is damaged")
        # The descriptor stays open: the loader knows libraries by name, and would take a later file of this number for this one.
        return opened(f"/proc/self/fd/{handle}")
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
        for left in folder.glob(f"{_SCRATCH}*"):  # by a machine that went down: nothing else builds now
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def _compiled(library: Library, cxx: list[str], scratch: Path, deadline: float) -> Path:
    """Compile a library in a scratch folder and return the file, its checksum behind it."""
    out = scratch / "out.so"
    command = [*cxx, *library.flags, str(library.source), "-o", str(out), *library.links]
    with open(os.memfd_create("said"), "w+b") as log:  # the disk may be full, and a pipe is held open by what a compiler leaves
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SUPERVISOR, str(os.getpid()), str(scratch), *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )  # fmt: skip
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{cxx[0]} was not done when the time limit ended") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if status or not out.is_file():
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        why = next((line for line in lines if _FAULT.search(line)), lines[-1] if lines else f"exit status {status}")
        raise Unavailable(f"{' '.join(cxx)} failed: {quoted(why, 400)}")
    content = out.read_bytes()
    made = scratch / "checked.so"
    write_private(made, content + _checksum(content))
    return made
