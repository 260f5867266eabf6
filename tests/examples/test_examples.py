"""Each script in examples/ runs by the command that its docstring begins with, learns, and ends with the report."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import _get_build_directory

from tests.processes import ROOT, finished

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EVERYDAY = ("attach",)
TIMEOUT_S = 280
STORED_MIB = {"deepspeed_loop": 7.031, "sequence": 3.516, "mesh": 3.516}
"""A layer stores as much, at one length: two ranks hold half a sequence each."""
REPORT = re.compile(r"^ds_memo +active: .*^over the link +(\S+) [KMGT]iB to the host, (\S+) [KMGT]iB back$", re.M | re.S)


def command(example: Path) -> list[str]:
    """The first line of an example's docstring."""
    return shlex.split(ast.get_docstring(ast.parse(example.read_text())).splitlines()[0])


@functools.cache
def own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def compiled() -> str:
    """Return the folder of DeepSpeed's shared-memory collectives, which it compiles at its first start on a CPU.

    Without finished ones it is this process's own, as one that is killed meanwhile leaves a lock, which all later ones wait for.
    """
    shared = Path(_get_build_directory("deepspeed_shm_comm", False))
    finished_there = (shared / "deepspeed_shm_comm.so").exists() and not (shared / "lock").exists()
    return str(shared.parent) if finished_there else own_folder().name


def printed(name: str) -> str:
    """Standard output of an example, run as a user of this Python's environment runs it."""
    here = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TORCH_EXTENSIONS_DIR": compiled(),
        "PET_STANDALONE": "1",  # torchrun's --standalone, at a port of its own; by default only torch 2.13's does so
    }
    done = finished(command(ROOT / "examples" / f"{name}.py"), os.environ | here, TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def marks(name: str) -> list[pytest.MarkDecorator]:
    too_few = name in ("sequence", "fsdp2", "mesh") and torch.cuda.device_count() == 1
    return [pytest.mark.skipif(too_few, reason="two GPUs or none")] + ([] if name in EVERYDAY else [pytest.mark.slow])


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param(path.stem, marks=marks(path.stem)) for path in EXAMPLES])
def test_it_runs_and_learns(name: str) -> None:
    out = printed(name)
    losses = list(re.finditer(r"\bloss'?:? '?([\d.]+)", out))
    assert len(losses) == 10
    assert float(losses[-1][1]) < float(losses[0][1])
    (report,) = REPORT.finditer(out)  # by one rank
    assert report.start() > losses[-1].end()
    assert float(report[1]) > 0 and report[1] == report[2]
    assert "attention 0 times" in out and "\nwarning" not in out
    if name in STORED_MIB:
        assert float(re.search(r"^layers 0-1 +(\S+) MiB each on the host", out, re.M)[1]) == STORED_MIB[name]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_names_itself(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 60
    assert command(example)[-1] == f"examples/{example.name}"


def test_the_table_has_each_command() -> None:
    table = re.findall(r"^\| `(.+?)` \|", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(shlex.join(command(example)) for example in EXAMPLES)
