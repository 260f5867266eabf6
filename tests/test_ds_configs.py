"""Every DeepSpeed JSON of the project starts a real run, and DeepSpeed, Accelerate and Hugging Face accept it unchanged."""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
from deepspeed.accelerator import get_accelerator

from tests.distributed_harness.common import DistributedTest

REPO = Path(__file__).parents[1]
CONFIGS = sorted((REPO / "ds_configs").glob("*.json"))
RARER = (
    *("zero2_bf16_offload_optimizer_memo", "zero3_bf16_offload_optimizer_memo"),
    *("quickstart_bf16", "quickstart_bf16_ulysses2"),
)
"""Files whose parts are in zero2_bf16_memo, zero3_bf16_offload_all_memo, zero3_bf16_memo and zero3_bf16_ulysses2_memo."""
SHOWN = {"enabled": True, "alpha": 0.5, "resident_layers": 2}
"""The quickstart's section, with which a small model swaps. All other files are solved automatically."""


def test_there_is_one_for_each_use():
    read = [json.loads(path.read_text()) for path in CONFIGS]
    assert {config["zero_optimization"]["stage"] for config in read} == {0, 1, 2, 3}
    assert any("offload_optimizer" in config["zero_optimization"] for config in read)
    assert any("offload_param" in config["zero_optimization"] for config in read)
    assert any("fp16" in config for config in read)
    assert any("sequence_parallel_size" in config for config in read)


def test_the_table_names_each():
    table = (REPO / "ds_configs" / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.json)`", table, re.MULTILINE)) == {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_deepspeed_takes_it(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    text = path.read_text()
    assert '"auto"' not in text  # Accelerate refuses the word anywhere
    config = DeepSpeedConfig(json.loads(text))
    assert config.optimizer_params["torch_adam"] is True  # DeepSpeed's own Adam would have to be compiled
    assert json.loads(text)["memo"] == (SHOWN if path.stem.startswith("quickstart") else {"enabled": True})


class TestEach(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        "path",
        [pytest.param(path, marks=[pytest.mark.slow, pytest.mark.sweep] if path.stem in RARER else ()) for path in CONFIGS],
        ids=lambda p: p.stem,
    )
    def test_trains(self, path, tmp_path):
        """Run two steps of launch/train.py."""
        if "fp16" in path.stem and not get_accelerator().is_fp16_supported():
            pytest.skip(f"{get_accelerator().device_name()} has no fp16 here")
        sys.path.insert(0, str(REPO / "launch"))
        import train as script

        options = {"deepspeed_config": path, "model": REPO / "ds_configs/models/tiny.json", "data": REPO / "ds_memo"}
        options |= {"seq-length": 64, "steps": 2, "eval-batches": 1, "metrics-json": tmp_path / "metrics.json"}
        sys.argv = ["train.py", *(f"--{name}={value}" for name, value in options.items())]
        script.train(script.start(script.parse_args()))
        if int(os.environ["RANK"]) == 0:
            done = json.loads((tmp_path / "metrics.json").read_text())
            assert all(math.isfinite(step["loss"]) for step in done["steps"]) and len(done["steps"]) == 2
            report = done["report"]
            assert report["bytes_to_host"] if path.stem.startswith("quickstart") else report["profile"], report
            assert not report["warnings"], report
