"""`benchmarks.overhead`: which rows it has, how it judges them, and a turn of each on a CPU and over the emulator. No times."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import overhead
from benchmarks.overhead import SAMPLES, VARIANTS, Variant
from tests.benchmarks.emulated import needs_emulator, no_emulated_process_hangs  # noqa: F401
from tests.ops.compiling import lacks

CPU = torch.device("cpu")


def test_variants_come_with_those_that_they_are_divided_by() -> None:
    assert list(overhead.chosen(["resident"])) == ["checkpoint", "resident"]
    assert list(overhead.chosen(["a tile of 512"])) == ["checkpoint, 512 tokens", "a tile of 512"]
    both = overhead.chosen(["stock", "alpha 0"], python_too=True)
    assert list(both) == ["stock", "checkpoint", "alpha 0", "alpha 0, in Python"]
    assert both["alpha 0"].bar == overhead.SWAPPED_BAR and both["alpha 0, in Python"].bar is None


def test_what_is_divided_has_as_many_tokens() -> None:
    for variant in VARIANTS.values():
        base = VARIANTS[variant.base]
        assert base.checkpoint and (base.tokens, base.batches) == (variant.tokens, (1,))
        assert (variant.bar is None) == (variant.memo is None)


def test_a_tile_is_what_each_further_sequence_adds() -> None:
    few, many = [(10.0, 20.0), (11.0, 20.0), (90.0, 20.0)], [(16.0, 28.0), (17.0, 28.0), (18.0, 28.0)]
    whole = overhead.times(Variant(), [few])
    assert whole == {"forward": [11.0, 10.0], "backward": [20.0, 20.0], "both": [31.0, 30.0]}
    tile = overhead.times(Variant(batches=(2, 4)), [few, many])
    assert tile == {"forward": [3.0, 3.0], "backward": [4.0, 4.0], "both": [7.0, 7.0]}


@pytest.mark.parametrize("us, over", [(105.0, False), (106.0, True)])
def test_a_row_over_its_bar_is_judged_so(us: float, over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "turn", lambda model, variant, device: ([[(0.0, us if variant.memo else 100.0)]], {}))
    rows = overhead.measure("llama", overhead.chosen(["stock", "resident"]), CPU, turns=2)
    assert {name: row["over"] for name, row in rows.items()} == {"stock": False, "checkpoint": False, "resident": over}
    verdicts = [line.split(" | ")[6] for line in overhead.table(rows)[2:]]
    assert verdicts == ["", "", "OVER" if over else "ok"]


def test_a_variant_that_was_not_trained_as_it_says_is_refused() -> None:
    model = overhead.build("llama")
    swapped = {"alpha": 0.5, "resident_layers": 0}
    with pytest.raises(AssertionError, match="whole"):
        overhead.turn(model, Variant(swapped, batches=(1, 2)), CPU)


@pytest.mark.skipif(bool(lacks()), reason=str(lacks()))
def test_the_way_that_record_and_replay_went_is_counted() -> None:
    model, resident = overhead.build("llama"), VARIANTS["resident"]
    _, way = overhead.turn(model, resident, CPU)
    assert way["way"] == "C++" and way["ops_in_cpp"] > 10 and way["ops_in_cpp"] > 10 * way["ops_in_python"]
    _, way = overhead.turn(model, replace(resident, in_python=True), CPU)
    assert way["way"] == "Python" and "ops_in_cpp" not in way


def judged(arguments: list[str], out: Path) -> dict[str, Any]:
    """Return the models' rows of a run whose exit status is that of its rows."""
    status = overhead.main([*arguments, "--rounds", "1", "-o", str(out)])
    found = json.loads(out.read_text())
    assert status == any(row["over"] for rows in found["models"].values() for row in rows.values())
    for rows in found["models"].values():
        for name, row in rows.items():
            assert [len(batch) for batch in row["samples_us"]] == [SAMPLES] * len(VARIANTS[name].batches)
            assert len(row["us"]) == 3 and row["ratio"] > 0
    return found


@pytest.mark.processes  # git, for the commit
def test_a_turn_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    found = judged(["--device", "cpu", "--models", "gpt-neox", "--variants", "resident", "alpha 1"], tmp_path / "cpu.json")
    assert list(found["models"]["gpt-neox"]) == ["checkpoint", "resident", "alpha 1"] and not found["emulated"]
    assert "gpt-neox, µs per layer and pass:" in capsys.readouterr().out
    assert torch.get_num_threads() == threads and gc.isenabled()


@pytest.mark.slow
@pytest.mark.processes
def test_a_turn_of_every_variant_on_a_cpu(tmp_path: Path) -> None:
    found = judged(["--device", "cpu", "--models", "qwen3-moe"], tmp_path / "cpu.json")
    assert list(found["models"]["qwen3-moe"]) == list(VARIANTS)


@needs_emulator
def test_a_turn_over_the_emulator(tmp_path: Path) -> None:
    found = judged(["--emulated", "--models", "qwen3-moe", "--variants", "alpha 0.5", "a tile of 512"], tmp_path / "cuda.json")
    rows = found["models"]["qwen3-moe"]
    assert list(rows) == ["checkpoint", "alpha 0.5", "checkpoint, 512 tokens", "a tile of 512"]
    assert found["emulated"] and found["environment"]["cuda"]
