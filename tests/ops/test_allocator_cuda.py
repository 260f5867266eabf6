"""The op's CUDA backend: compiled if the headers exist, run over a stand-in for CUDA if torch is a CUDA build, and on a GPU.

DS_MEMO_CUDA_TORCH: the Python of an environment that has a CUDA build of torch, DeepSpeed, for machines whose own torch is
built without CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import emulated_process
from ds_memo.ops.library import CXX_FLAGS, cuda_headers
from tests.ops import cuda_scenarios
from tests.ops.compiling import compiler, lacks

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "ops" / "csrc"
EXPANDABLE = {"torch's segments": "", "expandable segments": "expandable_segments:True"}
"""Values of PYTORCH_CUDA_ALLOC_CONF. If it is set, the user decides whether blocks are split."""

WITHOUT = {
    "waiting for fences": ("device.wait(stream, fences);", ""),
    "noting the streams": ("streams.push_back(stream.stream());", ";"),
    "checking the pools": (
        "device.core.take(size, stream, device.pools > 0, fences)",
        "device.core.take(size, stream, false, fences)",
    ),
    "giving way": ("if (!give_way(index)) throw;", "throw;"),
    "checking for live blocks in the arena": ("arena = device.core.give_way();", "arena = device.core.replace_arena(nullptr);"),
    "waiting before an arena is dropped": ("device.wait(arena->stream(), arena->fences());", ""),
}
"""Changes to the backend in the negative controls: a text and its replacement."""


@cache
def cuda_python() -> str | None:
    """Return a Python whose torch is a CUDA build, or None."""
    return sys.executable if torch.version.cuda else os.environ.get("DS_MEMO_CUDA_TORCH")


@pytest.mark.processes
def test_it_compiles(tmp_path):
    """Against the headers of the installed torch; its CPU build has them, too."""
    torch_headers = Path(torch.__file__).parent / "include"
    if reason := lacks():
        pytest.skip(reason)
    if not (torch_headers / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        pytest.skip(f"torch {torch.__version__} comes without c10/cuda headers")
    if cuda_headers() is None:
        pytest.skip("no CUDA runtime headers: neither a toolkit nor the packages of a CUDA build of torch")
    flags = [*CXX_FLAGS, "-O0", "-Wall", "-Werror", "-DTORCH_EXTENSION_NAME=compiled"]
    if not (torch_headers / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").is_file():
        flags.append("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE")
    includes = [
        torch_headers,
        torch_headers / "torch" / "csrc" / "api" / "include",
        cuda_headers(),
        sysconfig.get_path("include"),
    ]
    command = [*compiler(), *flags, f"-I{CSRC}", *(word for i in includes for word in ("-isystem", i)), "-c"]
    command += [CSRC / "ops_cuda.cpp", "-o", tmp_path / "ops_cuda.o"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---- over a stand-in for CUDA


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which CUDA is the stand-in."""
    if cuda_python() is None:
        pytest.skip("torch is built without CUDA here, and DS_MEMO_CUDA_TORCH names no Python with one that is")
    if reason := lacks() or (cuda_headers() is None and "no CUDA runtime headers"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("standin")
    copies = {"EMULATED_COPY_MIB": "1024", "EMULATED_CALLS": "1"}
    return emulated_process.environment(folder, cuda_headers(), device_gib=8) | copies | {"PYTHONPATH": str(ROOT)}


def run(python: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [python, *(words or ("-m", "tests.ops.cuda_scenarios"))]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=540, cwd=ROOT)


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return for each scenario an empty text, or its error."""
    found: dict[str, str] = {}
    for part in done.stdout.split("run ")[1:]:
        name, _, rest = part.partition("\n")
        found[name] = "" if rest.startswith(f"ok {name}\n") else rest or f"the process died: {done.stderr[-3000:]}"
    return found or {"": done.stderr[-3000:]}


@pytest.fixture(scope="session")
def over_standin(standin) -> dict[str, str]:
    return outcomes(run(cuda_python(), standin))


@pytest.mark.parametrize("name", [name for name in cuda_scenarios.SCENARIOS if name not in cuda_scenarios.ON_A_GPU])
def test_over_a_standin(over_standin, name):
    if wrong := over_standin.get(name, f"it was not reached: {over_standin}"):
        pytest.fail(wrong, pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", WITHOUT)
def test_what_is_missing_is_noticed(standin, tmp_path, part):
    """Negative controls: a backend that lacks something."""
    text, instead = WITHOUT[part]
    shutil.copytree(CSRC, tmp_path / "csrc")
    source = tmp_path / "csrc" / "ops_cuda.cpp"
    assert source.read_text().count(text) == 1, f"{part} reads otherwise now: correct WITHOUT"
    source.write_text(source.read_text().replace(text, instead))
    code = f"""
import pathlib, sys
from ds_memo.ops import library
library.SOURCES = pathlib.Path({str(source.parent)!r})
from tests.ops import cuda_scenarios
sys.exit(cuda_scenarios.main())
"""
    wrong = outcomes(run(cuda_python(), standin | {"XDG_CACHE_HOME": str(tmp_path)}, "-c", code))
    assert "" not in wrong and any(wrong.values()), f"without {part} every scenario passed"


# ---- on a GPU


@pytest.fixture(scope="session", params=EXPANDABLE)
def on_gpu(request) -> dict[str, str]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    segments = EXPANDABLE[request.param]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": segments, "DS_ACCELERATOR": "cuda", "PYTHONPATH": str(ROOT)}
    return outcomes(run(sys.executable, environment))


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in cuda_scenarios.SCENARIOS if name not in cuda_scenarios.ON_A_STANDIN])
def test_on_a_gpu(on_gpu, name):
    if wrong := on_gpu.get(name, f"it was not reached: {on_gpu}"):
        pytest.fail(wrong, pytrace=False)
