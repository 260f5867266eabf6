"""Starting the ranks of a test, each in its own process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cpu_environment(ranks: int) -> dict[str, str]:
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": str(ranks),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPO)])),
    }


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`deepspeed launch/train.py` with two ranks on the CPU."""
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [launcher, "--num_gpus", 2, "--master_port", free_port(), REPO / "launch" / "train.py", *arguments]
    return subprocess.run(list(map(str, command)), env=cpu_environment(2), capture_output=True, text=True, timeout=300)
