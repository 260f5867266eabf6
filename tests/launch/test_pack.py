"""train.py --pack: loss and gradients are those of the documents trained apart."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import ClassVar

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed_harness.common import DistributedTest
from tests.launch.launcher import REPO
from tests.models import Different, assert_same_grads
from tests.sequence.test_documents import use_flash

sys.path.insert(0, str(REPO / "launch"))  # the ranks import this file too, without conftest.py
import model as hf
import train as script
from data import ByteTokenizer

TINY = REPO / "ds_configs" / "models" / "tiny.json"
EXACT = 1e-6
LENGTH, ROWS = 64, 2


def start(tmp_path: Path, *more: str, model: Path = TINY) -> script.Run:
    """Start train.py on this rank; all ranks share each sequence."""
    config = {
        "sequence_parallel_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "memo": {"enabled": True, "alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}},
    }
    folder = tmp_path / str(dist.get_rank())
    (folder / "data").mkdir(parents=True)
    (folder / "ds.json").write_text(json.dumps(config))
    for number in range(200):
        (folder / "data" / f"{number:03}.txt").write_text(str(number**40)[: 1 + 7 * number % 45])
    words = ["--deepspeed_config", folder / "ds.json", "--model", model, "--data", folder / "data", "--seq-length", LENGTH, *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *map(str, words)])
        return script.start(script.parse_args())


def trained(run: script.Run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the first micro batch."""
    loss = run.loss(next(run.batches(run.training, 0, shuffle=True)))
    run.engine.backward(loss)
    grads = {name: safe_get_full_grad(parameter) for name, parameter in run.engine.module.named_parameters()}
    return loss.detach(), grads


def trained_apart(run: script.Run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same, each document in a forward of its own, by Transformers alone."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.args.model))
    model.load_state_dict(run.engine.module.state_dict())
    joined = dataclasses.replace(run.training, starts=None).batch(0, ROWS)
    losses = []
    for tokens in torch.cat([joined["input_ids"], joined["labels"][:, -1:]], dim=1):
        ends = (tokens == ByteTokenizer.eos).nonzero().flatten() + 1
        for document in tokens.tensor_split(ends):
            if len(document) > 1:
                logits = model(input_ids=document[None, :-1]).logits[0]
                losses.append(F.cross_entropy(logits, document[1:], reduction="none"))
    assert len(losses) > 2 * ROWS
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_apart(run: script.Run) -> None:
    want, (loss, grads) = trained_apart(run), trained(run)
    if not abs(loss - want[0]) <= EXACT * want[0]:
        raise Different(f"loss {loss}, apart {want[0]}")
    assert_same_grads(grads, want[1], EXACT)


class TestPack(DistributedTest):
    """One rank, and two that share every sequence (Ulysses)."""

    world_size: ClassVar = [1, 2]

    def test_documents_are_trained_apart(self, tmp_path):
        assert_as_apart(start(tmp_path / str(dist.get_world_size()), "--pack"))

    @pytest.mark.world_size(2)
    def test_convolutions_keep_documents_apart_on_ranks(self, tmp_path):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        layers = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "vocab_size": 512}
        AutoConfig.for_model("lfm2", **sizes, **layers).to_json_file(path := tmp_path / f"lfm2-{dist.get_rank()}.json")
        assert_as_apart(start(tmp_path, "--pack", model=path))

    @pytest.mark.world_size(1)
    def test_flash_attention_gets_all_documents_in_one_row(self, tmp_path, monkeypatch):
        run = start(tmp_path, "--pack")
        run.args.attn_implementation = "flash_attention_2"
        kernels = use_flash(run.engine.module, "flash_attention_2", monkeypatch)
        assert_as_apart(run)
        assert {borders[-1] for borders in kernels.calls} == {ROWS * LENGTH}

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("spoiled", ["position_ids", "labels"])
    def test_without_either_half(self, spoiled, tmp_path):
        """Negative controls: positions that go on across borders; labels at borders that count."""
        run = start(tmp_path, "--pack")
        joined = dataclasses.replace(run.training, starts=None).batch(0, ROWS)
        joined["position_ids"] = torch.arange(LENGTH).expand(ROWS, -1)
        batch = run.training.batch
        run.training.batch = lambda *args: {**batch(*args), spoiled: joined[spoiled]}
        with pytest.raises(Different):
            assert_as_apart(run)


@pytest.mark.parametrize(
    "config, reason",
    [
        (AutoConfig.for_model("llama", num_hidden_layers=1), None),
        (AutoConfig.for_model("gemma2", num_hidden_layers=2), None),
        (AutoConfig.for_model("lfm2", num_hidden_layers=1, layer_types=["conv"]), "conv"),
        (AutoConfig.for_model("bloom", n_layer=1), "no position_ids"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_may_mix_documents_are_refused(config, reason):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if reason is None:
        hf.check_packing(model, 1)
    else:
        hf.check_packing(model, 2)
        with pytest.raises(hf.ModelError, match=f"--pack: .* is not known to keep documents apart \\({reason}\\)"):
            hf.check_packing(model, 1)
