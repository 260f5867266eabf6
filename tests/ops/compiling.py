"""The C++ compiler that tests of the op use directly."""

from __future__ import annotations

import os
import shlex
import shutil


def compiler() -> list[str]:
    """The command, as $CXX has it."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def lacks() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    command = compiler()[0]
    return None if shutil.which(command) else f"no C++ compiler: {command} is not on the PATH"
