"""speed, planner and predictions, tried on a CPU at tiny sizes."""

import contextlib
import json
import tarfile
import types
from dataclasses import replace

import pytest
import torch

from benchmarks import planner, speed, streams, timing
from benchmarks.rivals import GIB, RIVALS, Budget
from benchmarks.streams import Span
from ds_memo.errors import MemoError

CPU = torch.device("cpu")


@pytest.mark.slow
def test_speed_measures_a_point_and_drops_what_the_time_does_not_hold(tmp_path):
    rivals = ["none", "checkpoint", "paper", "ds_memo, swapping"]
    words = ["--device", "cpu", "--workloads", "gpt7b", "--host-gib", "0.1", "--out", str(tmp_path), "--budget-s", "0.1"]
    assert speed.main([*words, "--no-attention", "--rivals", *rivals]) == 0
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    (point,) = found["points"]  # the first always runs
    assert [row["length"] for row in found["dropped"]] == [96]
    assert set(point["rivals"]) == set(rivals)
    for row in point["rivals"].values():
        assert len(row["samples_s"]) >= 4 and row["memory"]["device_peak"] > 0
    peak = {name: row["memory"]["device_peak"] for name, row in point["rivals"].items()}
    assert peak["checkpoint"] < peak["none"]
    assert point["gradients"]["failures"] == [] and 0 < point["gradients"]["bar"] < 1e-3
    assert point["streams"]["hidden_share"]["d2h"] is not None  # four of six layers went to the host
    archive = tmp_path / found["details"]
    assert sorted(tmp_path.iterdir()) == sorted([path, archive])
    with tarfile.open(archive) as details:
        assert "streams-gpt7b-48.json" in details.getnames()
        details.extract("streams-gpt7b-48.json", tmp_path, filter="data")
    assert streams.main([str(tmp_path / "streams-gpt7b-48.json")]) == 0
    assert found["environment"]["torch"] == torch.__version__


def test_a_rival_that_runs_out_of_memory_is_written_down(tmp_path):
    shape = speed.shapes(CPU)["gpt7b"]
    model = speed.build(shape, CPU, torch.float32)
    rivals = [RIVALS["none"], RIVALS["paper"]]
    point = speed.run_point(model, shape, 48, rivals, Budget(CPU, 4096), rate=1e9, compare=True, folder=tmp_path)
    assert "host memory" in point["rivals"]["paper"]["out"]
    assert "median_s" in point["rivals"]["none"]


def test_a_rival_that_breaks_takes_no_other_with_it(tmp_path):
    @contextlib.contextmanager
    def breaks(model, budget):
        raise ValueError("no such kernel")
        yield

    shape = speed.shapes(CPU)["gpt7b"]
    model = speed.build(shape, CPU, torch.float32)
    rivals = [replace(RIVALS["none"], name="broken", install=breaks), RIVALS["none"]]
    point = speed.run_point(model, shape, 48, rivals, Budget(CPU, 1 << 30), rate=1e9, compare=False, folder=tmp_path)
    assert point["failures"] == ["gpt7b 48: broken broke: ValueError: no such kernel"]
    assert "median_s" in point["rivals"]["none"] and "median_s" not in point["rivals"]["broken"]


@pytest.mark.parametrize(
    ("error", "so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # cudaHostAlloc
        (MemoError("host memory: frame 3 needs 2 GiB"), True),
        (MemoError("device memory: frame 3 needs a buffer of 2 GiB to come back"), True),
        (MemoError("frame 3 cannot go from 'away' to 'done'"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_not_fitting(error, so):
    assert timing.does_not_fit(error) is so


def test_wrong_gradients_are_a_failure():
    """The negative control of the harness: a rival that halves a gradient."""
    from benchmarks.rivals import Installed, Rival
    from benchmarks.timing import Trainer

    @contextlib.contextmanager
    def halves(model, budget):
        parameter = next(iter(model.parameters()))
        hook = parameter.register_hook(lambda grad: grad / 2)
        yield Installed()
        hook.remove()

    shape = speed.shapes(CPU)["gpt7b"]
    trainer = Trainer(speed.build(shape, CPU, torch.float32), speed.batch(shape, 48, CPU))
    found = speed.gradients(trainer, [Rival("halves", "", halves)], Budget(CPU, GIB), {"halves": {}})
    assert len(found["failures"]) == 1 and "halves" in found["failures"][0]


def claims_of(**rows):
    """Rows by name, with _ for what no keyword has: seconds of a step, or a row."""
    point = {}
    for name, row in rows.items():
        row = row if isinstance(row, dict) else {"median_s": row}
        point[name.replace("ds_memo_", "ds_memo, ")] = {"samples_s": [row["median_s"]] * 4, "memory": {}} | row
    return {claim["claim"]: claim for claim in speed.claims({"length": 65536, "rivals": point})}


def test_claims_hold_and_miss():
    good = claims_of(none=1.0, checkpoint=1.3, deepspeed=1.3, ds_memo_planned=1.0)
    assert good and all(claim["held"] for claim in good.values())
    bad = claims_of(none=1.0, checkpoint=1.0, deepspeed=1.1, ds_memo_planned=1.05)
    assert bad and not any(claim["held"] for claim in bad.values())


def test_no_checkpointing_is_no_rival_that_noise_could_let_win():
    """Where it fits, ds_memo runs the same code; what that may cost has a bar of its own."""
    found = claims_of(none=1.0, checkpoint=1.3, ds_memo_planned=1.01)
    assert found["step / no checkpointing"]["held"]
    assert found["step / best rival (checkpoint)"]["value"] == pytest.approx(1.01 / 1.3)
    assert not any("best rival" in name for name in claims_of(none=1.0, ds_memo_planned=1.01))


@pytest.mark.parametrize("noise, margin, held", [(0.0, 0.0, False), (0.01, 0.014, True), (0.2, speed.MOST_NOISE, True)])
def test_a_rival_that_is_faster_by_less_than_noise(noise, margin, held):
    samples = [1.0 - noise / 2] * 2 + [1.0 + noise / 2] * 2
    rows = {"checkpoint": samples, "ds_memo_planned": [1.01 * s for s in samples]}
    found = claims_of(**{name: {"median_s": sum(row) / 4, "samples_s": row} for name, row in rows.items()})
    claim = found["step / best rival (checkpoint)"]
    assert claim["value"] == pytest.approx(1.01) and claim["bar"] == 1.0
    assert claim["margin"] == pytest.approx(margin, abs=1e-3) and claim["held"] is held


def with_plan(arena, reserved, unplanned=10 * GIB, calls=0):
    memory = {"cuda_mallocs_per_step": calls, "cuda_frees_per_step": 0, "unplanned_peak": unplanned}
    memory |= {"device_peak": reserved, "device_reserved_peak": reserved}
    return {"median_s": 1.0, "memory": memory, "report": {"plan": {"arena": arena}}}


def test_planned_addresses_are_claimed_only_where_there_is_a_plan():
    plain = with_plan(arena=0, reserved=20 * GIB)
    assert not any("cudaMalloc" in name or "reserved" in name for name in claims_of(ds_memo_planned=plain))
    found = claims_of(ds_memo_planned=plain, ds_memo_swapping=with_plan(arena=5 * GIB, reserved=10.1 * GIB))
    assert found["cudaMalloc and cudaFree a step, ds_memo, swapping"]["held"]
    assert found["reserved / requested without a plan, ds_memo, swapping"]["held"]


def test_an_arena_that_is_too_large_misses():
    """What is requested with a plan has the arena in it."""
    (claim,) = (
        c for n, c in claims_of(ds_memo_planned=1.0, ds_memo_swapping=with_plan(10 * GIB, 15 * GIB)).items() if "reserved" in n
    )
    assert claim["value"] == 1.5 and not claim["held"]
    report = {"plan": {"arena": 5}, "alpha": 0.5, "residents": [4, 5]}
    planned = {"cuda_mallocs_per_step": 0, "cuda_frees_per_step": 0, "device_reserved_peak": 15.0, "device_peak": 15.0}
    native = {"device_peak": 10.0, "report": report}
    calls, over = planner.claims({"native": native, "planned": planned | {"report": report}}, "here")
    assert calls["held"] and over["value"] == 1.5 and not over["held"]
    other = native | {"report": report | {"residents": [3, 4, 5]}}
    assert len(planner.claims({"native": other, "planned": planned | {"report": report}}, "here")) == 1


class Reports:
    """A rival that reports one setting after the other, the last one for ever."""

    def __init__(self, *changes):
        self.changes, self.steps = changes, 0

    def report(self):
        changes = self.changes[: self.steps + 1]
        return {"alpha": 1.0, "profile": {"changes": [c for c in changes if c]}, "stall_s": {"d2h": 0.0}, "plan": None}

    def take(self):
        self.steps += 1
        return [float(self.steps)]


def test_samples_of_a_setting_that_changed_are_dropped():
    rival = Reports(None, "alpha lowered")
    block = timing.timed(rival, CPU, rival.take, warm_up=rival.take)
    assert block.samples_s == [3.0] and block.dropped_s == [1.0] and block.settled
    rival = Reports(*range(1, 9))
    block = timing.timed(rival, CPU, rival.take, warm_up=rival.take)
    assert block.samples_s == [5.0] and block.dropped_s == [1.0, 3.0] and not block.settled


def test_a_point_says_what_was_dropped(tmp_path):
    rival = Reports(None, None, None, "alpha lowered")

    @contextlib.contextmanager
    def install(model, budget):
        @contextlib.contextmanager
        def around():
            yield
            rival.steps += 1

        yield speed.Installed(around=around, report=rival.report)

    shape = speed.shapes(CPU)["gpt7b"]
    model = speed.build(shape, CPU, torch.float32)
    changing = replace(RIVALS["none"], name="changing", install=install)
    point = speed.run_point(model, shape, 48, [changing], Budget(CPU, 1 << 30), rate=1e9, compare=False, folder=tmp_path)
    row = point["rivals"]["changing"]
    turns, steps = speed.visits(speed.step_flops(shape, 48) / 1e9)
    assert len(row["dropped_s"]) == steps and len(row["samples_s"]) == turns * steps and "unsettled" not in row


def test_a_point_whose_time_is_over_keeps_what_it_has(tmp_path, monkeypatch):
    """Ours and what it is compared with have their turn first; a turn that would end too late does not begin."""
    clock, order = 0.0, []
    monkeypatch.setattr(speed, "time", types.SimpleNamespace(perf_counter=lambda: clock))

    def rival(name, takes_s):
        @contextlib.contextmanager
        def install(model, budget):
            nonlocal clock
            order.append(name)
            yield speed.Installed()
            clock += takes_s

        return replace(RIVALS["none"], name=name, install=install)

    rivals = [rival("paper", 1), rival("save_on_cpu", 90), rival("none", 1), rival("last", 1), rival("hf_offload", 10)]
    shape, budget = speed.shapes(CPU)["gpt7b"], Budget(CPU, 1 << 30)
    model = speed.build(shape, CPU, torch.float32)
    point = speed.run_point(model, shape, 48, rivals, budget, rate=1e9, compare=False, folder=tmp_path, until=101)
    assert order == ["none", "hf_offload", "paper", "save_on_cpu"]
    rows = point["rivals"]
    assert rows["last"]["out"] == "not tried: no time left" and "median_s" not in rows["last"]
    assert all("median_s" in rows[name] for name in order) and point["failures"] == []
    order.clear()
    clock = 0.0
    point = speed.run_point(model, shape, 48, rivals[:4:2], budget, rate=1e9, compare=False, folder=tmp_path, until=2.5)
    assert order == ["none", "paper"]  # a second turn of either would end at 3


def test_a_part_that_breaks_takes_no_rival_with_it(tmp_path, monkeypatch):
    shape = speed.shapes(CPU)["gpt7b"]
    model = speed.build(shape, CPU, torch.float32)
    monkeypatch.setattr(speed, "gradients", lambda *args: 1 / 0)
    point = speed.run_point(model, shape, 48, [RIVALS["none"]], Budget(CPU, 1 << 30), rate=1e9, compare=True, folder=tmp_path)
    assert point["failures"] == ["gpt7b 48: gradients: ZeroDivisionError: division by zero"]
    assert "median_s" in point["rivals"]["none"]


@pytest.mark.slow
def test_planner_runs_each_way_in_a_process(tmp_path):
    assert planner.main(["--device", "cpu", "--out", str(tmp_path), "--host-gib", "0.1", "--workloads", "gpt7b"]) == 0
    (path,) = tmp_path.glob("planner-cpu-*.json")
    found = json.loads(path.read_text())
    assert [run["kind"] for run in found["runs"]] == ["fixed length", "three lengths"]
    assert all(run["ways"]["planned"]["hits"] for run in found["runs"])


def test_streams_say_what_is_hidden():
    spans = [Span("compute", 0, 4), Span("compute", 3, 6), Span("compute", 8, 10), Span("d2h", 1, 3), Span("h2d", 5, 9)]
    found = streams.analyse(spans)
    assert found["span_s"] == 10 and found["compute_share"] == 0.8
    assert found["hidden_share"] == {"d2h": 1.0, "h2d": 0.5}


def test_streams_of_a_cuda_trace():
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 4},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
    ]
    assert [span.stream for span in streams.spans_of(events)] == ["compute", "d2h", "h2d"]


@pytest.mark.parametrize("workload, length", [("gpt7b", 96), ("ulysses8", 192)])
def test_the_prediction_comes_from_the_solver_and_from_the_estimator(workload, length, tmp_path):
    shape = speed.shapes(CPU)[workload]
    trainer = speed.Trainer(speed.build(shape, CPU, torch.float32), speed.batch(shape, length, CPU))
    found = speed.predict(trainer, shape, length, Budget(CPU, GIB, cache_dir=str(tmp_path)), tmp_path, hardware="h200")
    assert found["solver"]["layers_s"] > 0
    assert "why" not in found, found
    assert found["step_s"] > 0 and found["estimate"]["status"] == "ok"
    assert (tmp_path / f"profile-{workload}-{length}.json").exists()
    assert found["estimate"]["layout"]["sp"] == shape.ranks


def test_the_solver_is_asked_when_its_answer_stays(tmp_path, monkeypatch):
    """The first step holds back half of the device."""
    answers, steps = [(0.0, 2), (0.5, 3), (0.5, 3), (1.0, 4)], []

    @contextlib.contextmanager
    def install(model, budget):
        def report():
            alpha, residents = answers[len(steps) - 1]
            return {"alpha": alpha, "resident_layers": residents, "residents": [*range(residents)]} | dict.fromkeys(
                ("binding", "predicted")
            )

        yield speed.Installed(report=report, profile=lambda: types.SimpleNamespace(to_json=lambda: "{}"))

    monkeypatch.setitem(RIVALS, "ds_memo", replace(RIVALS["none"], name="ds_memo", install=install))
    shape = speed.shapes(CPU)["gpt7b"]
    trainer = types.SimpleNamespace(model=None, step=steps.append)
    found = speed.predict(trainer, shape, 48, Budget(CPU, GIB), tmp_path, hardware=None)
    assert found["alpha"] == 0.5 and found["resident_layers"] == 3 and found["steps_until_settled"] == len(steps) == 3
