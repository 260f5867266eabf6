"""The Hugging Face Trainer with `torch_compile=True`, without DeepSpeed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import ds_memo
from tests.compiled_layers.rig import recompilations
from tests.inside import kinds_of_recipes
from tests.models import VOCAB, build


@pytest.mark.slow
def test_torch_compile(tmp_path: Path) -> None:
    ids = torch.randint(1, VOCAB, (8, 32), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row[:length], "labels": row[:length]} for row, length in zip(ids, 4 * (32, 24), strict=True)]
    base = build("llama")
    losses, counts = [], []
    for memo in (False, True):
        model = copy.deepcopy(base)
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}) if memo else None
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, torch_compile=True, torch_compile_backend="aot_eager", max_steps=8, logging_steps=1,
            per_device_train_batch_size=1, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data)
        counts.append(recompilations(trainer.train))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert 0 < counts[1].total() <= counts[0].total()
    assert set(kinds_of_recipes(handle)) == {"CompiledRecipe"}
    report = handle.report()
    assert report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0 and not report["warnings"]
    handle.detach()
