"""One point of `speed`, its bars and predictions, tried on a CPU at tiny sizes."""

import contextlib
import json

import pytest
import torch

from benchmarks import point, predict, speed, streams, timing
from benchmarks.rivals import RIVALS, Budget, Installed, Rival
from benchmarks.streams import Span
from benchmarks.timing import Trainer
from benchmarks.workloads import batch, build, shapes
from ds_memo.errors import MemoError
from ds_memo.units import GIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = shapes(CPU)["gpt7b"]


def run_point(rivals, budget=None, **more):
    """Run a point of the small GPT at 48 tokens, all in this process."""
    return point.run_point("gpt7b", 48, rivals, budget or Budget(CPU, GIB), steps=2, take=point.take_turn, **more)


def test_what_fails_takes_no_rival_with_it(monkeypatch):
    """One that breaks, one that runs out of memory, and a part beside the rivals."""

    @contextlib.contextmanager
    def breaks(model, budget, error):
        raise error
        yield

    monkeypatch.setattr(point, "predict", lambda *args: 1 / 0)
    broken = Rival("broken", breaks, {"error": ValueError("no such kernel")})
    full = Rival("full", breaks, {"error": torch.OutOfMemoryError("CUDA out of memory")})
    found = run_point([broken, full, RIVALS["none"], Rival("ds_memo", breaks, {"error": ValueError("no such kernel")})])
    rows = found["rivals"]
    assert found["failures"] == [
        "gpt7b 48: broken broke: ValueError: no such kernel",
        "gpt7b 48: predicted: ZeroDivisionError: division by zero",
        "gpt7b 48: ds_memo broke: ValueError: no such kernel",
    ]
    assert "out of memory" in rows["full"]["out"] and [name for name in rows if "median_s" in rows[name]] == ["none"]


@pytest.mark.parametrize(
    ("error", "so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # cudaHostAlloc
        (MemoError("host memory: frame 3 needs 2 GiB"), True),
        (MemoError("device memory: frame 3 needs a buffer of 2 GiB to come back"), True),
        (MemoError("frame 3 cannot go from 'away' to 'done'"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_what_counts_as_not_fitting(error, so):
    assert timing.does_not_fit(error) is so


@pytest.mark.parametrize("factor, failures", [(1.0, 0), (0.5, 1)])
def test_wrong_gradients_are_a_failure(factor, failures):
    """The negative control of the harness: a rival that halves all gradients."""

    @contextlib.contextmanager
    def scales(model, budget):
        hooks = [parameter.register_hook(lambda grad: factor * grad) for parameter in model.parameters()]
        yield Installed()
        for hook in hooks:
            hook.remove()

    found = run_point([RIVALS["none"], RIVALS["checkpoint"], Rival("scales", scales)])
    assert len(found["failures"]) == failures and all("scales" in failure for failure in found["failures"])


@pytest.mark.parametrize("changes, dropped", [(1, 2), (99, 4)])
def test_samples_of_a_setting_that_changed_are_dropped(changes, dropped):
    """Once, and in every block of samples."""
    reports = iter(range(2 * changes))

    @contextlib.contextmanager
    def install(model, budget):
        yield Installed(report=lambda: {"alpha": next(reports, None)})

    (row,) = run_point([Rival("restless", install)])["rivals"].values()
    assert len(row["samples_s"]) == 2 and len(row["dropped_s"]) == dropped and row.get("unsettled", False) is (dropped == 4)


def test_rivals_are_warmed_up_alike_and_every_other_turn_goes_backwards():
    """On a card that is held to a power limit the first one would have a cool card every time."""
    order, steps = [], {}

    def counting(name):
        @contextlib.contextmanager
        def install(model, budget):
            order.append(name)

            @contextlib.contextmanager
            def around():
                steps[name] = steps.get(name, 0) + 1
                yield

            yield Installed(around=around)

        return Rival(name, install)

    found = run_point([counting(name) for name in ("alst", "checkpoint", "none")], turns=3)
    there = ["none", "checkpoint", "alst"]
    assert order == [*there, *there[::-1], *there]
    assert set(steps.values()) == {3 * (point.WARM_UP + 2) + 2}  # and one whose memory is counted, one whose gradients are
    assert all(len(row["samples_s"]) == 6 for row in found["rivals"].values())


def test_streams_of_a_cuda_trace():
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 4},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
    ]
    assert [span.stream for span in streams.spans_of(events)] == ["compute", "d2h", "h2d"]
    spans = [Span("compute", 0, 4), Span("compute", 3, 6), Span("compute", 8, 10), Span("d2h", 1, 3), Span("h2d", 5, 9)]
    found = streams.analyse(spans)
    assert found["span_s"] == 10 and found["compute_share"] == 0.8
    assert found["hidden_share"] == {"d2h": 1.0, "h2d": 0.5}


@pytest.mark.processes
def test_the_prediction_keeps_to_the_device_budget(tmp_path):
    """The estimator is told what the solver had, and says what it says."""
    trainer = Trainer(build(SHAPE, CPU), batch(SHAPE, 96, CPU))
    said = [
        predict.predict(trainer, 96, Budget(CPU, GIB, nbytes, cache_dir=str(tmp_path)), hardware="h200")
        for nbytes in (500_000, GIB)
    ]
    for found in said:
        assert "why" not in found and found["estimate"]["status"] == "ok"
        assert found["estimate"]["resident_layers"] == found["resident_layers"]
        assert found["estimate"]["alpha"] == pytest.approx(found["alpha"], abs=1e-3)
        assert found["step_s"] == pytest.approx(found["solver"]["layers_s"], rel=0.3)  # an optimizer beside tiny layers
    assert [found["estimate"]["binding"].startswith("everything fits") for found in said] == [False, True]


@pytest.mark.processes
def test_a_process_that_dies_takes_its_rival_alone():
    take = point.take_in_child("benchmarks.no_such_module")
    died = Rival("died", None)
    alone = lambda rival, *asked: (take if rival is died else point.take_turn)(rival, *asked)  # noqa: E731
    found = point.run_point("gpt7b", 48, [RIVALS["none"], died], Budget(CPU, GIB), turns=2, steps=2, take=alone)
    assert len(found["rivals"]["none"]["samples_s"]) == 4 and "median_s" not in found["rivals"]["died"]
    (failure,) = found["failures"]
    assert failure.startswith("gpt7b 48: died: exit 1: ") and "no_such_module" in failure


# ---- whole runs


@pytest.mark.slow
def test_speed_measures_a_point(tmp_path):
    rivals = ["none", "checkpoint", "ds_memo, planned"]
    words = ["--device", "cpu", "--workloads", "gpt7b", "--lengths", "48", "--host-gib", "0.1", "--out", str(tmp_path)]
    assert speed.main([*words, "--rivals", *rivals]) == 0
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    (only,) = found["points"]
    assert "unfinished" not in found
    assert set(only["rivals"]) == set(rivals)
    peak = {name: row["memory"]["device_peak"] for name, row in only["rivals"].items()}
    assert peak["checkpoint"] < peak["none"]
    assert only["failures"] == [] and all(row["gradient_norm"] > 0 for row in only["rivals"].values())
    assert found["environment"]["torch"] == torch.__version__
