"""The multi-node launchers with two "nodes" on loopback: two launchers, separate rank ranges, a sequence shared across them."""

import json
import os
import stat
import subprocess

import pytest

from tests.launch.launcher import REPO, cpu_environment, free_port
from tests.processes import assert_gone

pytestmark = pytest.mark.processes

MULTINODE = REPO / "launch" / "multinode"
LOSS = 5.8  # of a model that knows nothing yet: ln 320


def arguments(tmp_path):
    return [
        "--deepspeed_config", "ds_configs/quickstart.json", "--model", "ds_configs/models/tiny.json", "--data", "ds_memo",
        "--seq-length", "64", "--steps", "2", "--eval-batches", "1", "--metrics-json", str(tmp_path / "metrics.json"),
    ]  # fmt: skip


def node(marker, **settings):
    """Environment of one node of one process."""
    return cpu_environment(1) | {"GPUS": "1", "MASTER_ADDR": "127.0.0.1", marker: "1"} | settings


def check(tmp_path, marker, runs):
    outputs = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(outputs)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 2 and metrics["sequence_parallel_size"] == 2
    assert metrics["steps"][0]["loss"] == pytest.approx(LOSS, abs=0.2) and len(metrics["steps"]) == 2
    assert metrics["report"]["bytes_to_host"] > 0
    assert_gone(marker)


def start(command, environment):
    return subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_deepspeeds_launcher(tmp_path, marker):
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    common = {"HOSTFILE": str(tmp_path / "hostfile"), "MASTER_PORT": str(free_port())}
    command = ["bash", MULTINODE / "deepspeed.sh", *arguments(tmp_path)]
    check(tmp_path, marker, [start(command, node(marker, NODE_RANK=str(rank), **common)) for rank in (0, 1)])


@pytest.mark.slow
def test_slurm(tmp_path, marker):
    """A srun that starts its command once per node, and a scontrol that names the nodes; torchrun.sh runs under it."""
    tools = {
        "scontrol": '#!/bin/sh\n[ "$*" = "show hostnames nodes[0-1]" ] && printf "127.0.0.1\\nlocalhost\\n"\n',
        "srun": '#!/bin/bash\nshift\nfor node in 0 1; do SLURM_NODEID=$node "$@" & done\nwait -n && wait -n\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = node(marker, SLURM_NNODES="2", SLURM_JOB_NODELIST="nodes[0-1]", SLURM_JOB_ID=str(free_port()))
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    check(tmp_path, marker, [start(["bash", MULTINODE / "slurm.sbatch", *arguments(tmp_path)], environment)])


@pytest.mark.parametrize(
    "script, missing", [("torchrun.sh", "NNODES"), ("torchrun.sh", "MASTER_ADDR"), ("deepspeed.sh", "MASTER_ADDR")]
)
def test_what_is_missing_is_named(script, missing):
    settings = {"PATH": os.environ["PATH"], "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node-a"}
    del settings[missing]
    done = subprocess.run(["bash", MULTINODE / script], env=settings, capture_output=True, text=True)
    assert done.returncode != 0
    assert ("number of nodes" if missing == "NNODES" else "MASTER_ADDR: the first node") in done.stderr


def test_the_hostfile_is_one():
    from deepspeed.launcher.runner import fetch_hostfile

    assert fetch_hostfile(str(MULTINODE / "hostfile")) == {"node-a": 8, "node-b": 8}
