"""A Hugging Face Trainer of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models import VOCAB, build


def trainer(folder: Path, callbacks: list[Any] | None = None, model: nn.Module | None = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    ids = [(start + torch.arange(33)) % VOCAB for start in range(16)]
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=3, logging_steps=1, per_device_train_batch_size=2, report_to="none",
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2, **options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(model=model or build("llama"), args=args, train_dataset=data, eval_dataset=data[:2], callbacks=callbacks)


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]
