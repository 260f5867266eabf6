"""speed, capacity, planner and the tables they make, tried on a CPU at tiny sizes."""

import contextlib
import json
import types
from dataclasses import replace

import pytest
import torch

from benchmarks import capacity, host, planner, results, speed, streams, table, timing
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
    assert (tmp_path / "streams-gpt7b-48.json").exists()
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
        (MemoError("host memory"), True),
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


def claims_of(**seconds):
    rows = {name.replace("_planned", ", planned"): {"median_s": s, "memory": {}} for name, s in seconds.items()}
    return {claim["claim"]: claim["held"] for claim in speed.claims({"length": 65536, "rivals": rows})}


def test_claims_hold_and_miss():
    good = claims_of(none=1.0, checkpoint=1.3, deepspeed=1.3, ds_memo_planned=1.0)
    assert good and all(good.values())
    bad = claims_of(none=1.0, checkpoint=1.1, deepspeed=1.1, ds_memo_planned=1.05)
    assert bad and not any(bad.values())


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


def test_a_machine_that_grows_is_used_until_it_is_large_enough():
    size, used = 8 * GIB, []

    def use(nbytes, grows=2):
        nonlocal size
        used.append(nbytes)
        size = min(64 * GIB, size + grows * nbytes)
        return range(nbytes)

    total, free = lambda: size, lambda: size - sum(used)
    assert host.grow(32 * GIB, total, free, use, wait=pytest.fail) >= 32 * GIB
    used.clear()
    assert host.grow(32 * GIB, total, free, use) == size and used == []  # large enough
    size, waited = 8 * GIB, []
    assert host.grow(32 * GIB, total, free, lambda n: use(n, grows=0), waited.append) == 8 * GIB  # it does not grow
    assert sum(used) <= 5 * GIB and sum(waited) <= 2 * host.PATIENCE_S


@pytest.mark.parametrize("limit", [100, 1000, 4097])
def test_the_search_ends_beside_the_limit(limit):
    search = capacity.Search(grain=8, start=64, most=1 << 20)
    tried = []
    for length in search.lengths():
        tried.append(length)
        search.learn(length, length <= limit)
    assert search.longest <= limit < search.shortest_that_fails
    assert search.shortest_that_fails - search.longest <= max(8, search.longest / 16)
    assert len(tried) == len(set(tried)) <= 16


def test_the_search_goes_down_when_the_first_length_does_not_fit():
    search = capacity.Search(grain=8, start=64, most=1 << 20)
    for length in search.lengths():
        search.learn(length, length <= 24)
    assert search.longest == 24
    nothing = capacity.Search(grain=8, start=64, most=1 << 20)
    for length in nothing.lengths():
        nothing.learn(length, False)
    assert nothing.longest == 0 and nothing.shortest_that_fails == 8


def test_checkpointing_trains_longer_than_nothing_in_the_same_bytes():
    shape = speed.shapes(CPU)["gpt7b"]
    budget = Budget(CPU, GIB, device_bytes=int(0.0008 * GIB))
    longest = {}
    for rival in ("none", "checkpoint"):
        probes = []
        capacity.search_here(shape, rival, budget, probes.append)
        longest[rival] = max(found["length"] for found in probes if found["fits"])
        assert any(not found["fits"] for found in probes)
    assert longest["checkpoint"] > 1.5 * longest["none"]


@pytest.mark.slow
def test_capacity_runs_each_rival_in_a_process(tmp_path):
    words = ["--device", "cpu", "--out", str(tmp_path), "--rivals", "none", "ds_memo", "--device-gib", "0.001"]
    assert capacity.main([*words, "--host-gibs", "0.1"]) == 0
    (path,) = tmp_path.glob("capacity-cpu-*.json")
    found = json.loads(path.read_text())
    assert [row["rival"] for row in found["rivals"]] == ["none", "ds_memo"]
    assert all(row["longest"] for row in found["rivals"])


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
            "rivals": {"none": {"median_s": 2.5}, "paper": {"out": "MemoError"}},
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
    assert "| gpt7b | 64K | 64 | 2,500 | out | 2,000 |" in text


def test_the_table_of_attention_kernels():
    kernels = {"cudnn": {"forward_tflops": 600.4, "backward_tflops": 500.0}, "flash": {"out": "RuntimeError: none"}}
    run = RESULT | {"attention": {"points": [{"length": 16384, "kernels": kernels, "picked": "cudnn"}]}}
    assert "| tokens | cudnn | flash |\n|---|---|---|\n| 16K | **600 / 500** | – |\n" in table.render([("speed-cuda.json", run)])


def test_a_search_that_was_cut_off_is_no_rival():
    def row(rival, longest, early=None):
        return {"rival": rival, "longest": longest, "host_bytes": GIB, "ended_early": early}

    ours = row("ds_memo, planned", 512)
    (claim,) = capacity.claims([ours, row("checkpoint", 1024), row("deepspeed", 64, "no time left after 9 s")])
    assert not claim["held"] and claim["value"] == 0.5
    assert capacity.claims([ours, row("checkpoint", 64, "no time left after 9 s")]) == []


def test_the_table_in_the_repository_is_up_to_date():
    text = table.README.read_text()
    assert table.render(table.load(results.FOLDER)) == text.split(table.BEGIN + "\n")[1].split(table.END)[0]


def test_a_file_that_is_no_result_is_refused(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert table.main([str(other)]) == 2
    assert "no result" in capsys.readouterr().err


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
