"""The C++ compiler that tests of the op use directly."""

from __future__ import annotations

import os
import shlex
import shutil


def compiler() -> str:
    return (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]


def lacks() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    return None if shutil.which(compiler()) else f"no C++ compiler: {compiler()} is not on the PATH"
