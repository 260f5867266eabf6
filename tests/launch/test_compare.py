"""compare.py: equal runs pass, different ones fail."""

import json

import pytest
from compare import differences, main, table

from tests.launch.launcher import REPO

REPORT = {
    "alpha": 0.5,
    "resident_layers": 2,
    "bytes_to_host": 3 * 2**20,
    "gemm_flops_recomputed_fraction": 1 / 3,
    "attention_recomputed": 0,
    "plan": {"hits": 99, "misses": {"native": 1}, "arena": 2**21, "lower_bound": 2**20},
}


def run(losses, peak=2**20, report=None, dtype="float32"):
    steps = [{"step": i + 1, "loss": loss, "peak_live_bytes": peak} for i, loss in enumerate(losses)]
    return {"memo": report is not None, "steps": steps, "report": report, "dtype": dtype}


def test_the_table_shows_every_number():
    text = table(run([5.5, 4.25], 2**20, REPORT), run([5.5, 4.25], 4 * 2**20))
    for word in ("5.500000", "4.250000", "1.0 MiB", "without memo 4.0 MiB: 25%", "3.0 MiB", "alpha 0.5", "33.3%"):
        assert word in text
    assert text.splitlines()[-2].split()[:3] == ["attention", "recomputed", "0"]
    assert "99.0%" in text.splitlines()[-1] and "arena 2.0 MiB, lower bound 1.0 MiB" in text.splitlines()[-1]


def test_differences():
    assert differences(run([2.0, 1.0]), run([2.0, 1.5])) == pytest.approx([0, 1 / 3])
    assert differences(run([float("nan")]), run([float("nan")])) == [float("inf")]
    with pytest.raises(ValueError, match="not of the same steps"):
        differences(run([1.0]), run([1.0, 2.0]))
    with pytest.raises(ValueError, match="not of the same steps"):
        differences(run([]), run([]))


def compare(monkeypatch, *files):
    monkeypatch.setattr("sys.argv", ["compare.py", *map(str, files)])
    return main()


@pytest.mark.parametrize(
    ("dtype", "loss", "code"),
    [("float32", 2.00001, 0), ("float32", 2.001, 1), ("float32", float("nan"), 1), ("bfloat16", 2.001, 0)],
)
def test_the_exit_code(tmp_path, monkeypatch, capsys, dtype, loss, code):
    (tmp_path / "memo.json").write_text(json.dumps(run([loss], report=REPORT, dtype=dtype)))
    (tmp_path / "plain.json").write_text(json.dumps(run([2.0], dtype=dtype)))
    assert compare(monkeypatch, tmp_path / "memo.json", tmp_path / "plain.json") == code
    assert ("DIFFERENT" in capsys.readouterr().out) == bool(code)


def test_what_cannot_be_compared(tmp_path, monkeypatch, capsys):
    memo, plain = tmp_path / "memo.json", tmp_path / "plain.json"
    memo.write_text(json.dumps(run([2.0], report=REPORT)))
    plain.write_text(json.dumps(run([2.0])))
    for first, second, why in (
        (plain, memo, "run with memo"),
        (memo, tmp_path / "no.json", "No such file"),
        (memo, memo, "without"),
        (REPO / "ds_configs" / "quickstart.json", plain, "not what train.py"),
    ):
        with pytest.raises(SystemExit) as end:
            compare(monkeypatch, first, second)
        said = capsys.readouterr().err
        assert end.value.code == 2 and why in said and said.count("\n") == 1, said
