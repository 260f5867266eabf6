"""Fixtures that several folders of tests use."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.traces import memo_threads


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's profiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_memo" / "profiles"


@pytest.fixture
def nothing_stays_planned() -> Iterator[None]:
    from tests.planned_alloc.planned import CPU

    yield
    gc.collect()
    CPU.uninstall()  # it stays installed as long as blocks are alive
    assert not CPU.installed and CPU.mode == "off" and CPU.arena_bytes == 0 and CPU.retired_arenas == 0
    assert CPU.stats()["live_bytes"] == 0


@pytest.fixture
def times_by_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give profiles the times of a device with 50 GFLOP/s (attention: 1) and 1 GB/s copies. Bytes are as measured.

    So placements do not depend on this machine's load.
    """
    from ds_memo.profile import run

    measure = run.measure

    def measured(*args: Any) -> Any:
        sample = measure(*args)
        gemms, attention = sample.gemm_flops / 50e9, sample.attention_flops / 1e9  # as long as GEMMs, at tens of tokens
        return dataclasses.replace(
            sample,
            forward_s=1.1 * (gemms + attention),
            attention_s=attention,
            backward_s=2.2 * (gemms + attention),
            attention_backward_s=2.5 * attention,
            replay_s=0.1 * gemms,
            gemm_s=0.7 * gemms,
            all_gemms_s=gemms,
        )

    monkeypatch.setattr(run, "measure", measured)
    monkeypatch.setattr(run.CopyBench, "rate", lambda *args: 1e9)


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = set(memo_threads())
    yield
    gc.collect()
    for thread in set(memo_threads()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Join a gloo group of one, without the shared-memory op that DeepSpeed would build for its CPU collectives."""
    import deepspeed
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}.items():
            patch.setenv(name, value)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
        yield
        deepspeed.comm.destroy_process_group()


@pytest.fixture
def not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    @functools.wraps(deepspeed.initialize)
    def initialize(*args: Any, **kwargs: Any) -> None:
        pytest.fail("DeepSpeed was started")

    monkeypatch.setattr(deepspeed, "initialize", initialize)
