"""The library's build: its backend, missing tools, other processes and earlier builds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from ds_memo.ops import builder as module
from ds_memo.ops import library
from ds_memo.ops.builder import OpsBuilder
from tests.ops.compiling import lacks, stand_in
from tests.processes import ROOT, python

needs_a_compiler = pytest.mark.skipif(bool(lacks()), reason=str(lacks()))


@pytest.fixture
def not_loaded(monkeypatch):
    """Unload the library, as in a new process."""
    monkeypatch.setattr(library, "_loaded", {})


@pytest.fixture(scope="module")
def cached() -> Path:
    """The compiled library."""
    if reason := lacks():
        pytest.skip(reason)
    return Path(os.path.realpath(library.load("cpu").__file__))


# ---- which backend


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_the_backend_is_the_accelerators(monkeypatch, accelerator):
    class Accelerator:
        def device_name(self) -> str:
            return accelerator

    monkeypatch.setattr(module, "get_accelerator", Accelerator)
    builder = OpsBuilder()
    assert builder.backend == accelerator
    assert [Path(source).name for source in builder.sources()] == [f"ops_{accelerator}.cpp"]
    assert all(Path(source).is_file() for source in builder.sources())


# ---- what is missing


def test_another_device_has_no_ops(not_loaded, capsys):
    builder = OpsBuilder("npu")
    assert not builder.is_compatible(verbose=True)
    assert "no ops for 'npu' devices" in capsys.readouterr().out
    assert library.missing(builder.backend) == ["there are no ops for 'npu' devices, only for cpu and cuda"]
    with pytest.raises(RuntimeError, match="memo_ops_npu is not available: there are no ops for 'npu'"):
        builder.load()


def test_without_a_compiler(monkeypatch, tmp_path, not_loaded):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    builder = OpsBuilder("cpu")
    wanted = "no C++ compiler (looked for c++, g++, clang++ on the PATH; install g++ or set CXX)"
    assert wanted in library.missing(builder.backend)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        builder.load()
    monkeypatch.setenv("CXX", "ccache no-such-compiler")
    assert any("(CXX is ccache no-such-compiler, which is not on the PATH" in lack for lack in library.missing(builder.backend))


def test_cuda_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(library, "cuda_headers", lambda: None)
    lacking = library.missing("cuda")
    assert any(lack == f"torch {torch.__version__} is built without CUDA" for lack in lacking)
    assert any("no cuda_runtime_api.h" in lack and "install the CUDA toolkit" in lack for lack in lacking)


def test_cuda_headers_come_complete(monkeypatch, tmp_path):
    """nvidia's runtime package may lack crt/ and then does not compile."""
    home = tmp_path / "toolkit"
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.setattr(library.cpp_extension, "CUDA_HOME", str(home))
    monkeypatch.setattr(library, "TOOLKITS", ())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert library.cuda_headers() != home / "include"
    (home / "include" / "crt").mkdir()
    (home / "include" / "crt" / "host_defines.h").touch()
    assert library.cuda_headers() == home / "include"


def test_cuda_headers_are_of_torchs_cuda(monkeypatch, tmp_path):
    """Triton's may differ: 3.6 has those of CUDA 12.8, torch 2.11 is built for CUDA 13."""
    homes = [tmp_path / name for name in ("older", "same")]
    for home, version in zip(homes, (12080, 13000), strict=True):
        (home / "include" / "crt").mkdir(parents=True)
        (home / "include" / "crt" / "host_defines.h").touch()
        (home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    monkeypatch.setattr(library.cpp_extension, "CUDA_HOME", str(homes[0]))
    monkeypatch.setattr(library, "TOOLKITS", (str(homes[1]),))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert library.cuda_headers() == homes[1] / "include"
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert library.cuda_headers() == homes[0] / "include"


@pytest.mark.processes
@needs_a_compiler
def test_ninja_is_not_needed(tmp_path, cached):
    """CXX may have several words, too."""
    cxx, log = stand_in(tmp_path, f'cat {cached} > "$out"')
    done = python(
        "-c", LOAD, PATH="/no/such/folder", CXX=f"/usr/bin/env - PATH=/usr/bin:/bin {cxx}", XDG_CACHE_HOME=str(tmp_path)
    )
    assert done.returncode == 0 and str(tmp_path) in done.stdout, done.stderr
    assert len(log.read_text().splitlines()) == 1


# ---- the op report


@pytest.mark.processes
@pytest.mark.parametrize(
    "cxx, okay, says",
    [
        (None, True, "memo_ops_cpu: nothing is missing"),
        ("no-such-compiler", False, "no C++ compiler (CXX is no-such-compiler, which is not on the PATH"),
    ],
)
def test_the_op_report(cached, cxx, okay, says):
    done = python("-m", "ds_memo.ops.builder", DS_ACCELERATOR="cpu", CXX=cxx)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("memo_ops_cpu .")]
    assert ("OKAY" in line) == okay
    assert says in done.stdout


# ---- other processes and earlier builds


LOAD = """
import os
from ds_memo.ops.builder import OpsBuilder
print(os.path.realpath(OpsBuilder("cpu").load().__file__))
"""


def test_other_sources_compilers_and_torches_have_their_own(monkeypatch, tmp_path, cached):
    """Each has a name of its own in the same cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_loaded", {})

    def built() -> int:
        library._loaded.clear()
        library.load("cpu")
        return len(list((tmp_path / "cache").rglob("memo_ops_cpu*.so")))

    cxx, log = stand_in(tmp_path, f'cat {cached} > "$out"')
    monkeypatch.setenv("CXX", cxx)
    counts = [built(), built()]
    monkeypatch.setenv("CXX", f"env {cxx}")
    counts.append(built())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    counts.append(built())
    shutil.copytree(library.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "csrc")
    counts.append(built())
    (tmp_path / "csrc" / "allocator_core.h").write_text("// other\n")
    counts += [built(), built()]
    assert counts == [1, 1, 2, 3, 4, 5, 5] and len(log.read_text().splitlines()) == 5


# ---- ahead of time


@needs_a_compiler
@pytest.mark.slow
def test_it_is_built_ahead_of_time(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "build")
    shutil.copytree(ROOT / "ops", source / "ops", ignore=ignored)
    shutil.copytree(
        ROOT / "ds_memo", source / "ds_memo", ignore=lambda folder, names: {"ops"} & set(names) | ignored(folder, names)
    )
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path / "target"
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target, source]
    done = python(*words, timeout=500, PYTHONPATH=None, DS_BUILD_MEMO_OPS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (target / "ds_memo" / "ops").glob("memo_ops_cpu_op*.so")

    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = python("-c", LOAD, PATH="", **elsewhere)  # without a compiler
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == str(built), done.stderr
    done = python("-m", "ds_memo.ops.builder", DS_ACCELERATOR="cpu", **elsewhere)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("memo_ops_cpu .")]
    assert "YES" in line

    other = "import torch; torch.__version__ = '9.9.9'; " + LOAD  # built for another torch: compiled anew
    done = python("-c", other, **elsewhere)
    assert done.returncode == 0 and str(tmp_path / "cache") in done.stdout, done.stderr
    built.write_bytes(b"not a library")
    done = python("-c", LOAD, **elsewhere)
    assert done.returncode == 0 and str(tmp_path / "cache") in done.stdout, done.stderr


@pytest.mark.processes
def test_without_torch_the_ahead_of_time_build_says_so(tmp_path):
    setup = str(ROOT / "setup.py")
    code = f"""
import runpy, sys
sys.modules["torch"] = None
sys.argv = ["setup.py", "build_ext"]
runpy.run_path({setup!r}, run_name="__main__")
"""
    done = python("-c", code, DS_BUILD_MEMO_OPS="1", cwd=tmp_path)
    assert done.returncode == 1 and "needs torch and deepspeed to be installed first" in done.stderr
