"""A missing package is named before anything is timed."""

import sys

import pytest
import torch

from benchmarks import preflight
from ds_memo.ops.builder import AllocatorBuilder

CPU = torch.device("cpu")


def test_nothing_is_missing_here():
    assert preflight.missing(CPU) is None


@pytest.fixture
def ran(monkeypatch):
    """Record what would have run as a verb."""
    verbs = []
    monkeypatch.setattr(preflight.runpy, "run_module", lambda module, **how: verbs.append((module, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["preflight"])
    return verbs


@pytest.mark.parametrize("name", preflight.NEEDED)
def test_a_package_that_is_not_there_ends_a_verb_with_a_line(name, ran, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    assert preflight.main("speed", ["--device", "cpu"]) == 2 and ran == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"speed: {name} cannot be imported: ModuleNotFoundError")


def test_an_op_that_cannot_be_built_ends_a_verb_with_a_line(ran, monkeypatch, capsys):
    def load(builder):
        raise RuntimeError("memo_allocator_cpu cannot be compiled: no ninja (pip install ninja);\n no C++ compiler")

    monkeypatch.setattr(AllocatorBuilder, "load", load)
    assert preflight.main("planner", ["--device=cpu"]) == 2 and ran == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("planner: the allocator op cannot be built: memo_allocator_cpu") and "no ninja" in line


def test_where_nothing_is_missing_the_verb_runs(ran):
    words = ["--workloads", "gpt7b", "--device", "cpu"]
    preflight.main("speed", words)
    assert ran == [("benchmarks.speed", words)]


def test_a_rehearsal_looks_for_no_device_before_it_has_the_emulator(ran, monkeypatch):
    monkeypatch.setattr(preflight, "missing", lambda device: f"no {device}")
    preflight.main("first", ["--device", "emulator"])
    assert ran == [("benchmarks.first", ["--device", "emulator"])]
    assert preflight.main("first", ["--device", "cuda"]) == 2


def test_sources_are_compiled_once_before_a_verb_runs(ran, monkeypatch):
    folders = []
    monkeypatch.setattr(preflight.compileall, "compile_dir", lambda folder, **how: folders.append(folder.name))
    preflight.main("check", ["--device", "cpu"])
    assert folders == ["ds_memo", "benchmarks", "tests"] and len(ran) == 1


def test_help_needs_no_device(ran):
    preflight.main("capacity", ["--help"])
    assert ran == [("benchmarks.capacity", ["--help"])]
