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
from typing import Any

GIVEN = "PYTHON_DS_MEMO"
"""The variable with the section of --memo, in hex: DeepSpeed's launcher quotes no quotes."""
LISTENER = "PYTHON_DS_MEMO_LISTENER"
"""The variable with the address where `ds-memo run` listens, on this machine. The kernel keeps it: nothing is left behind."""

section: Mapping[str, Any] | None = None
"""The "memo" section of engines whose configuration has none."""


def given_section() -> Mapping[str, Any] | None:
    told = os.environ.get(GIVEN)
    return json.loads(bytes.fromhex(told)) if told else None


def tell() -> None:
    """Have `ds-memo run`, if this process is under it, know that deepspeed.initialize was called."""
    if LISTENER in os.environ:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:  # no process listens on another node
            to.setblocking(False)  # those before us have told enough
            to.sendto(b"initialize", "\0" + os.environ[LISTENER])
