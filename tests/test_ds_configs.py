"""Every DeepSpeed JSON of the project is one that DeepSpeed, Accelerate and Hugging Face take as it stands."""

import json
from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[1] / "ds_configs").glob("*.json"))


def test_there_is_one_per_stage():
    stages = {json.loads(p.read_text())["zero_optimization"]["stage"] for p in CONFIGS}
    assert stages >= {1, 2, 3}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_deepspeed_takes_it(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    text = path.read_text()
    assert '"auto"' not in text  # Accelerate refuses the word anywhere
    config = DeepSpeedConfig(json.loads(text))
    assert config.optimizer_params["torch_adam"] is True  # DeepSpeed's own Adam would have to be compiled
    assert json.loads(text)["memo"] == {"enabled": True, "alpha": 0.5, "resident_layers": 2}
