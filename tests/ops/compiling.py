"""The C++ compiler that tests use directly, those that they put in its place, and libraries that should never be loaded."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from ds_memo.compiled import Unavailable, compiler

__all__ = ["NOT_TRUSTED", "compiler", "lacks", "plant", "stand_in"]


def lacks() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        compiler()
    except Unavailable as error:
        return str(error)
    return None


def stand_in(folder: Path, script: str) -> tuple[str, Path]:
    """Write a compiler that is a shell script.

    Args:
        script: its commands for compiling and linking; ``$out`` is the file, ``$@`` are its arguments.

    Returns:
        The value for CXX, and a file that gets a line at each call.
    """
    place, log = folder / "stand-in", folder / "asked"
    find_out = 'out=; last=; for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done'
    place.write_text(f'#!/bin/sh\n{find_out}\n[ -n "$out" ] || exec c++ "$@"\necho "$$" >> {log}\n{script}\n')
    place.chmod(0o755)
    log.touch()
    return str(place), log


def plant(place: Path, proof: Path) -> None:
    """Replace a library by another with a right checksum; loading it creates the file `proof`."""
    source = place.with_name("planted.cpp")
    source.write_text(
        "#include <fcntl.h>\n"
        f'__attribute__((constructor)) static void loaded() {{ open("{proof}", O_CREAT | O_WRONLY, 0600); }}\n'
        'extern "C" int answer() { return -1; }\n'
    )
    place.unlink()
    subprocess.run([*compiler(), "-shared", "-fPIC", source, "-o", place], check=True)
    source.unlink()
    content = place.read_bytes()
    place.write_bytes(content + hashlib.sha256(content).hexdigest().encode())
    place.chmod(0o700)


def _give(place: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to make files of another user")
    os.chown(place, 1234, 1234)


def _link(library: Path) -> None:
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


NOT_TRUSTED = {
    "a file of another user": (_give, "belongs to user 1234"),
    "a file that all may write": (lambda library: library.chmod(0o602), "others may write to it (mode 0602)"),
    "a link": (_link, "is a link"),
}
"""Changes that make a library untrusted, each with its warning."""
