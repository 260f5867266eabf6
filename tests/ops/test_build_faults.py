"""Training when the op cannot be built or cached: it goes on and warns once. tests/test_compiled.py has each fault."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.ops.builder import AllocatorBuilder
from tests.models import Batch, build, step
from tests.ops.compiling import lacks, stand_in
from tests.processes import forked

pytestmark = [pytest.mark.skipif(bool(lacks()), reason=str(lacks())), pytest.mark.processes]
STEPS = 4


def train(environment: dict[str, str], folder: Path, file_bytes: int | None = None) -> dict[str, Any]:
    """Train a model with planned addresses for four steps.

    Args:
        environment: the process's environment variables.
        folder: the process's working directory.
        file_bytes: largest size of a file.

    Returns:
        Losses, warnings, and the report's part.
    """
    torch.set_num_threads(1)
    os.environ |= environment
    os.chdir(folder)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    model, batch = build("plain"), Batch.random(4, 128)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
        losses = [step(model, batch).loss.item() for _ in range(STEPS)]
    report = handle.report()
    return {
        "losses": losses,
        "warned": [str(warning.message) for warning in said if issubclass(warning.category, ds_memo.MemoWarning)],
        "reported": report["warnings"],
        "hits": report["plan"]["hits"] if report["plan"] else None,
    }


@pytest.fixture(scope="module")
def stock() -> list[float]:
    """The losses without ds_memo."""
    model, batch = build("plain"), Batch.random(4, 128)
    return [step(model, batch).loss.item() for _ in range(STEPS)]


@pytest.fixture
def run(tmp_path: Path, stock: list[float]) -> Callable[..., dict[str, Any]]:
    """Train in a process with a cache of its own, and compare the losses with stock."""

    def trained(cache: str = "", file_bytes: int | None = None, folder: Path = tmp_path, **environment: str) -> dict[str, Any]:
        there = cache or str(tmp_path / "cache")
        caches = {"XDG_CACHE_HOME": there, "TORCH_EXTENSIONS_DIR": there, "TMPDIR": str(tmp_path / "temporary")}
        (tmp_path / "temporary").mkdir(exist_ok=True)
        got = forked(train, caches | environment, folder, file_bytes)
        assert got["losses"] == pytest.approx(stock, rel=1e-5)
        assert got["warned"] == got["reported"]
        assert not [path for path in (tmp_path / "temporary").iterdir() if "build" in path.name]
        return got

    return trained


@pytest.fixture(scope="module")
def made() -> Path:
    """The op, built by the compiler."""
    return Path(os.path.realpath(AllocatorBuilder("cpu").load().__file__))


@pytest.fixture
def quick(tmp_path: Path, made: Path) -> str:
    """A stand-in compiler that copies the built op and saves half a minute."""
    return stand_in(tmp_path, f'cat {made} > "$out"')[0]


# ---- it cannot be built


def test_a_compiler_that_fails(run: Callable[..., dict[str, Any]]) -> None:
    got = run(CXX="false")
    (warning,) = got["warned"]
    assert warning.startswith("memory addresses are not planned: memo_allocator_cpu is not available: ")
    assert "false failed: exit status 1" in warning and got["hits"] is None


def test_a_full_disk(run: Callable[..., dict[str, Any]], quick: str, tmp_path: Path) -> None:
    got = run(CXX=quick, file_bytes=100_000)
    (warning,) = got["warned"]
    assert warning.startswith("memory addresses are not planned: memo_allocator_cpu is not available: ")
    assert got["hits"] is None
    assert [path.name for path in (tmp_path / "cache/ds_memo/compiled").iterdir()] == ["lock"]


def test_no_folder_can_be_written(run: Callable[..., dict[str, Any]], quick: str) -> None:
    got = run("/proc", CXX=quick, file_bytes=0)
    assert len(got["warned"]) == 2 and "/proc/ds_memo: cannot be made" in got["warned"][0]
    assert got["warned"][1].startswith("memory addresses are not planned: memo_allocator_cpu is not available: ")
    assert got["hits"] is None


# ---- it cannot be kept


def test_a_cache_that_cannot_be_written(run: Callable[..., dict[str, Any]], quick: str) -> None:
    got = run("/proc", CXX=quick)
    (warning,) = got["warned"]
    assert "cannot be made" in warning and "memo_allocator_cpu is compiled for this process alone" in warning
    assert got["hits"] > 0
