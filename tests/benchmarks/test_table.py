"""Results: files, archives, and the tables in the README."""

import json
import os
import tarfile

import pytest
import torch

from benchmarks import results, table
from benchmarks.rivals import PLANNED
from ds_memo.units import GIB
from tests.benchmarks.test_capacity import found_length

CPU = torch.device("cpu")


RESULT = {
    "verb": "speed",
    "environment": {"time": "2030-01-01T00:00:00+00:00", "device": "H", "torch": "2", "commit": "abcdef123456", "cuda": "13"},
    "points": [
        {
            "workload": "gpt7b",
            "length": 65536,
            "host_budget": 64 * GIB,
            "claims": [{"held": True}, {"held": False}],
            "predicted": {"step_s": 2.0},
            "rivals": {"none": {"median_s": 2.5}, "paper": {"out": "MemoError: host memory"}},
        }
    ],
    "dropped": [{"workload": "gpt7b", "length": 131072}],
    "failures": [],
}


def test_the_table_is_made_from_cuda_results_only(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\ntyped by hand\n{table.END}\nafter\n")
    on_cpu = RESULT | {"environment": {key: value for key, value in RESULT["environment"].items() if key != "cuda"}}
    (tmp_path / "speed-cpu.json").write_text(json.dumps(on_cpu))
    table.update(readme, tmp_path)
    assert readme.read_text() == f"before\n{table.BEGIN}\n{table.NONE_YET}{table.END}\nafter\n"
    (tmp_path / "speed-cuda.json").write_text(json.dumps(RESULT))
    table.update(readme, tmp_path)
    text = readme.read_text()
    assert "gpt7b 64K; dropped for time: gpt7b 128K; no failures, 1 of 2 bars held" in text
    assert "| gpt7b | 64K | 64 | all | 2,500 | does not fit | 2,000 |" in text


def test_a_run_with_other_rivals_does_not_hide_the_one_before():
    point = RESULT["points"][0]
    others = RESULT | {"points": [point | {"rivals": {"none": {"median_s": 2.4}, "deepspeed": {"median_s": 3.0}}}]}
    again = RESULT | {"points": [point | {"rivals": {"none": {"median_s": 2.3}, "paper": {"median_s": 2.9}}}]}
    text = table.render([("a.json", RESULT), ("b.json", others), ("c.json", again)])
    assert "| gpt7b | 64K | 64 | all | 2,400 | – | 3,000 | 2,000 |" in text
    assert "| gpt7b | 64K | 64 | all | 2,300 | 2,900 | – | 2,000 |" in text and "2,500" not in text


def test_a_device_budget_is_another_row_with_what_was_predicted_and_measured():
    point = RESULT["points"][0]
    small = point | {"device_budget": 20 * GIB, "rivals": {"none": {"median_s": 2.5}, PLANNED: {"median_s": 1.6}}}
    text = table.render([("a.json", RESULT), ("b.json", RESULT | {"points": [small]})])
    assert "| 64 | all | 2,500 | does not fit | – | 2,000 |" in text
    assert "| 64 | 20 | 2,500 | – | 1,600 | 2,000 (+25.0%) |" in text


def test_the_table_of_attention_kernels():
    kernels = {"cudnn": {"forward_tflops": 600.4, "backward_tflops": 500.0}, "flash": {"out": "RuntimeError: none"}}
    run = RESULT | {"attention": {"points": [{"length": 16384, "kernels": kernels, "picked": "cudnn"}]}}
    assert "| tokens | cudnn | flash |\n|---|---|---|\n| 16K | **600 / 500** | – |\n" in table.render([("speed-cuda.json", run)])


def test_the_table_says_why_there_is_no_number():
    outs = {
        "not tried: no time left": "no time",
        "deepspeed is not installed": "not installed",
        "OutOfMemoryError: CUDA out of memory. Tried": "out of memory",
        "NothingFits: device memory": "does not fit",
        "ValueError: no such kernel": "broke",
        "not tried: 90 GiB to save, 32 GiB of host memory": "not tried: host",
    }
    point = RESULT["points"][0] | {"rivals": {out: {"out": out} for out in outs}}
    assert f"| {' | '.join(outs.values())} |" in table.render([("speed.json", RESULT | {"points": [point]})])
    row = {"workload": "gpt7b", "device_bytes": 16 * GIB, **found_length("ds_memo, planned", 65536), "step_s": 2.0}
    lengths = {
        "64K | 2.00": {},
        "≥ 64K (no time) | 2.00": {"ended_early": "no time left after 63 s"},
        "none | 2.00": {"longest": None},
        "broke | 2.00": {"longest": None, "ended_early": "exit 1: ValueError"},
        "not installed | –": {"longest": None, "why": "deepspeed is not installed", "step_s": None},
    }
    capacity = {"verb": "capacity", "environment": RESULT["environment"], "rivals": [row | of for of in lengths.values()]}
    shown = [line.partition("planned | ")[2] for line in table.render([("c.json", capacity)]).splitlines() if "planned" in line]
    assert shown == [f"{cell} |" for cell in lengths]


def test_bars_that_only_noise_lets_hold_are_counted_apart():
    held = [{"held": True, "value": 1.01, "bar": 1.0, "margin": 0.02}, {"held": True, "value": 0.9, "bar": 1.0, "margin": 0.02}]
    assert table.summary({"verb": "speed", "claims": held}) == "no failures, 2 of 2 bars held (1 within noise)"


def test_bars_that_nothing_was_measured_for_are_named():
    claims = [
        {"held": True, "value": 0.9, "bar": 1.0},
        results.unmeasured("reserved / requested", "other solution | in two processes"),
    ]
    text = table.summary({"verb": "planner", "runs": [{"claims": claims}]})
    assert text == "no failures, 1 of 2 bars held; not measured: reserved / requested (other solution / in two processes)"


@pytest.mark.processes
def test_a_run_that_was_ended_leaves_what_it_had(tmp_path):
    run = results.Run("speed", CPU, str(tmp_path), {"lengths": None})
    assert run.attempt("attention", lambda: 1 / 0) is None
    run.save(points=[{"workload": "gpt7b", "length": 1024, "claims": [{"held": True}]}])
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["environment"]["torch"] == torch.__version__ and found["failures"][0].startswith("attention: ZeroDivisionError")
    assert table.summary(found) == "gpt7b 1K; ended from outside, 1 failures until then, 1 of 1 bars held"
    assert run.finish() == 1
    assert list(tmp_path.iterdir()) == [path] and "unfinished" not in json.loads(path.read_text())
    assert table.render([("speed.json", {"verb": "speed", "environment": found["environment"], "unfinished": True})])


@pytest.mark.processes
def test_details_go_into_one_archive_as_far_as_there_is_room(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    (made / "profile.json").write_text("{}")
    (made / "large.trace.json").write_bytes(os.urandom(5000))
    assert results.pack(made, tmp_path / "all.tar.gz", most=10000) == []
    assert results.pack(made, tmp_path / "some.tar.gz", most=1000) == ["large.trace.json"]
    with tarfile.open(tmp_path / "some.tar.gz") as details:
        assert details.getnames() == ["profile.json"]
    assert results.Run("speed", CPU, str(tmp_path)).finish(made) == 0
    (path,) = tmp_path.glob("speed-cpu-*.json")
    assert (tmp_path / json.loads(path.read_text())["details"]).exists()


def test_archives_are_no_results_and_no_mistakes(tmp_path, monkeypatch):
    updated = []
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    monkeypatch.setattr(table, "update", lambda: updated.append(1))
    assert table.main(["out/speed-cuda-1.tar.gz"]) == 0
    assert updated and list(tmp_path.iterdir()) == []


def test_the_table_in_the_repository_is_up_to_date():
    text = table.README.read_text()
    assert table.render(table.load(results.FOLDER)) == text.split(table.BEGIN + "\n")[1].split(table.END)[0]


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert table.main([str(other)]) == 2
    assert "no result" in capsys.readouterr().err
