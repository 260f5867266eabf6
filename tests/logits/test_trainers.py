"""Trainer and TRL with lazy logits: weights, losses and metrics as without memo, in unmodified scripts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.everyday import everyday
from tests.logits.rig import LENGTH, TILE, VOCAB, Witness, attached, causal, lazy_calls
from tests.models import assert_same_grads

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
TRAINED = 1e-7
"""Largest relative difference of weights after some steps in float64, with losses and metrics in float32."""
LOGGED = ("loss", "eval_loss", "grad_norm", "eval_right", "eval_sum", "entropy", "mean_token_accuracy")
EVALUATE = {"eval_strategy": "steps", "eval_steps": 2}


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        ignored = torch.rand(LENGTH, generator=generator) < 0.2 + 0.03 * number
        found.append({"input_ids": ids, "labels": torch.where(ignored, -100, ids), "attention_mask": torch.ones_like(ids)})
    return found


def metrics(p: Any) -> dict[str, float]:
    guesses = p.predictions if p.predictions.ndim == 2 else p.predictions.argmax(-1)
    return {"right": float((guesses[:, :-1] == p.label_ids[:, 1:]).mean()), "sum": float(guesses.sum())}


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].reshape(-1, VOCAB)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 2,
        "learning_rate": 0.1, "optim": "sgd", "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "seed": 0, **more,
    }  # fmt: skip


def plain(folder: Path, model: nn.Module, settings: dict[str, Any], **more: Any) -> Any:
    import transformers

    settings = transformers.TrainingArguments(**arguments(folder, **settings))
    return transformers.Trainer(model=model, args=settings, train_dataset=rows(), eval_dataset=rows(4), **more)


def sft(folder: Path, model: nn.Module, settings: dict[str, Any], **more: Any) -> Any:
    import trl

    datasets = pytest.importorskip("datasets")
    texts = [{"input_ids": row["input_ids"].tolist()} for row in rows()]
    data = datasets.Dataset.from_list(texts)
    config = trl.SFTConfig(**arguments(folder, bf16=False, gradient_checkpointing=False, **settings))
    return trl.SFTTrainer(model, config, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), **more)


def tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


Trainer = Callable[..., Any]
TRAINERS: dict[str, tuple[Trainer, dict[str, Any], dict[str, Any]]] = {
    "accumulation": (plain, {}, {}),
    "label smoothing": (plain, {"label_smoothing_factor": 0.1}, {}),
    "checkpointing": (plain, {"gradient_checkpointing": True}, {}),
    "own loss": (plain, {}, {"compute_loss_func": own_loss}),
    "metrics of the likeliest": (plain, EVALUATE, {"compute_metrics": metrics, "preprocess_logits_for_metrics": likeliest}),
    "SFT, label smoothing": (sft, {"label_smoothing_factor": 0.1}, {}),
    "SFT, metrics": (sft, EVALUATE, {"compute_metrics": metrics, "preprocess_logits_for_metrics": likeliest}),
}


def trained(folder: Path, model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    make, settings, more = TRAINERS[name]
    trainer = make(folder, model, settings, **more)
    trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return weights, [entry[key] for entry in trainer.state.log_history for key in LOGGED if key in entry]


@pytest.mark.parametrize("name", everyday(TRAINERS, ["metrics of the likeliest", "SFT, label smoothing"]))
def test_a_trainer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if TRAINERS[name][0] is sft:
        pytest.importorskip("trl")
        own = importlib.import_module("trl.kernels.chunked_logprob")  # some losses come from the head's weight, in TRL's tiles
        monkeypatch.setattr(own, "TOKEN_CHUNK_SIZE", TILE)
    want, logged = trained(tmp_path, causal(), name)
    model = causal()
    with attached(model) as handle, Witness() as witness:
        got, theirs = trained(tmp_path, model, name)
        assert lazy_calls(handle)
    assert_same_grads(got, want, TRAINED)
    assert len(logged) >= 4 and theirs == pytest.approx(logged, rel=1e-6)
    assert witness.rows <= TILE


@pytest.mark.slow
def test_metrics_of_all_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer gathers them as numpy arrays, which are whole."""
    monkeypatch.setitem(TRAINERS, "whole", (plain, EVALUATE, {"compute_metrics": metrics}))
    want, logged = trained(tmp_path, causal(), "whole")
    model = causal()
    with attached(model, warns=""):
        got, theirs = trained(tmp_path, model, "whole")
    assert_same_grads(got, want, TRAINED)
    assert theirs == pytest.approx(logged, rel=1e-6)
