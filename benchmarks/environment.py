"""Versions and hardware of a result."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from typing import Any

import torch

from ds_memo.memory.host import available_bytes, memlock_limit
from ds_memo.units import GIB


def environment(device: torch.device) -> dict[str, Any]:
    def version(name: str) -> str | None:
        if importlib.util.find_spec(name) is None:
            return None
        try:
            return getattr(importlib.import_module(name), "__version__", "present")
        except Exception as error:  # a package built for another torch fails in its own ways
            return f"{type(error).__name__}: {str(error)[:120]}"

    git = shutil.which("git")
    commit = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout if git else ""
    found = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.strip() or os.environ.get("COMMIT"),  # a copy without .git is told
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "deepspeed", "flash_attn", "numpy")},
        "memlock_limit": memlock_limit(),
        "host_memory_gib": round(available_bytes() / GIB, 1),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device_memory_gib": round(properties.total_memory / GIB, 1)}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    else:
        found |= {"device": platform.processor() or platform.machine()}
    return found
