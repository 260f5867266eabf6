"""Whole steps of 7B width on the emulated device: what torch's real CUDA allocator is asked for, with ds_memo's op around it, and
what waits for what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import emulator, rehearsal
from benchmarks.layer_backward import read_layer_backward
from ds_memo.estimate import hardware
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.model import from_config
from ds_memo.estimate.question import Question
from ds_memo.units import GIB
from tests.benchmarks.emulated import NEEDED, no_emulated_process_hangs, ran  # noqa: F401

pytestmark = NEEDED


def steps(capfd: pytest.CaptureFixture[str], memo: dict[str, Any], length: int = 16384, *options: str) -> list[dict[str, Any]]:
    return ran(capfd, "step", "gpt7b", str(length), "--memo", json.dumps(memo), *options)


@pytest.mark.parametrize(
    "memo, length",
    [
        ({"alpha": 0.5, "resident_layers": 2}, 16384),
        ({"device_memory_gib": 16, "host_memory_gib": 32}, 32768),
        ({"device_memory_gib": 16, "host_memory_gib": 2}, 40960),
        ({"device_memory_gib": 14, "host_memory_gib": 32, "tile_tokens": 4096}, 32768),
    ],
    ids=["configured", "solved", "small host", "in tiles"],
)
def test_a_planned_step_asks_cuda_for_nothing(memo: dict[str, Any], length: int, capfd: pytest.CaptureFixture[str]) -> None:
    """No cudaMalloc and no miss once addresses are planned; little more is reserved than needed, and predicted than used."""
    *_, before, last = steps(capfd, memo, length)
    assert last["hits"] > 0 and last["missed"] == {}
    assert before["mallocs"] == last["mallocs"] == 0
    assert last["reserved"] <= 1.02 * last["requested"]
    assert last["host_waits"] == 0
    if last["predicted"]:
        assert last["predicted"] == pytest.approx(last["arena"], rel=0.02)


def test_a_picture_of_one_layers_backward(tmp_path: Path) -> None:
    """In tiles: q, k, v, attention's output and its gradient are of all tokens, everything else of a tile."""
    unit, drawn = 16384 * 4096 * 2, {}
    for name, tile in (("whole", 0), ("tiles", 2048)):
        memo = {"alpha": 0, "resident_layers": 0, "tile_tokens": tile, "head_groups": 8}
        file = tmp_path / f"{name}.pickle"
        words = ["peak", "llama8b", "16384", "--memo", json.dumps(memo), "--snapshot", str(file), "--device-gib", "40"]
        assert emulator.main([*words, "--host-gib", "64"]) == 0
        drawn[name] = read_layer_backward(file)
    most = {name: {purpose: int(nbytes.max()) for purpose, nbytes in of.nbytes.items()} for name, of in drawn.items()}
    operands = "q, k, v, attention's output; their gradients"
    assert most["whole"][operands] == 0 and most["tiles"][operands] == 3.5 * unit
    assert most["whole"]["reload buffers"] == pytest.approx(2 * 2 * unit, rel=0.02)
    assert most["tiles"]["reload buffers"] == pytest.approx(2 * 2 * unit / 8, rel=0.02)
    assert drawn["whole"].peak > 2 * drawn["tiles"].peak


def test_models_that_take_turns_share_device_and_host(capfd: pytest.CaptureFixture[str]) -> None:
    """Two of 4.5 GiB of weights and gradients each on a device of 32: one arena, and neither asks CUDA for anything."""
    rows = steps(capfd, {"host_memory_gib": 32}, 65536, "--models", "2", "--device-gib", "32")
    larger, smaller = rows[-2:]
    assert larger["arena"] == smaller["arena"] > 16 << 30
    for row in (larger, smaller):
        assert row["mallocs"] == 0 and row["hits"] > 0 and row["missed"] == {}
        assert row["reserved"] <= 1.02 * row["requested"]
    assert larger["alpha"] > 0 and smaller["alpha"] > 0


@pytest.mark.parametrize("stage, expands", [*((stage, "") for stage in range(4)), (3, "expandable_segments:True")])
def test_planned_steps_under_deepspeed(
    stage: int, expands: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients in buckets, Adam on the device; ZeRO-3 gathers on a stream of its own."""
    if expands:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", expands)
    before, last = steps(capfd, {"host_memory_gib": 64}, 32768, "--zero", str(stage), "--device-gib", "36")[-2:]
    assert last["hits"] > 100 and last["missed"].keys() <= ({"stream"} if stage == 3 else set())
    assert before["mallocs"] == last["mallocs"] == 0
    assert last["reserved"] > 0.88 * 36 * GIB  # what there is is used
    if stage < 3:
        assert last["reserved"] <= 1.02 * last["requested"]
        assert last["predicted"] == pytest.approx(last["arena"], rel=0.02)


@pytest.mark.parametrize(
    "stage, device_gib, length",
    [(1, 26, 16384), (2, 30, 49152), (3, 30, 32768)],
)
def test_engines_train_where_memory_is_tight(stage: int, device_gib: int, length: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever DeepSpeed needs for gradients, on whatever stream, is left to it."""
    last = steps(capfd, {"host_memory_gib": 64}, length, "--zero", str(stage), "--device-gib", str(device_gib))[-1]
    assert last["hits"] > 100 and last["warnings"] == []


@pytest.mark.parametrize("gathers", ["overlapping", "not overlapping"])
def test_one_of_eight_ranks_trains_where_memory_is_tight(gathers: str, tmp_path: Path) -> None:
    """ZeRO-3 makes the model in pieces, on 80 GiB, most of which is used. Step 7 may want a last block of small tensors."""
    last = rehearsed(tmp_path, 80, overlap_comm=gathers == "overlapping")[-1]
    assert last["hits"] > 1000 and last["mallocs"] == 0 and last["warnings"] == []
    assert 0.85 * 80 * GIB < last["reserved"] < 80 * GIB
    if gathers == "not overlapping":
        assert last["missed"] == {} and last["predicted"] == pytest.approx(last["arena"], rel=0.02)


@pytest.mark.parametrize(
    "left_out",
    ["ds_memo.deepspeed.initialize.limit_run_ahead", "ds_memo.deepspeed.initialize.join_split_blocks"],
    ids=["run-ahead limit", "join"],
)
def test_what_it_takes_to_train_so(left_out: str, tmp_path: Path) -> None:
    """A host that runs ahead asks CUDA for memory in every step; blocks that stay split are left alone for good."""
    last = rehearsed(tmp_path, 80, left_out)[-1]
    assert last["mallocs"] > 20 if "run_ahead" in left_out else last["predicted"] < 0.6 * 80 * GIB


LLAMA = Path(__file__).parents[2] / "ds_configs" / "models" / "llama3-8b.json"


def rehearsed(folder: Path, device_gib: float, left_out: str | None = None, **zero: Any) -> list[dict[str, Any]]:
    """Steps of launch/train.py at 64 K tokens, as one of eight ranks.

    Args:
        left_out: a function that does nothing.
    """
    train, config, script = LLAMA.parents[2] / "launch" / "train.py", folder / "ds.json", folder / "script.py"
    given = json.loads((LLAMA.parents[1] / "zero3_bf16_memo.json").read_text())
    given["zero_optimization"] |= zero
    config.write_text(json.dumps(given))
    owner, _, name = (left_out or "").rpartition(".")
    nothing = f"setattr(pkgutil.resolve_name({owner!r}), {name!r}, lambda *_: None)\n" if left_out else ""
    as_main = f"sys.path.insert(0, {str(train.parent)!r})\nrunpy.run_path({str(train)!r}, run_name='__main__')\n"
    script.write_text("import pkgutil, runpy, sys\n" + nothing + as_main)
    arguments = ["--deepspeed_config", str(config), "--model", str(LLAMA), "--seq-length", "64K", "--steps", "8"]
    asked = ["--device-gib", str(device_gib), "--json", str(folder / "rows.json"), str(script), *arguments]
    assert rehearsal.main([*asked, "--eval-batches", "1"]) == 0
    return json.loads((folder / "rows.json").read_text())


SMALL = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1024}


@pytest.mark.parametrize("whole", [True, False], ids=["kept whole", "not known"])
def test_flex_attention(whole: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Compiled by PyTorch for the device: its kernels are Triton's, and no mode sees them."""
    model, config, report = (tmp_path / name for name in ("model.json", "ds.json", "report.json"))
    model.write_text(json.dumps(json.loads(LLAMA.read_text()) | SMALL))
    given = json.loads((LLAMA.parents[1] / "zero2_bf16_memo.json").read_text())
    config.write_text(json.dumps(given | {"memo": {"enabled": True, "alpha": 0.0, "resident_layers": 0}}))
    script, train = tmp_path / "script.py", LLAMA.parents[2] / "launch" / "train.py"
    name = "ds_memo.runtime.session.keep_unobserved_attention"
    nothing = "" if whole else f"from unittest import mock\nmock.patch({name!r}).start()\n"
    as_main = f"sys.path.insert(0, {str(train.parent)!r})\nrunpy.run_path({str(train)!r}, run_name='__main__')\n"
    script.write_text("import runpy, sys\n" + nothing + as_main)
    asked = ["--deepspeed_config", str(config), "--model", str(model), "--seq-length", "2048", "--steps", "5"]
    asked += ["--attn-implementation", "flex_attention", "--metrics-json", str(report), "--eval-batches", "1"]
    assert rehearsal.main(["--ranks", "1", "--device-gib", "4", str(script), *asked]) == 0
    said = json.loads(report.read_text())["report"]
    assert bool(said["warnings"]) is not whole
    tokens, width, heads = 2048, 512, 8
    lse = 4 * tokens * heads  # bytes: what it returns, and that to another base, which its backward takes
    hidden, attention = 2 * tokens * width, 2 * tokens * width + 2 * lse
    assert said["stored_bytes_per_layer"] == [hidden + attention * whole] * 2


@pytest.mark.parametrize("host_gib", [2, 32])
def test_no_rival_trains_longer_in_the_same_memory(host_gib: int, capfd: pytest.CaptureFixture[str]) -> None:
    """On 16 GiB ds_memo is as long as any; where the host is small, it is the longest."""
    rivals = ["checkpoint", "deepspeed", "hf_offload"]
    asked = ["capacity", "gpt7b", "--host-gib", str(host_gib), "--rivals", "ds_memo, planned", *rivals]
    assert emulator.main(asked) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith(" tokens")]
    ours, *theirs = [int(line.split()[-2].replace(",", "")) for line in lines]
    assert len(theirs) == len(rivals) and max(theirs) > 0
    assert ours > max(theirs) if host_gib == 2 else ours >= max(theirs)


@pytest.mark.parametrize(
    "rival, device_gib, host_gib, tokens",
    [
        ("alst", 16, 64, 106_496),
        ("ds_memo, tiles", 16, 64, 245_760),
        ("upipe", 16, 64, 155_648),
        ("axolotl", 16, 64, 36_864),
    ],
)
def test_how_far_a_rival_gets(rival: str, device_gib: int, host_gib: int, tokens: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The lengths of docs/benchmarks.md, to the token."""
    asked = ["--device-gib", str(device_gib), "--host-gib", str(host_gib), "--rivals", rival]
    found = ran(capfd, "capacity", "llama8b", *asked)
    assert found["emulated"] and found["rivals"][rival]["longest"] == tokens


@pytest.mark.parametrize("name", ["async_offload", "axolotl"])
def test_nothing_waits_for_the_copies_of_layer_inputs(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A step takes as long with a link that is a tenth slower. `hf_offload` copies on the compute stream, and takes longer."""
    took = {rival: ran(capfd, "step", "gpt7b", "16384", "--rival", rival, "--slow-link", "0.9") for rival in (name, "hf_offload")}
    fast, slow = ({rival: rows[at]["ms"] for rival, rows in took.items()} for at in (emulator.SLOW_AFTER - 1, -1))
    assert slow[name] == pytest.approx(fast[name], rel=1e-3)
    assert slow["hf_offload"] > 1.005 * fast["hf_offload"]


@pytest.fixture
def one_gpu(tmp_path: Path) -> str:
    """An H200 that has its link to itself."""
    machine = json.loads((Path(hardware.__file__).parent / "hardware_data" / "h200.json").read_text())
    machine["d2h"] = machine["h2d"] = {"value": 50, "unit": "GB/s", "source": "PCIe 5.0 x16, one GPU"}
    (path := tmp_path / "one_gpu.json").write_text(json.dumps(machine))
    return str(path)


def test_copies_hide_and_nothing_is_slower_than_a_rival(one_gpu: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The bars of `gpu.sh speed`, by the commands that torch gives and the rates of a table; and what was predicted came true."""
    rivals = ["none", "checkpoint", "deepspeed", "hf_offload", "checkpoint+attention", "ds_memo, planned", "ds_memo, swapping"]
    point = ran(capfd, "speed", "gpt7b", "65536", "--hardware", one_gpu, "--host-gib", "100", "--rivals", *rivals)
    took = {name: row["median_s"] for name, row in point["rivals"].items()}
    ours = took["ds_memo, planned"]
    assert max(ours, took["ds_memo, swapping"]) <= 1.03 * took["none"]
    assert (
        all(took[name] >= 1.2 * ours for name in ("checkpoint", "deepspeed", "hf_offload"))
        and ours <= took["checkpoint+attention"]
    )
    assert point["failures"] == []
    swapping = point["rivals"]["ds_memo, swapping"]
    assert swapping["report"]["alpha"] > 0.9 and sum(swapping["stall_s_per_step"].values()) < 0.001 * swapping["median_s"]
    told, came = point["predicted"]["step_s"], point["rivals"]["ds_memo, planned"]["median_s"]
    assert told == pytest.approx(came, rel=0.01)


@pytest.mark.parametrize("device_gib, whole", [(20.0, True), (18.6, False)])
def test_layers_run_whole_where_they_fit(device_gib: float, whole: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A point that an H200 measured in tiles, as more than a headroom was withheld. With as much less they run in tiles here."""
    asked = ["--device-gib", str(device_gib), "--host-gib", "100", "--rivals", "checkpoint", "ds_memo, planned"]
    point = ran(capfd, "speed", "gpt7b", "65536", *asked)
    took, report = {name: row["median_s"] for name, row in point["rivals"].items()}, point["rivals"]["ds_memo, planned"]["report"]
    assert point["failures"] == [] and (report["tiles"] is None) is whole
    assert (took["checkpoint"] >= 1.15 * took["ds_memo, planned"]) is whole
    budget = report["predicted"]["device_budget"]
    assert budget["solved_for"] + budget["withheld"] == budget["free"] and budget["to_come"] == 0
    assert budget["why"] == "headroom of 8%" and budget["withheld"] == pytest.approx(0.08 * budget["free"], abs=1)
    assert report["predicted"]["device_bytes"] <= budget["solved_for"] == report["profile"]["device_budget"]


SHAPES: dict[str, dict[str, Any]] = {
    "gpt7b": {
        "model_type": "gpt_neox",
        "intermediate_size": 16384,
        "use_parallel_residual": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "llama8b": {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 14336},
}


@pytest.mark.parametrize("workload", SHAPES)
def test_formulas_agree_with_the_steps_of_real_commands(workload: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Both take their rates from one table: what differs is which bytes and FLOPs are counted. The optimizer is another one."""
    base = {"num_hidden_layers": 6, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 512}
    question = Question(from_config(base | SHAPES[workload], workload), hardware.load("h200"), 1, 65536, zero=0)
    rivals = ["none", "checkpoint", "ds_memo, planned"]
    point = ran(capfd, "speed", workload, "65536", "--device-gib", "32", "--rivals", *rivals)
    steps = {name: row["median_s"] for name, row in point["rivals"].items()}
    for rival, method in (("none", "none"), ("checkpoint", "full_recompute")):
        answer = estimate(replace(question, method=method))
        assert sum(answer.seconds.values()) - answer.seconds["optimizer"] == pytest.approx(steps[rival], rel=0.01)
    assert point["predicted"]["step_s"] == pytest.approx(steps["ds_memo, planned"], rel=0.01)
    assert point["predicted"]["estimate"]["alpha"] < 1


@pytest.mark.parametrize("gb_per_s", ["3", "25"])
def test_a_step_over_drives_takes_as_long_as_predicted(gb_per_s: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Waits for files are in the prediction, too."""
    asked = ["step", "llama8b", "98304", "--device-gib", "16", "--memo", '{"host_memory_gib": 4}']
    last = ran(capfd, *asked, "--nvme-gb-per-s", gb_per_s)[-1]
    assert last["ms"] == pytest.approx(1e3 * last["predicted_s"], rel=0.05)
    assert last["nvme"]["bytes_written"] > 0 and "NVMe" in last["binding"]
