"""The tables of docs/benchmarks.md: what the JSON files say, and nothing typed by hand."""

import json

from benchmarks import longest, results, table
from ds_memo.units import GIB

RESULT = {
    "verb": "speed",
    "environment": {"time": "2030-01-01T00:00:00+00:00", "device": "H", "torch": "2", "commit": "abcdef123456", "cuda": "13"},
    "points": [
        {
            "workload": "gpt7b",
            "length": 65536,
            "host_budget": 64 * GIB,
            "claims": [{"held": True, "value": 1.01, "bar": 1.0, "margin": 0.02}, results.unmeasured("step", "other | solution")],
            "predicted": {"step_s": 2.0},
            "rivals": {"none": {"median_s": 2.5}, "alst": {"out": "MemoError: host memory"}, table.PLANNED: {"median_s": 1.6}},
        }
    ],
    "dropped": [{"workload": "gpt7b", "length": 131072}],
    "failures": [],
    "unfinished": True,
}
RIVAL = {"workload": "gpt7b", "rival": "alst", "device_bytes": 16 * GIB, "host_bytes": 64 * GIB, "longest": 65536, "step_s": 2.0}


def test_the_pages_tables_are_those_of_the_files():
    text = table.PAGE.read_text()
    assert table.render(table.load(results.FOLDER)) == text.split(table.BEGIN + "\n")[1].split(table.END)[0]
    for of, file in ((longest.table, "lengths-emulated.json"), (longest.table_of_hybrids, "hybrids-emulated.json")):
        assert "\n".join(of(json.loads((results.FOLDER / file).read_text())["rows"])) in text


def test_a_page_gets_the_tables_of_cuda_results_only(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\ntyped by hand\n{table.END}\nafter\n")
    on_cpu = RESULT | {"environment": {key: value for key, value in RESULT["environment"].items() if key != "cuda"}}
    (tmp_path / "speed-cpu.json").write_text(json.dumps(on_cpu))
    (tmp_path / "speed-cuda.json").write_text(json.dumps(RESULT))
    table.update(page, tmp_path)
    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n| run |") and text.endswith(f"{table.END}\nafter\n")
    assert text.count("| 2,500 | does not fit | 1,600 | 2,000 (+25.0%) |") == 1
    assert "gpt7b 64K; dropped for time: gpt7b 128K; ended from outside, no failures until then, 1 of 2 bars held" in text
    assert "(1 within noise); not measured: step (other / solution)" in text


def test_the_table_says_why_there_is_no_length():
    lengths = {
        "64K | 2.00": {},
        "≥ 64K (no time) | 2.00": {"ended_early": "no time left after 63 s"},
        "none | 2.00": {"longest": None},
        "broke | 2.00": {"longest": None, "ended_early": "exit 1: ValueError"},
    }
    capacity = {"verb": "capacity", "environment": RESULT["environment"], "rivals": [RIVAL | of for of in lengths.values()]}
    shown = [line.partition("alst | ")[2] for line in table.render([("c.json", capacity)]).splitlines() if "alst" in line]
    assert shown == [f"{cell} |" for cell in lengths]


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert table.main([str(other)]) == 2
    assert "no result" in capsys.readouterr().err
