"""Starting the ranks of a test, each in its own process."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

from tests.processes import finished

REPO = Path(__file__).parents[2]


PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: other ranks' would take one between its choice and its use."""


def free_port() -> int:
    """Return a port that nothing listens at."""
    while True:
        port = random.SystemRandom().choice(PORTS)  # tests seed the other generators, alike in all processes
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port


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
    return finished(command, cpu_environment(2), timeout=300)
