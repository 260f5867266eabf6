"""A line says that DeepSpeed compiles its collectives, or waits for a process that does; it says nothing itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.ops import __compatible_ops__  # here, for the import compiles to see what is compatible

from ds_memo.deepspeed.first_compile import announce_first_compile, backend

OP = "deepspeed_shm_comm"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DeepSpeed's start with nothing compiled. Returns the folder that it would compile in."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(__compatible_ops__, OP, True)
    monkeypatch.setattr(backend, "build_shm_op", lambda: "built")
    announce_first_compile()
    announce_first_compile()  # once is enough
    (tmp_path / OP).mkdir()
    return tmp_path / OP


def test_what_is_to_come_is_said(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert backend.build_shm_op() == "built"
    assert f"compiles its collectives for CPU ranks into {build}" in capsys.readouterr().err
    (build / "lock").touch()
    backend.build_shm_op()
    assert f"waits for another process, which made {build}/lock 0 minutes ago" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["compiled", "another rank", "left out"])
def test_nothing_is_said_where_nothing_happens(
    case: str, build: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == "compiled":
        (build / f"{OP}.so").touch()
    elif case == "another rank":
        monkeypatch.setenv("RANK", "1")
    else:
        monkeypatch.setitem(__compatible_ops__, OP, False)
    assert backend.build_shm_op() == "built"
    assert not capsys.readouterr().err
