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


def test_a_package_that_is_not_there_ends_a_verb_with_a_line(ran, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it raises
    assert preflight.main("speed", ["--device", "cpu"]) == 2 and ran == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("speed: deepspeed cannot be imported: ModuleNotFoundError")


def test_an_op_that_cannot_be_built_ends_a_verb_with_a_line(ran, monkeypatch, capsys):
    def load(builder):
        raise RuntimeError("memo_allocator_cpu cannot be compiled: no ninja (pip install ninja);\n no C++ compiler")

    monkeypatch.setattr(AllocatorBuilder, "load", load)
    assert preflight.main("planner", ["--device=cpu"]) == 2 and ran == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("planner: the allocator op cannot be built: memo_allocator_cpu") and "no ninja" in line


def test_a_rehearsal_looks_for_no_device_before_it_has_the_emulator(ran, monkeypatch):
    monkeypatch.setattr(preflight, "missing", lambda device: f"no {device}")
    preflight.main("first", ["--device", "emulator"])
    assert ran == [("benchmarks.first", ["--device", "emulator"])]
    assert preflight.main("first", ["--device", "cuda"]) == 2


@pytest.mark.parametrize("words", [["--workloads", "gpt7b", "--device", "cpu"], ["--help"]], ids=" ".join)
def test_sources_are_compiled_once_before_a_verb_runs(words, ran, monkeypatch):
    folders = []
    monkeypatch.setattr(preflight.compileall, "compile_dir", lambda folder, **how: folders.append(folder.name))
    preflight.main("check", words)
    assert folders == ["ds_memo", "benchmarks", "tests"] and ran == [("benchmarks.check", words)]
