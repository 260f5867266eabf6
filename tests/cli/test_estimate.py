"""ds-memo estimate as users call it."""

import csv
import json
import re
from pathlib import Path

import pytest

from ds_memo.cli import main as cli
from ds_memo.estimate import hardware
from ds_memo.estimate.question import METHODS
from tests.command import complaint
from tests.everyday import everyday
from tests.processes import ROOT

GPT = str(ROOT / "ds_configs" / "models" / "gpt-7b.json")
LLAMA = str(ROOT / "ds_configs" / "models" / "llama3-8b.json")
BASE = ("estimate", "--model", GPT, "--hardware", "a800", "--gpus", "8")


def answer(capsys, *words: str, base=BASE) -> dict:
    assert cli.main([*base, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("method", METHODS)
def test_json_has_what_was_promised(capsys, method):
    got = answer(capsys, "--seq-length", "16384", "--method", method)
    assert {"status", "mfu", "tgs", "step_s", "alpha", "resident_layers", "binding", "device_gib", "host_gib", "parts"} <= set(
        got
    )
    assert got["status"] == "ok"
    assert got["tgs"] * 8 * got["step_s"] == pytest.approx(16384 * got["sequences"])
    assert sum(got["parts"]["device_gib"].values()) == pytest.approx(got["device_gib"])
    assert sum(got["parts"]["step_s"].values()) == pytest.approx(got["step_s"])
    assert 0.1 < got["mfu"] < 0.75


def test_the_example_in_the_docs(capsys):
    assert cli.main([*BASE, "--seq-length", "1M"]) == 0
    shown = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert shown in (ROOT / "docs" / "estimate.md").read_text()


def test_out_of_device_and_out_of_host_memory_are_told_apart(capsys):
    assert answer(capsys, "--seq-length", "1M", "--method", "none")["status"] == "oom"
    small = answer(capsys, "--seq-length", "2M", "--host-memory-gib", "1", "--tile-tokens", "0")
    assert small["status"] == "oohm" and "3 times as many sequence-parallel ranks" in small["binding"]
    assert answer(capsys, "--seq-length", "4M", "--host-memory-gib", "1", "--tile-tokens", "0")["status"] == "oom"
    small = answer(capsys, "--seq-length", "512K", "--host-memory-gib", "1", "--tile-tokens", "0")
    assert small["status"] == "ok" and "28 of 32 layers stay on the device without GEMM outputs" in small["binding"]
    others = dict.fromkeys(("without_recompute", "attention_recomputed", "input_computed"), 0)
    assert small["placements"] == {"on_device": 4, "without_gemms": 28, **others}


@pytest.mark.parametrize(
    "length, host, tiles", everyday([("512K", "0.2", "0"), ("2M", "1", "0"), ("4M", "0.5", "32768")], [("2M", "1", "0")])
)
def test_alpha_0_is_answered_as_where_it_is_left_out(capsys, length, host, tiles):
    asked = ("--seq-length", length, "--host-memory-gib", host, "--tile-tokens", tiles)
    solved, configured = answer(capsys, *asked), answer(capsys, *asked, "--alpha", "0")
    assert solved["alpha"] in (0, None)
    assert configured == solved


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "of 129.3 GiB. What helps: --offload optimizer, more GPUs, a smaller model."),
        (("--zero", "0"), "What helps: a higher ZeRO stage, more GPUs"),
        (("--zero", "1", "--offload", "optimizer"), "What helps: a higher ZeRO stage, more GPUs"),
    ],
)
def test_a_model_whose_states_do_not_fit(capsys, words, says):
    large = ("estimate", "--model", GPT.replace("7b", "65b"), "--hardware", "h200", "--gpus", "1", "--seq-length", "1K")
    got = answer(capsys, *words, base=large)
    assert got["status"] == "oom" and says in got["binding"]


def test_alpha_plan_and_batch_are_obeyed(capsys):
    swapped = ("--seq-length", "256K", "--tp", "4", "--cp", "2", "--tile-tokens", "0")
    assert answer(capsys, *swapped, "--alpha", "0.5")["alpha"] == 0.5
    assert answer(capsys, *swapped, "--plan")["mfu"] > answer(capsys, *swapped, "--no-plan")["mfu"]
    one, many = answer(capsys, *swapped), answer(capsys, *swapped, "--batch", "16")
    assert many["sequences"] == 16 and 15 < many["step_s"] / one["step_s"] < 16


def test_a_device_budget_is_beside_the_context(capsys):
    words = ("--seq-length", "512K", "--tile-tokens", "0")
    whole, small = answer(capsys, *words), answer(capsys, *words, "--device-memory-gib", "40")
    assert small["status"] == "ok" and small["device_gib"] <= 40 < whole["device_gib"]
    assert small["placements"] != whole["placements"] and small["step_s"] > whole["step_s"]
    assert "context and communication" not in small["parts"]["device_gib"]
    assert cli.main([*BASE, *words, "--device-memory-gib", "40"]) == 0
    assert "of 40.0 GiB\n" in capsys.readouterr().out
    assert answer(capsys, *words, "--device-memory-gib", "8")["status"] == "oom"
    assert answer(capsys, *words[:2], "--device-memory-gib", "40", "--method", "none")["status"] == "oom"


@pytest.mark.slow
def test_longest_and_fewest(capsys):
    longest = answer(capsys, "--max-length", "--tile-tokens", "0")
    assert 2 << 20 <= longest["seq_length"] < 4 << 20
    assert longest["beyond"]["status"] in ("oom", "oohm")
    fewest = answer(capsys, "--min-gpus", "--seq-length", "1M", "--tile-tokens", "0", base=BASE[:5])
    assert fewest["status"] == "ok" and fewest["beyond"]["status"] != "ok" and fewest["gpus"] <= 8
    never = answer(capsys, "--min-gpus", "--seq-length", "512M", "--tile-tokens", "0", base=BASE[:5])
    assert never["status"] != "ok"


def test_searches_show_what_they_try_and_advise_nothing_beside_their_answer(capsys):
    assert cli.main([*BASE[:5], "--min-gpus", "--seq-length", "64K", "--tile-tokens", "0"]) == 0
    shown = capsys.readouterr()
    assert "with 1 GPU: oom, device memory" in shown.out and "What helps" not in shown.out
    assert "64 Ki tokens on 1 GPU: out of device memory" in shown.err and "64 Ki tokens on 2 GPUs: fits" in shown.err


@pytest.mark.parametrize("nested", [False, True])
def test_misspelled_keys_are_named(capsys, tmp_path, nested):
    sizes = {"hiden_size": 64, "colour": "red", "num_hidden_layers": 2, "vocab_size": 99, "_name_or_path": "x", "rope_theta": 1e4}
    data = {"model_type": "llama"} | sizes if not nested else {"model_type": "gemma3", "text_config": sizes}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    base = ("estimate", "--model", str(path), "--hardware", "a800", "--gpus", "8")
    notes = [note for note in answer(capsys, "--seq-length", "1K", base=base)["notes"] if "does not know" in note]
    assert len(notes) == 1 and notes[0].endswith(": hiden_size (did you mean hidden_size?), colour")
    assert not any("does not know" in note for note in answer(capsys, "--seq-length", "1K")["notes"])


def test_a_model_by_the_name_under_which_its_config_is_cached(capsys, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--Llama-3.1-8B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(Path(LLAMA).read_text())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = ("--hardware", "a800", "--gpus", "8", "--seq-length", "64K")
    assert cli.main(["estimate", "--model", "some/Llama-3.1-8B", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Llama-3.1-8B, 64 Ki tokens on 8 × a800, memo: fits\n")
    assert cli.main(["estimate", "--model", LLAMA, *words]) == 0
    assert shown.partition(",")[2] == capsys.readouterr().out.partition(",")[2]


def test_adapters_on_a_card_that_no_file_has(capsys):
    card = ("--peak-tflops", "100", "--device-memory-gib", "12", "--device-gb-per-s", "700", "--link-gb-per-s", "20")
    base = (
        "estimate",
        "--model",
        LLAMA,
        "--hardware",
        "generic",
        *card,
        "--gpus",
        "1",
        "--seq-length",
        "4K",
        "--tile-tokens",
        "0",
    )
    assert cli.main([*base, "--qlora", "32"]) == 0
    shown = capsys.readouterr().out
    assert "tokens on 1 × generic, memo, QLoRA of rank 32: fits" in shown and "of 12.0 GiB" in shown
    trained = "83.89 M parameters trained; frozen ones take 5.311 GiB, in 4 bits, head and embeddings in bf16"
    assert f"  adapters   {trained}\n" in shown
    assert "assumed of generic, neither measured nor published: " in shown
    lora, full = answer(capsys, "--lora", base=base), answer(capsys, base=base)
    assert (lora["adapters"]["rank"], full["adapters"]) == (8, None)
    assert lora["status"] == full["status"] == "oom" and "What helps: --qlora" in lora["binding"]


@pytest.mark.slow
def test_the_example_of_adapters_in_the_docs(capsys):
    assert (
        cli.main(["estimate", "--model", LLAMA, "--hardware", "rtx4090", "--gpus", "1", "--qlora", "32", "--seq-length", "128K"])
        == 0
    )
    shown = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines()[:6])
    assert shown in (ROOT / "docs" / "estimate.md").read_text()


def test_methods_are_compared_like_with_like(capsys):
    """Checkpointing with the loss in chunks fits where whole logits do not; ALST's and TRL's inputs are on the host."""
    assert cli.main([*BASE[:5], "--gpus", "8", "--seq-length", "1M", "--compare", "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert all(row["plan"] and "fragmentation" not in row["parts"]["device_gib"] for row in rows.values())
    assert rows["full_recompute"]["status"] == "oom" and "logits" in rows["full_recompute"]["parts"]["device_gib"]
    device = {name: rows[name]["device_gib"] for name in ("alst", "trl", "checkpoint")}
    assert rows["alst"]["status"] == rows["trl"]["status"] == "ok" and device["alst"] < device["trl"] < device["checkpoint"]
    inputs = (1 << 20) * 4096 * 2 * 32 / 2**30
    assert rows["alst"]["host_gib"] == rows["trl"]["host_gib"] == inputs and rows["checkpoint"]["host_gib"] == 0
    assert answer(capsys, "--seq-length", "1M", "--method", "alst", "--host-memory-gib", "255")["status"] == "oohm"


def test_a_sweep_as_table_csv_and_picture(capsys, tmp_path):
    table = tmp_path / "sweep.csv"
    assert cli.main([*BASE, "--sweep", "64K:256K", "--compare", "-o", str(table)]) == 0
    shown = capsys.readouterr().out
    assert "attention: FlashAttention-2 at 217 and 188 TFLOP" in shown and "no plan" not in shown
    assert all(re.search(rf"^  {method} .* {assumed}$", shown, re.MULTILINE) for method, assumed in METHODS.items())
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 3 * len(METHODS)
    assert {row["method"] for row in rows} == set(METHODS)
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        picture = tmp_path / f"sweep{suffix}"
        assert cli.main([*BASE, "--sweep", "64K,128K", "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seq-length", "0"), "'0'"),
        (("--seq-length", "1M", "--alpha", "0.5", "--method", "none"), "only memo"),
        (("--seq-length", "1M", "--sp", "3"), "not a multiple"),
        (("--seq-length", "1M", "--ulysses", "4"), "only an --sp that is given"),
        (("--seq-length", "1M", "--hardware", "abacus"), "hardware_data/h200.json"),
        (("--seq-length", "1M", "--model", "nowhere.json"), "nowhere.json"),
        (
            ("--seq-length", "1M", "--model", "no-such/model"),
            "nothing is downloaded. Run `hf download no-such/model config.json`",
        ),
        (("--seq-length", "1M", "--model", "no--such/mo--del"), "Run `hf download"),
        (
            ("--seq-length", "1M", "--hardware", "generic"),
            "--peak-tflops, --device-memory-gib, --device-gb-per-s, --link-gb-per-s",
        ),
        (("--seq-length", "1M", "--peak-tflops", "-1"), "a number above 0"),
        (("--seq-length", "1M", "--lora", "--qlora"), "--lora does not go with --qlora"),
        (("--seq-length", "1M", "--qlora", "--profile", "x.json"), "--qlora does not go with --profile"),
        (("--seq-length", "1M", "--lora", "0"), "'0'"),
        (("--seq-length", "1M", "--lora", "--offload", "all"), "--offload all with LoRA of rank 8"),
        (("--seq-length", "1M", "--profile", "nowhere.json"), "--profile: cannot read nowhere.json: No such file"),
        (("--seq-length", "1M", "--tile-tokens", "4096", "--method", "none"), "only memo runs layers in tiles"),
        (("--compare", "--seq-length", "1M", "--alpha", "0.5"), "its own alpha"),
        (("--seq-length", "1M", "--nvme-gib", "100"), "--nvme-gb-per-s is missing"),
        ((), "--seq-length"),
    ],
)
def test_bad_input_is_one_line(capsys, words, says):
    assert says in complaint(capsys, *BASE, *words, after_progress=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ('{"num_hidden_layers": "many", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}', "num_hidden_layers"),
        ('{"num_hidden_layers": 9999999, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}', "at most 4096"),
        ('{"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": -8}', "cannot be built"),
        ('{"model_type": "t5"}', "attend to an encoder"),
        (100_000 * '{"text_config": ', "nested too deeply"),
    ],
)
def test_a_bad_model_file_is_one_line(capsys, tmp_path, text, says):
    path = tmp_path / "model.json"
    path.write_text(text)
    words = ("estimate", "--model", str(path), "--hardware", "a800", "--gpus", "8", "--seq-length", "1K")
    assert says in complaint(capsys, *words, after_progress=True)


def machine() -> dict:
    return json.loads((Path(hardware.__file__).parent / "hardware_data" / "a800.json").read_text())


@pytest.mark.parametrize(
    ("key", "entry", "says"),
    [
        ("peak", {"value": 312, "unit": "TFLOPs"}, "unit 'TFLOPs'"),
        ("gemm_efficiency", {"value": 72, "unit": ""}, "from 1e-06 to 1"),
        ("d3h", {"value": 1, "unit": "GB/s"}, "unknown key 'd3h'"),
        ("peak", None, "missing peak"),
        ("attention_kernels", {"fa2": {}}, "expected an object with keys of flash, flash_attn_3, flash_attn_4, cudnn"),
        ("host_memory", {"value": 1e300, "unit": "GiB"}, "host_memory is 1e+300 GiB, expected a number from"),
    ],
)
def test_bad_hardware_is_one_line(capsys, tmp_path, key, entry, says):
    data = machine()
    if entry is None:
        del data[key]
    else:
        data[key] = entry
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    words = ("estimate", "--model", GPT, "--hardware", str(path), "--gpus", "8", "--seq-length", "64K")
    assert says in complaint(capsys, *words)


# ---- drives

H100 = ("estimate", "--model", LLAMA, "--hardware", "h100", "--gpus", "8")
DRIVES = ("--nvme-gib", "15000", "--nvme-gb-per-s", "48")
LONG = ("--seq-length", "1M", "--tile-tokens", "0", "--host-memory-gib", "230")


def test_drives_hold_what_the_host_has_no_room_for(capsys):
    without, got = answer(capsys, *LONG, base=H100), answer(capsys, *LONG, *DRIVES, base=H100)
    assert got["nvme_gib"] > 0 and got["step_s"] < without["step_s"] and got["host_gib"] <= 230
    assert got["nvme_tb_per_day"] == pytest.approx(got["nvme_gib"] * 2**30 * 86400 / got["step_s"] / 1e12)
    assert (without["nvme_gib"], without["nvme_tb_per_day"], without["nvme_stall_s"]) == (0, 0, 0)
    assert cli.main([*H100, *LONG, *DRIVES]) == 0
    shown = capsys.readouterr().out
    assert f"{got['nvme_gib']:,.0f} of 15,000 GiB of a node\n" in shown
    assert f"{got['nvme_tb_per_day']:.1f} TB written a day\n" in shown
    twice = answer(capsys, *LONG, *DRIVES, "--batch", "2", base=H100)
    assert twice["nvme_gib"] == got["nvme_gib"] and twice["nvme_tb_per_day"] == pytest.approx(got["nvme_tb_per_day"], rel=0.01)


def test_less_device_memory_than_a_card_keeps_for_itself(capsys):
    """What is given is what a run may use: nothing is kept back of it."""
    cli.main([*H100, "--seq-length", "64K", "--device-memory-gib", "1"])
    assert "of 1 GiB" in capsys.readouterr().out
