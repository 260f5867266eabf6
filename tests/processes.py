"""Looking for processes that should be gone."""

import time
from pathlib import Path


def processes_with(marker: str) -> list[int]:
    """Ids of the processes that have this word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def assert_gone(marker: str, within_s: float = 10) -> None:
    """None with this word is left, as soon as the kernel has taken its time."""
    deadline = time.monotonic() + within_s
    while left := processes_with(marker):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.05)
