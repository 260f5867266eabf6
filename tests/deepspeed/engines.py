"""DeepSpeed engines on one CPU rank, in the test's own process: a module that tests them takes ON_ONE_CPU_RANK as its marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_memo
from tests.models import Batch, build

deepspeed = pytest.importorskip("deepspeed")
ON_ONE_CPU_RANK = [
    pytest.mark.skipif(deepspeed.get_accelerator().device_name() != "cpu", reason="one CPU rank; the GPU check covers CUDA"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("one_rank"),
]
MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 1}


def ds_config(stage: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 10**9,
        **more,
    }


def start(config: Any, name: str = "llama", **kwargs: Any) -> Any:
    model = kwargs.pop("model", None) or build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ds_memo.initialize(model=model, optimizer=optimizer, config=config, **kwargs)[0]


def train(engine: Any, dtype: torch.dtype = torch.float32, steps: int = 3, length: int = 17) -> list[float]:
    losses = []
    for number in range(2 * steps):
        batch = Batch.random(2, length, dtype, seed=number)
        loss = engine(inputs_embeds=batch.embeds, labels=batch.labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
