"""ds-memo profile as users call it, and the readers of its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_memo.cli import main as cli
from ds_memo.hf.meta_model import build
from ds_memo.profile import bandwidth, run
from ds_memo.profile.json_file import from_json
from tests.command import complaint
from tests.distributed_harness.common import DistributedTest
from tests.processes import ROOT, python

TINY = str(ROOT / "ds_configs" / "models" / "tiny.json")
BASE = ("profile", "--seq-length", "256", "--dtype", "fp32", "--device", "cpu")

pytest.importorskip("transformers")


def model(tmp_path: Path, **changes) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**json.loads(Path(TINY).read_text()), **changes}))
    return str(path)


@pytest.mark.processes
def test_from_a_config_to_an_estimate(tmp_path):
    """Profile, then estimate, as users run them."""
    path = tmp_path / "profile.json"
    made = python("-m", "ds_memo.cli", *BASE, "--model", TINY, "-o", str(path))
    assert made.returncode == 0, made.stderr
    assert "1 kind of layer on cpu at 256 tokens" in made.stderr and "model.layers.0 (kind 1 of 1)" in made.stderr
    for part in (
        "model.layers.0 and 5 more like it",
        "GEMMs",
        "attention",
        "× alpha",
        "copies",
        "ulimit -l",
        f"written to {path}",
    ):
        assert part in made.stdout
    profile = from_json(path.read_text())
    assert profile.layers == (0,) * 6 and profile.ranks_per_sequence == profile.ranks_copying == 1
    ask = ["--model", TINY, "--hardware", "a800", "--gpus", "1", "--seq-length", "4K", "--json", "--profile", str(path)]
    answered = python("-m", "ds_memo.cli", "estimate", *ask)
    assert answered.returncode == 0, answered.stderr
    answer = json.loads(answered.stdout)
    (sample,) = profile.kinds[0].samples
    attention = sample.attention_s * (4096 / 256) ** 2  # one sample: lines through the origin, c·t·s
    rest = (sample.forward_s - sample.attention_s) * 4096 / 256
    assert answer["parts"]["step_s"]["forward"] == pytest.approx(6 * (attention + rest))


def test_only_one_layer_of_each_kind_has_memory(tmp_path):
    built = build(Path(model(tmp_path, num_hidden_layers=80, vocab_size=1 << 20)), torch.bfloat16, "sdpa", torch.device("cpu"))
    assert len(built.model.layers) == 80 and built.training
    real = {name.split(".")[1] + "." + name.split(".")[2] for name, p in built.named_parameters() if not p.is_meta}
    assert real == {"layers.0", "norm.weight"}
    assert built.model.rotary_emb.inv_freq.isfinite().all()


def test_every_kind_of_layer_is_measured(tmp_path, capsys):
    changes = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [2, 3], "decoder_sparse_step": 1,
    }  # fmt: skip
    assert cli.main([*BASE, "--model", model(tmp_path, **changes)]) == 0
    out = capsys.readouterr().out
    assert "model.layers.0 and 3 more like it" in out and "model.layers.2 and 1 more like it" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "none.json"), "no such file"),
        (("--model", str(ROOT / "ds_configs" / "zero3_bf16_memo.json")), "cannot be built"),
        (("--model", TINY, "--seq-length", "0"), "whole tokens"),
        (("--model", TINY, "--host-memory-gib", "-1"), "GiB above 0"),
        (("--model", TINY, "-o", str(ROOT)), "is a folder"),
        (("--model", TINY, "-o", "/proc/profile.json"), "cannot be written to"),
        ((), "--model"),
    ],
)
def test_wrong_input_ends_with_one_line(capsys, words, says):
    assert says in complaint(capsys, *BASE, *words, after_progress=True)


@pytest.mark.parametrize("name", ["T5Config", "MllamaConfig"])
def test_layers_that_attend_to_an_encoder(tmp_path, capsys, name):
    import transformers

    path = tmp_path / "config.json"
    getattr(transformers, name)().to_json_file(path)
    says = complaint(capsys, *BASE, "--model", str(path), after_progress=True)
    assert "layers attend to an encoder's states" in says and "memo.alpha and memo.resident_layers" in says


def test_a_layer_that_does_not_fit_is_an_error_not_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    path = tmp_path / "profile.json"
    path.write_text("the one before")
    assert "CUDA out of memory" in complaint(capsys, *BASE, "--model", TINY, "-o", str(path), after_progress=True)
    assert path.read_text() == "the one before" and os.listdir(tmp_path) == ["profile.json"]


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_all_ranks_copy_at_once_and_rank_0_writes(self, tmp_path) -> None:
        overlaps = _watch_copies()
        path = tmp_path / "profile.json"
        words = [*BASE, "--model", TINY, "-o", str(path)]
        if dist.get_rank():
            words[-1] = str(tmp_path / "not written.json")
        assert cli.main(words) == 0
        dist.barrier()
        assert os.listdir(tmp_path) == ["profile.json"]
        profile = from_json(path.read_text())
        assert profile.ranks_copying == profile.key["ranks"] == 2
        everybodys = [None, None]
        dist.all_gather_object(everybodys, overlaps)
        for mine, theirs in zip(*everybodys, strict=True):  # of each direction: when a rank copied, and how fast
            assert max(mine[0], theirs[0]) < min(mine[1], theirs[1])
        assert profile.d2h_bytes_per_s == min(spans[0][2] for spans in everybodys)
        assert profile.h2d_bytes_per_s == min(spans[1][2] for spans in everybodys)


def _watch_copies() -> list[tuple[float, float, float]]:
    import time

    spans: list[tuple[float, float, float]] = []
    bandwidth.SECONDS = 0.3  # of this process; long enough to overlap on a busy machine
    real = bandwidth.CopyBench.rate

    def rate(bench: bandwidth.CopyBench, stream: str) -> float:
        begin = time.time()
        found = real(bench, stream)
        spans.append((begin, time.time(), found))
        return found

    bandwidth.CopyBench.rate = rate
    return spans
