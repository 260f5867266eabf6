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


def run_ranks(script: Path, ranks: int, timeout_s: float) -> str:
    """Run `script` as that many ranks on the CPU; returns what all of them printed, fails where one failed."""
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=cpu_environment(ranks) | where,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(outputs)
    return "\n".join(outputs)


def train(*arguments: object, ranks: int = 2, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """`deepspeed launch/train.py` on the CPU."""
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [launcher, "--num_gpus", ranks, "--master_port", free_port(), REPO / "launch" / "train.py", *arguments]
    return subprocess.run(
        [str(word) for word in command], env=cpu_environment(ranks), capture_output=True, text=True, timeout=timeout_s
    )
