"""A rank is lost in the middle of a step: the other ends with an error in time, and nothing is left behind.

Real processes train with ZeRO-3, two ranks to a sequence, and memo.
"""

import re
import subprocess
import sys
import time

import pytest

from tests.launch.launcher import REPO, cpu_environment, free_port
from tests.leaks import assert_shared_memory_is_as, shared_memory
from tests.processes import assert_gone

pytestmark = pytest.mark.processes

ARGUMENTS = [
    "launch/train.py", "--deepspeed_config", "ds_configs/quickstart.json", "--model", "ds_configs/models/tiny.json",
    "--data", "ds_memo", "--seq-length", "256", "--steps", "100000",
]  # fmt: skip
GONE = r"rank 0 lost the other ranks in .*\(.*Connection (closed|reset) by peer.*\): rank 1 said nothing"


def wait_for_steps(log):
    """Until the progress bar has passed two of them."""
    deadline = time.monotonic() + 120
    while max([0, *map(int, re.findall(r"(\d+)/100000", log.read_text()))]) < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_the_other_rank_ends(marker, tmp_path):
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
    ranks[1].kill()
    assert ranks[0].wait(60) != 0
    assert re.search(GONE, logs[0].read_text()), logs[0].read_text()
    ranks[1].wait()
    assert_gone(marker)
    assert_shared_memory_is_as(before)
