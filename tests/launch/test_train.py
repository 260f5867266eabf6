"""train.py: every wrong call ends in one line and code 2; two ranks train, save and resume on the same batches."""

import contextlib
import io
import json
import sys
from pathlib import Path

import deepspeed.comm as dist
import pytest

from tests.distributed_harness.common import DistributedTest
from tests.launch.launcher import REPO, train

sys.path.insert(0, str(REPO / "launch"))  # the ranks import this file too, without conftest.py
import train as script

QUICKSTART = str(REPO / "ds_configs" / "quickstart.json")
TINY = str(REPO / "ds_configs" / "models" / "tiny.json")


@pytest.fixture
def call(monkeypatch, capsys):
    """Run train.py in this process, as the one rank of two that share a sequence, up to its error; returns the error line."""

    def run(**options: object) -> str:
        options = {"deepspeed_config": QUICKSTART, "model": TINY, "seq_length": 64} | options
        words = [f"--{k if k == 'deepspeed_config' else k.replace('_', '-')}={v}" for k, v in options.items()]
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(SystemExit) as end:
            script.main()
        assert end.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("train.py: error: ")
        return lines[-1]

    return run


def test_a_mistake_in_the_memo_section_shows_before_a_model_is_made(call, tmp_path, monkeypatch):
    config = json.loads(Path(QUICKSTART).read_text())
    config["memo"]["host_memory_gb"] = 64
    (file := tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(script, "init_distributed", lambda: pytest.fail("too late"))
    assert "host_memory_gb" in call(deepspeed_config=file)
    assert "memo" not in script.read_ds_config(file, no_memo=True)


def test_wrong_calls(call, tmp_path):
    write = lambda name, text: (tmp_path / name).write_text(text) and tmp_path / name  # noqa: E731
    assert "no DeepSpeed configuration at nowhere.json" in call(deepspeed_config="nowhere.json")
    assert "is not JSON" in call(deepspeed_config=write("broken.json", "{"))
    assert 'has no "optimizer" section' in call(deepspeed_config=write("bare.json", "{}"))
    assert "no model configuration at nowhere.json" in call(model="nowhere.json")
    assert "not a causal language model" in call(model=write("vit.json", '{"model_type": "vit"}'))
    assert "no data found at nowhere" in call(data="nowhere")
    (tmp_path / "empty").mkdir()
    assert "no data found: 0 documents" in call(data=tmp_path / "empty")
    assert "data too small" in call(data=write("two.jsonl", '{"text": "short"}\n{"text": "shorter"}\n'))
    positions = json.loads(Path(TINY).read_text())["max_position_embeddings"]
    assert f"longer than the model's {positions} positions" in call(seq_length=positions + 1)
    small = json.loads(Path(TINY).read_text()) | {"vocab_size": 200}
    assert "258 tokens, the model's vocabulary only 200" in call(model=write("small.json", json.dumps(small)))
    assert "no checkpoint in nowhere" in call(resume="nowhere")
    three_heads = json.loads(Path(TINY).read_text()) | {"num_attention_heads": 3}  # 128 is no multiple of 3
    assert "three.json is not a model configuration" in call(model=write("three.json", json.dumps(three_heads)))
    assert "argument --seq-length: '0', expected whole tokens" in call(seq_length=0)
    assert "--steps must be at least 1, not 0" in call(steps=0)
    assert "--save-every needs --save" in call(save_every=1)


def test_dtype_follows_the_json():
    assert str(script.dtype_of({})) == str(script.dtype_of({"bf16": {"enabled": False}})) == "torch.float32"
    assert str(script.dtype_of({"bf16": {"enabled": True}})) == "torch.bfloat16"
    assert str(script.dtype_of({"fp16": {"enabled": True}})) == "torch.float16"


def as_a_rank(*words: object) -> None:
    """train.py in this process, which is a rank already; it takes the group down at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *map(str, words), f"--local_rank={dist.get_rank()}"])
        script.main()


class TestTwoRanks(DistributedTest):
    """Once as users start it. What comes after runs in the test's own ranks, which have imported everything already."""

    def test_train_save_and_resume(self, tmp_path):
        """Four steps with memo; then again from the checkpoint of step 2, without: the same batches, the same losses."""
        saved = tmp_path / "saved"
        common = ["--deepspeed_config", QUICKSTART, "--model", TINY, "--data", tmp_path / "numbers.jsonl", "--seq-length", 128]
        common += ["--steps", 4]
        if first := dist.get_rank() == 0:
            text = [f"{i}: " + " ".join(str(i * j) for j in range(200)) for i in range(60)]
            (tmp_path / "numbers.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in text))
            more = ["--save", saved, "--save-every", 2, "--eval-every", 2, "--metrics-json", tmp_path / "a.json"]
            done = train(*common, *more)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "tok/s" in done.stderr and "TGS" in done.stderr and "MFU" not in done.stderr  # no peak is known for a CPU
            losses, validation = self.check_first(json.loads((tmp_path / "a.json").read_text()))
            assert (saved / "config.json").is_file()  # with zero_to_fp32.py all that Hugging Face needs
            (saved / "latest").write_text("global_step2")
            (tmp_path / "b.json").write_text("old")
            old = open(tmp_path / "b.json")  # noqa: SIM115
        dist.barrier()
        as_a_rank(*common, "--resume", saved, "--no-memo", "--metrics-json", tmp_path / "b.json")
        if first:
            with old:
                assert old.read() == "old"  # who reads the file before reads all of it
            second = json.loads((tmp_path / "b.json").read_text())
            assert [s["step"] for s in second["steps"]] == [3, 4] and second["report"] is None
            assert [s["loss"] for s in second["steps"]] == pytest.approx(losses[2:], rel=1e-4)
            assert second["validation"][-1]["loss"] == pytest.approx(validation, rel=1e-4)

    @staticmethod
    def check_first(metrics: dict) -> tuple[list[float], float]:
        """Its losses, and the last of its validations."""
        assert [s["step"] for s in metrics["steps"]] == [1, 2, 3, 4] and metrics["ranks"] == 2 and metrics["memo"]
        assert metrics["sequence_parallel_size"] == 2
        losses = [s["loss"] for s in metrics["steps"]]
        assert losses[0] == pytest.approx(5.77, abs=0.3) and losses[3] < losses[0] - 0.5  # ln 320 at first; it learns
        assert [v["step"] for v in metrics["validation"]] == [2, 4]
        assert all(s["tokens_per_s"] > 0 and s["peak_live_bytes"] > 0 for s in metrics["steps"])
        report = metrics["report"]
        assert report["alpha"] == 0.5 and report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0
        return losses, metrics["validation"][-1]["loss"]

    def test_a_refused_memo_section_ends_every_rank_with_one_line(self, tmp_path):
        config = json.loads(Path(QUICKSTART).read_text())
        config["memo"]["alpha"] = 1.5
        file = tmp_path / f"config{dist.get_rank()}.json"
        file.write_text(json.dumps(config))
        said = io.StringIO()
        with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(said):
            as_a_rank("--deepspeed_config", file, "--model", TINY, "--data", REPO / "ds_memo", "--seq-length", 64)
        assert end.value.code == 2
        lines = [line for line in said.getvalue().splitlines() if "error" in line or "Traceback" in line]
        if dist.get_rank() == 0:
            (line,) = lines
            assert line.startswith("train.py: error: memo.alpha: got 1.5")
        else:
            assert lines == []
