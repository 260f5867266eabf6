import json
import os
import re
import threading
from pathlib import Path

import pytest

from ds_memo.plan import read_plan
from tests.command import call, complaint
from tests.plan.instances import GAP, TRACES
from tests.processes import python

TRACE = str(TRACES[0])


def test_plans_a_trace(capsys, tmp_path):
    code, out, _ = call(capsys, "plan", TRACE, "-o", tmp_path / "plan.json")
    assert code == 0
    plan = read_plan(tmp_path / "plan.json")
    last = next(line for line in out.splitlines() if line.startswith("all"))
    assert re.split(r" {2,}", last)[1:5] == [str(len(plan.slots)), f"{plan.peak:,}", f"{plan.lower_bound:,}", "1.0000"]
    assert all(any(line.startswith(p.name) for line in out.splitlines()) for p in plan.phases)


def test_prints_json(capsys):
    code, out, _ = call(capsys, "plan", TRACE, "--json", "--solver", "greedy")
    data = json.loads(out)
    assert code == 0 and data["peak"] == data["lower_bound"] and data["proven"] is True
    assert {"name", "peak", "lower_bound", "proven", "seconds"} <= set(data["phases"][0])


@pytest.mark.parametrize(
    "text, words",
    [("malloc 1 -5\n", "t.txt:1: read -5"), (f"malloc 1 {2**63 - 1}\nmalloc 2 {2**63 - 1}\n", "less than 2^62")],
)
def test_bad_input_is_exit_code_2(capsys, tmp_path, text, words):
    """Tests of the messages are in test_formats.py."""
    (tmp_path / "t.txt").write_text(text)
    assert words in complaint(capsys, "plan", tmp_path / "t.txt")


def test_a_capacity_below_the_lower_bound_is_exit_code_1(capsys):
    code, out, err = call(capsys, "plan", TRACE, "--capacity", 1000)
    assert code == 1 and not out
    assert err.startswith("ds-memo plan: capacity 1000 is below the lower bound ") and err.count("\n") == 1


def test_nothing_found_is_exit_code_1(capsys, tmp_path):
    """No placement reaches the lower bound of this trace."""
    events = sorted([(b.lifespan.upper, 0, b) for b in GAP.buffers] + [(b.lifespan.lower, 1, b) for b in GAP.buffers])
    lines = [f"malloc {b.id} {b.size * 512}\n" if birth else f"free {b.id}\n" for _, birth, b in events]
    (tmp_path / "t.txt").write_text("".join(lines))
    code, _, err = call(capsys, "plan", tmp_path / "t.txt", "--capacity", 10 * 512, "--solver", "greedy")
    assert code == 1 and f"no plan of {10 * 512} bytes found; the best has {11 * 512}" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (("plan", TRACE, "-o", TRACE), "is the input, too"),
        (("plan", "/nonexistent"), "No such file"),
        (("plan", TRACE, "--time-limit", "0"), "above 0"),
        (("plan", TRACE, "-o", "/nonexistent/plan.json"), "cannot write"),
        (("show", TRACE), "a plan as JSON"),
        (("show", "plan.json", "-o", "plan.bmp"), "expected a name that ends in .png or .html"),
        (("plan", TRACE, "--time-limit", "nan"), "'nan', expected seconds above 0"),
        (("plan",), "required: INPUT"),
    ],
)
def test_wrong_use_is_exit_code_2(capsys, words, message):
    assert message in complaint(capsys, *words)


@pytest.mark.processes
def test_planning_imports_neither_torch_nor_a_solver():
    code = (
        "import sys, ds_memo.plan; from ds_memo.cli import main as cli\n"
        f"assert cli.main(['plan', {TRACE!r}, '--json']) == 0\n"
        "print(sorted(m for m in ('torch', 'deepspeed', 'mip', 'highspy', 'matplotlib', 'plotly') if m in sys.modules))"
    )
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_the_output_is_stays_what_it_is(capsys, tmp_path, what):
    """As root, -o /dev/null would have replaced the device by a file."""
    place, target = tmp_path / "out", tmp_path / "plan.json"
    if what == "pipe":
        os.mkfifo(place)
        reader = threading.Thread(target=lambda: target.write_text(place.read_text()))
        reader.start()
    elif what == "folder":
        place.mkdir()
    else:
        place = Path("/dev/null")
    before = place.lstat().st_mode
    code, _, _ = call(capsys, "plan", TRACE, "-o", place)
    assert place.lstat().st_mode == before and code == (2 if what == "folder" else 0)
    if what == "pipe":
        reader.join()
        assert read_plan(target).slots
    assert sorted(tmp_path.iterdir()) == sorted(path for path in (tmp_path / "out", target) if path.exists())
