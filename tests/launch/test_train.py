"""train.py: every wrong call ends in one line and code 2; two ranks train, save and resume on the same batches."""

import json
from pathlib import Path

import pytest
import train as script
from launcher import REPO, train

QUICKSTART = str(REPO / "ds_configs" / "quickstart.json")
TINY = str(REPO / "ds_configs" / "models" / "tiny.json")


@pytest.fixture
def call(monkeypatch, capsys):
    """Run train.py in this process, as the one rank of two that share a sequence, up to its error; returns the error line."""
    monkeypatch.setenv("WORLD_SIZE", "2")

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


def test_wrong_calls(call, tmp_path):
    write = lambda name, text: (tmp_path / name).write_text(text) and tmp_path / name  # noqa: E731
    assert "no DeepSpeed configuration at nowhere.json" in call(deepspeed_config="nowhere.json")
    assert "is not JSON" in call(deepspeed_config=write("broken.json", "{"))
    assert 'needs an "optimizer"' in call(deepspeed_config=write("bare.json", "{}"))
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
    assert "sequence_parallel_size: got 2, but 65 tokens do not split into 2 equal parts; use 64 or 66" in call(seq_length=65)
    one_head = json.loads(Path(TINY).read_text()) | {"num_attention_heads": 1, "num_key_value_heads": 1}
    assert "the model's 1 attention heads are no multiple" in call(model=write("one.json", json.dumps(one_head)))
    three_heads = json.loads(Path(TINY).read_text()) | {"num_attention_heads": 3}  # 128 is no multiple of 3
    assert "three.json is not a model configuration" in call(model=write("three.json", json.dumps(three_heads)))
    assert "--seq-length must be at least 1, not 0" in call(seq_length=0)
    assert "--save-every needs --save" in call(save_every=1)


def test_dtype_follows_the_json():
    assert str(script.dtype_of({})) == str(script.dtype_of({"bf16": {"enabled": False}})) == "torch.float32"
    assert str(script.dtype_of({"bf16": {"enabled": True}})) == "torch.bfloat16"
    assert str(script.dtype_of({"fp16": {"enabled": True}})) == "torch.float16"


def test_two_ranks_train_save_and_resume(tmp_path):
    """Four steps with memo; then again from the checkpoint of step 2, without: the same batches, the same losses."""
    text = [f"{i}: " + " ".join(str(i * j) for j in range(200)) for i in range(60)]
    data = tmp_path / "numbers.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in text))
    common = ["--deepspeed_config", QUICKSTART, "--model", TINY, "--data", data, "--seq-length", 128, "--steps", 4]
    saved = tmp_path / "saved"

    done = train(*common, "--save", saved, "--save-every", 2, "--eval-every", 2, "--metrics-json", tmp_path / "a.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tok/s" in done.stderr and "TGS" in done.stderr and "MFU" not in done.stderr  # no peak is known for a CPU
    first = json.loads((tmp_path / "a.json").read_text())
    assert [s["step"] for s in first["steps"]] == [1, 2, 3, 4] and first["ranks"] == 2 and first["memo"]
    assert first["sequence_parallel_size"] == 2
    losses = [s["loss"] for s in first["steps"]]
    assert losses[0] == pytest.approx(5.77, abs=0.3) and losses[3] < losses[0] - 0.5  # ln 320 at first; it learns
    assert [v["step"] for v in first["validation"]] == [2, 4]
    assert all(s["tokens_per_s"] > 0 and s["peak_live_bytes"] > 0 for s in first["steps"])
    report = first["report"]
    assert report["alpha"] == 0.5 and report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0
    assert (saved / "config.json").is_file()  # with zero_to_fp32.py all that Hugging Face needs

    (saved / "latest").write_text("global_step2")
    done = train(*common, "--resume", saved, "--no-memo", "--metrics-json", tmp_path / "b.json")
    assert done.returncode == 0, done.stdout + done.stderr
    second = json.loads((tmp_path / "b.json").read_text())
    assert [s["step"] for s in second["steps"]] == [3, 4] and second["report"] is None
    assert [s["loss"] for s in second["steps"]] == pytest.approx(losses[2:], rel=1e-4)
    assert second["validation"][-1]["loss"] == pytest.approx(first["validation"][-1]["loss"], rel=1e-4)


def test_a_refused_memo_section_ends_every_rank_with_one_line(tmp_path):
    config = json.loads(Path(QUICKSTART).read_text())
    config["memo"]["alpha"] = 1.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = train("--deepspeed_config", tmp_path / "config.json", "--model", TINY, "--data", REPO / "ds_memo", "--seq-length", 64)
    assert done.returncode == 2
    assert done.stderr.count("train.py: error: ") == 1 and "memo.alpha: got 1.5" in done.stderr
    assert "Traceback" not in done.stderr
