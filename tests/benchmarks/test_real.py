"""The comparison with real runs, on a result of this machine and on a constructed one."""

import json
from dataclasses import replace

from benchmarks import real
from ds_memo.estimate import hardware

RESULT = json.loads((real.ROOT / "benchmarks" / "results" / "check-cpu.json").read_text())


def test_stored_bytes_of_a_real_run():
    rows = list(real.stored_bytes(RESULT))
    assert len(rows) >= 8
    for row in rows:
        assert abs(row.error) <= row.bar, row


def test_a_cpu_is_not_predicted():
    assert real.machine_of(RESULT) is None


def on_a_gpu() -> dict:
    result = json.loads(json.dumps(RESULT))
    result["environment"]["device"] = "NVIDIA H200"
    result["link"]["gb_per_s"] = {"d2h": 50.0, "h2d": 55.0, "both": 90.0}
    result["step"] |= {"hidden": 4096, "tokens": 32768, "layers": 4}
    return result


def test_the_link_is_the_results():
    assert real.machine_of(on_a_gpu()) == replace(hardware.load("h200"), d2h=50e9, h2d=55e9)


def test_steps_are_compared_with_their_medians(tmp_path, capsys):
    result = on_a_gpu()
    rows = list(real.step_times(result, real.machine_of(result)))
    assert [row.what.split(", ")[1] for row in rows] == list(result["step"]["samples_s"])
    want = {row.what.split(", ")[1]: row.predicted for row in rows}
    assert want["no checkpointing"] < want["alpha 1"] <= want["alpha 0.5"] <= want["alpha 0"] < want["torch checkpoint"]
    result["step"]["samples_s"] = {name: [1.04e-3 * ms] * 3 for name, ms in want.items()}
    path = tmp_path / "check-h200.json"
    path.write_text(json.dumps(result))
    assert real.compare(path)
    result["step"]["samples_s"]["alpha 0"] = [1.07e-3 * want["alpha 0"]] * 3
    path.write_text(json.dumps(result))
    assert not real.compare(path)
    assert capsys.readouterr().out.count("MISSED") == 1
