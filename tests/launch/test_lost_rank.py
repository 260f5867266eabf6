"""A rank is lost in the middle of a step: the other ends with an error in time, and nothing is left behind.

Real processes train with ZeRO-3, two ranks to a sequence, and memo. "Frozen" takes the process group's timeout, a minute.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launcher import REPO, cpu_environment, free_port
from tests.leaks import assert_shared_memory_is_as, shared_memory
from tests.processes import assert_gone, processes_with

pytestmark = pytest.mark.processes

ARGUMENTS = [
    "launch/train.py", "--deepspeed_config", "ds_configs/quickstart.json", "--model", "ds_configs/models/tiny.json",
    "--data", "ds_memo", "--seq-length", "256", "--steps", "100000",
]  # fmt: skip
GONE = r"rank 0 lost the other ranks in .*\(.*Connection (closed|reset) by peer.*\): rank 1 said nothing"
LATE = r"rank 0 lost the other ranks in .*\(Timed out.*\): rank 1 said nothing"


def wait_for_steps(log):
    """Until the progress bar has passed two of them."""
    deadline = time.monotonic() + 120
    while max([0, *map(int, re.findall(r"(\d+)/100000", log.read_text()))]) < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "how, told, within_s",
    [
        pytest.param(signal.SIGKILL, GONE, 60, id="killed"),
        pytest.param(signal.SIGSTOP, LATE, 120, id="frozen", marks=[pytest.mark.slow, pytest.mark.sweep]),
    ],
)
def test_the_other_rank_ends(how, told, within_s, marker, tmp_path):
    before = shared_memory()
    where = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DEEPSPEED_TIMEOUT": "1",
        marker: "1",
    }
    logs = [tmp_path / f"rank{rank}.txt" for rank in (0, 1)]
    ranks = [
        subprocess.Popen(
            [sys.executable, *ARGUMENTS],
            cwd=REPO,
            env=cpu_environment(2) | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=logs[rank].open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    wait_for_steps(logs[0])
    ranks[1].send_signal(how)
    assert ranks[0].wait(within_s) != 0
    assert re.search(told, logs[0].read_text()), logs[0].read_text()
    ranks[1].kill()
    ranks[1].wait()
    assert_gone(marker)
    assert_shared_memory_is_as(before)


@pytest.mark.slow
def test_the_launcher_ends_all(marker, tmp_path):
    before = shared_memory()
    log = tmp_path / "log.txt"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    run = subprocess.Popen(
        [*launcher, *ARGUMENTS], cwd=REPO, env=cpu_environment(2) | {marker: "1"}, stdout=log.open("w"), stderr=subprocess.STDOUT
    )
    wait_for_steps(log)
    command = {process: Path(f"/proc/{process}/cmdline").read_text() for process in processes_with(marker)}
    second = [process for process, words in command.items() if "--local_rank=1" in words and "launch.py" not in words]
    os.kill(second[0], signal.SIGKILL)
    assert run.wait(60) != 0
    assert_gone(marker)
    assert_shared_memory_is_as(before)
