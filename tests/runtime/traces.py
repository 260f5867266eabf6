"""What attaching leaves on a model and in the process."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that attach might touch, of every module."""
    seen = {}
    for name, module in model.named_modules():
        state = {key: value for key, value in vars(module).items() if not key.startswith(("_parameters", "_buffers", "_modules"))}
        for key, value in state.items():
            seen[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    return seen


def memo_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ds_memo")]
