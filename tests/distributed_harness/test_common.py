"""DistributedTest's contract: tests run, failures are reported, and no process is left behind."""

import os
import subprocess
import time
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch

from tests.distributed_harness.common import DistributedTest, OwnDistributedTest
from tests.haste import forkserver
from tests.leaks import assert_shared_memory_is_as, shared_memory
from tests.processes import assert_gone

pytestmark = pytest.mark.processes


class TestContract(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("factor", [10])
    def test_ranks_talk(self, factor, class_tmpdir, default="kept"):
        total = torch.tensor(float(factor * (dist.get_rank() + 1)))
        dist.all_reduce(total)
        assert total == 3 * factor and default == "kept"
        assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size() == 2
        Path(class_tmpdir, str(dist.get_rank())).write_text("here")
        dist.barrier()
        assert {path.name for path in Path(class_tmpdir).iterdir()} == {"0", "1"}


# ---- what goes wrong


class Wrong(OwnDistributedTest):
    """Not collected: each of these is run by hand. All of them leave a child behind."""

    exec_timeout = 60

    def begin(self, marker: str) -> bool:
        """Start a child that outlives everything; whether this is the rank that goes wrong."""
        subprocess.Popen(["sleep", "600"], env={marker: "1"})
        return dist.get_rank() == 1

    def fails(self, marker):
        if self.begin(marker):
            raise ValueError("rank one is unwell")

    def hangs(self, marker):
        if self.begin(marker):
            time.sleep(60)
        dist.barrier()


TOLD = {
    "fails": ["rank 1 of 2: Traceback", "ValueError: rank one is unwell"],
    "hangs": ["hung: killed after 10 s", "rank 0 is at", "in barrier", "rank 1 is at", "in hangs"],
}


@pytest.fixture(scope="module")
def a_server_at_work():
    """The imports do not count as a rank's time."""
    process = forkserver().Process(target=int)
    process.start()
    process.join()


@pytest.mark.parametrize("how", TOLD)
def test_what_goes_wrong_is_told_and_leaves_nothing(how, tmp_path, a_server_at_work):
    marker = f"orphan_{os.getpid()}_{how}"
    before = shared_memory()
    wrong = Wrong()
    if how == "hangs":
        wrong.exec_timeout = 10  # until both ranks are where they hang, on a busy machine too
    with pytest.raises(pytest.fail.Exception) as failure:
        wrong._run(how, {"marker": marker}, 2, tmp_path)
    for words in TOLD[how]:
        assert words in str(failure.value)
    assert_gone(marker)
    assert_shared_memory_is_as(before)
