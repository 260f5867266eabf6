"""The harness for CUDA machines, tried on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import check, check_tiles, results
from benchmarks.check import LIMIT_S, attempt
from benchmarks.noise import distance, noise
from ds_memo.ops.builder import cuda_headers
from ds_memo.remat.layer_call import CannotTile
from ds_memo.tiles import layer, tiling
from tests import models
from tests.faults import a_token_late, put_in

ROOT = Path(__file__).parents[2]


def gpu_sh(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    out = tmp_path / "check.json"
    ran = gpu_sh("check", "--device", "cpu", "--out", str(out))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["gradients"]["failures"] == result["stream_order"]["failures"] == result["memory"]["failures"] == []
    assert {"environment", "overhead", "link"} <= result.keys() and "unfinished" not in result
    assert result.keys().isdisjoint(results.APART)


@pytest.mark.slow
def test_parts_apart_run_where_they_are_named(tmp_path):
    out = tmp_path / "check.json"
    assert check.main(["--device", "cpu", "--parts", "allocator,flex", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result.keys() == {"verb", "environment", "allocator", "flex", "seconds", "failures"}
    assert result["allocator"]["pairs"]["samples_ns"] and "no backward" in result["flex"]["skipped"]


def test_a_part_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu", "--parts", "memory,speeed"])
    assert "--parts: got speeed; allowed: environment, gradients" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("DS_MEMO_CUDA_TORCH") or cuda_headers() is None,
    reason="needs DS_MEMO_CUDA_TORCH (see benchmarks/emulator/emulator.py) and CUDA's runtime headers",
)
def test_parts_run_over_the_emulator(tmp_path, capfd):
    """Copies take seconds; a clock that stands still would show none."""
    out = tmp_path / "check.json"
    assert check.main(["--device", "emulator", "--parts", "link", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["verb"] not in results.VERBS and "unfinished" not in found
    assert 0 < found["clock_s"]["link"] < 5 and "s by the clock" in capfd.readouterr().out


def test_a_part_that_breaks_is_a_failure_and_no_end():
    def breaks():
        sys.exit("a child died")

    assert attempt("one", lambda: {"failures": []}, lambda: LIMIT_S) == {"failures": []}
    assert attempt("two", breaks, lambda: LIMIT_S) == {"failures": ["two: SystemExit: a child died"]}
    late = attempt("three", breaks, lambda: 10.0)
    assert late == {"failures": [f"three: left out, 10 of {LIMIT_S} s are left"]}


def test_a_check_that_is_ended_leaves_the_parts_before_and_says_so(monkeypatch, tmp_path):
    def ends():
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "parts", lambda *arguments: {"environment": lambda: {"torch": "2"}, "gradients": ends})
    with pytest.raises(KeyboardInterrupt):
        check.main(["--device", "cpu", "--out", str(tmp_path / "check.json")])
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["unfinished"] and found["environment"] == {"torch": "2"}


def test_a_model_that_breaks_takes_no_other_with_it(monkeypatch):
    def breaks(dtype):
        raise RuntimeError("cuDNN: No execution plans support the graph")

    monkeypatch.setattr(check, "MODELS", {"broken": breaks, "plain": check.MODELS["plain"]})
    found = check.gradients(torch.device("cpu"), torch.float32, alphas=(0.5,), residents=(2,))
    assert found["failures"] == ["broken: RuntimeError: cuDNN: No execution plans support the graph"]
    assert found["models"]["plain"]["failures"] == []


@pytest.mark.parametrize("names", [("llama",), ("mixtral",)])
def test_tiles_that_round_as_stock_pass(names):
    found = check_tiles.measure(torch.device("cpu"), torch.bfloat16, names)
    assert found["failures"] == []
    assert all(row["tiled"] == models.LAYERS and 0 < row["worst"] <= row["bar"] for row in found["models"].values())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_tile_that_reads_its_neighbours_tokens_shows(name, monkeypatch):
    put_in(monkeypatch, layer, "part", a_token_late)
    found = check_tiles.measure(torch.device("cpu"), torch.bfloat16, [name])
    assert found["failures"] and name in found["failures"][0]


def test_a_layer_that_runs_whole_is_no_layer_in_tiles(monkeypatch):
    def refuses(right, *args):
        raise CannotTile("it is asked to run whole")

    put_in(monkeypatch, tiling, "probe", refuses)
    failures = check_tiles.measure(torch.device("cpu"), torch.bfloat16, ["llama"])["failures"]
    assert failures and "runs whole" in failures[0]


def test_an_error_in_a_setting_names_it(monkeypatch):
    monkeypatch.setattr(check, "MODELS", {"plain": check.MODELS["plain"]})
    monkeypatch.setattr(check.models, "assert_same", lambda *args: 1 / 0)
    (failure,) = check.gradients(torch.device("cpu"), torch.float32, alphas=(0.5,), residents=(2,))["failures"]
    assert failure == "plain: RuntimeError: alpha 0.5 resident 2: ZeroDivisionError: division by zero"


def test_each_attention_of_a_cuda_device_is_checked_apart(monkeypatch):
    seen = {}

    def looks(device, dtype, **less):
        seen["cudnn"], seen["flash"] = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()

    monkeypatch.setattr(check, "gradients", looks)
    parts = check.parts(torch.device("cuda"), lambda: 480.0)
    assert {"host", "stream_order", "stream_order_without_cudnn"} <= parts.keys()
    parts["gradients"]()
    assert seen["cudnn"]
    parts["gradients_without_cudnn"]()
    assert seen == {"cudnn": False, "flash": True}
    assert not [name for name in check.parts(torch.device("cpu"), lambda: 480.0) if "cudnn" in name]


def test_the_bar_is_what_stock_does_to_itself():
    """Gemma 2's soft caps make much of a rounding error: 1.1 % in bf16, where others have less than one rounding."""
    bars = {}
    for name in ("gemma2", "neox"):
        model, batch = models.build(name, torch.bfloat16), models.Batch.random(2, 33, torch.bfloat16)

        def run(model=model, batch=batch):
            return models.step(model, batch).grads

        want = run()
        assert max(distance(run(), want).values()) == 0
        bars[name] = noise(run, want, torch.bfloat16, orders=3)
    assert bars["neox"] == torch.finfo(torch.bfloat16).eps / 2 < bars["gemma2"] < 0.05
