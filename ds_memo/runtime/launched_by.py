"""How this process came under memo without a change to its script: `ds-memo run` or install().

State that the launcher gives to all processes of a command travels in environment variables; DeepSpeed's launcher takes to its
nodes those whose names start with PYTHON.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

GIVEN = "PYTHON_DS_MEMO"
"""The variable with the section of --memo, in hex: DeepSpeed's launcher quotes no quotes."""
LISTENER = "PYTHON_DS_MEMO_LISTENER"
"""The variable with the address where `ds-memo run` listens, on this machine. The kernel keeps it: nothing is left behind."""

VARIABLE = "DS_MEMO"
"""The variable with the section for those who give none by --memo or install(): JSON, or the path of a file with it."""

section: Mapping[str, Any] | None = None
"""The "memo" section of engines whose configuration has none, and of models that Accelerate prepares."""


def given_section() -> Mapping[str, Any] | None:
    """Return the section from the environment; None: there is none.

    Raises:
        MemoConfigError: DS_MEMO has another text than a section.
    """
    if told := os.environ.get(GIVEN):
        return json.loads(bytes.fromhex(told))
    return read_section(told, VARIABLE) if (told := os.environ.get(VARIABLE)) else None


def read_section(text: str, source: str) -> Mapping[str, Any]:
    """Return the section that a text is, or a file whose path it is.

    Args:
        source: what the text was given by, for errors.

    Raises:
        MemoConfigError: the text is neither, or a value is refused.
    """
    from ds_memo.config import memo_config  # not before: whole processes only ask whether there is a deepspeed
    from ds_memo.errors import MemoConfigError, brief

    try:
        memo = json.loads(Path(text).read_text() if os.path.isfile(text) else text)
        memo_config(memo)
    except RecursionError:
        raise MemoConfigError(f"{source} {brief(text)}: it is nested too deeply, expected a JSON object") from None
    except (OSError, ValueError) as error:  # MemoConfigError is a ValueError
        raise MemoConfigError(
            f"{source} {brief(text)}: {'; '.join(str(error).splitlines())}; expected JSON, quoted for the shell, or a file of it"
        ) from None
    return memo


def tell() -> None:
    """Have `ds-memo run`, if this process is under it, know that memo was asked for an engine or a model."""
    if LISTENER in os.environ:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:  # no process listens on another node
            to.setblocking(False)  # those before us have told enough
            to.sendto(b"prepared", "\0" + os.environ[LISTENER])
