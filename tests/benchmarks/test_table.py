"""The tables of docs/benchmarks.md: what the JSON files say, and nothing typed by hand."""

import json

from benchmarks import longest, results, table

RESULT = {
    "verb": "speed",
    "environment": {"time": "2030-01-01T00:00:00+00:00", "device": "H", "torch": "2", "commit": "abcdef123456", "cuda": "13"},
    "points": [
        {
            "workload": "gpt7b",
            "length": 65536,
        }
    ],
    "failures": [],
    "unfinished": True,
}


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
    assert text.count("(../benchmarks/results/speed-cuda.json)") == 1 and "speed-cpu" not in text
    assert "gpt7b 64K; ended from outside, no failures until then" in text
