"""verl's FSDP engine with the module of external_lib: verl's own class, on two CPU ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import cpu_environment, free_port
from tests.processes import finished

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="verl 0.9.1 needs Transformers before 5.11"),
]
TIMEOUT_S = 400


def test_verls_engine_trains_as_without_memo(tmp_path: Path) -> None:
    """To the bit: losses, norms of gradients, log probabilities, weights for the rollout. References have no memo."""
    platform = {"VERL_USE_EXTERNAL_MODULES": "tests.scripts.verl_cpu_platform", "VERL_PLATFORM": "cpu"}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port())
    done = finished((*launcher, "tests/scripts/verl_on_cpu.py", tmp_path), cpu_environment(2) | platform, TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert result.pop("reference") == {"has memo": False}
        assert len(result) == 6
        for name, case in result.items():
            assert case["got"] == case["want"] and case["bytes_to_host"] > 0, name
        assert result["packed"]["want"] != result["entropy"]["want"]  # equality says something
