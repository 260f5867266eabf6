"""Ranks with files: ZeRO-3 and Ulysses to the bit as over the host alone; errors on one rank end the other; kill -9."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.errors import MemoError
from ds_memo.nvme import direct_files, directory
from tests.deepspeed.engines import ds_config, start, train
from tests.deepspeed.test_sequence import gradients_of_parts
from tests.distributed_harness.common import DistributedTest
from tests.models import build
from tests.nvme.rig import host_of
from tests.nvme.test_training import by_host, settings

LAYERS = 8
MEMO = {"enabled": True, "alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
pytestmark = pytest.mark.slow


def model() -> torch.nn.Module:
    return build("llama", num_hidden_layers=LAYERS)


def over_files(path: Path, host_bytes: int) -> dict:
    return MEMO | {"nvme": {"path": str(path), "gib": 1 / 16}, "host_memory_gib": host_of(host_bytes)}


def trained(memo: dict, stage: int) -> tuple[list[float], list[torch.Tensor], dict]:
    """Return losses, what this rank holds of the parameters, and the report."""
    engine = start(ds_config(stage, memo=memo), model=model())
    losses = train(engine)
    held = [(p.ds_tensor if stage == 3 else p).detach().clone() for p in engine.module.parameters()]
    report = ds_memo.report(engine)
    engine.destroy()
    return losses, held, report


def refuse(monkeypatch: pytest.MonkeyPatch, module, name: str, number: int) -> None:
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, name, refused)


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_zero_stages(self, tmp_path):
        for stage in (0, 3):
            losses, held, report = trained(MEMO, stage)
            ours, ours_held, ours_report = trained(over_files(tmp_path, report["host"]["peak_used"] // 2), stage)
            assert ours == losses
            assert all(torch.equal(mine, his) for mine, his in zip(ours_held, held, strict=True))
            assert ours_report["nvme"]["bytes_read"] > 0
            assert os.listdir(tmp_path) == []

    def test_ulysses(self, tmp_path):
        wanted, peak = None, 0
        for memo in ("host", "files"):
            parallel = model()
            sequence.set_up(parallel, 2)
            handle = ds_memo.attach(parallel, MEMO if memo == "host" else over_files(tmp_path, peak // 2))
            for _ in range(3):
                found = gradients_of_parts(parallel)
            if wanted is None:
                wanted, peak = {name: grad.clone() for name, grad in found.items()}, handle.report()["host"]["peak_used"]
            else:
                assert handle.report()["nvme"]["bytes_read"] > 0
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            handle.detach()

    @pytest.mark.parametrize(
        "call, number, says",
        [
            ("posix_fallocate", errno.ENOSPC, r"has no room for .* \(No space left on device\)"),
            ("pwritev", errno.EIO, "the first write failed"),
        ],
    )
    def test_files_that_one_rank_cannot_open_are_an_error_on_both(self, call, number, says, tmp_path, monkeypatch):
        rank = dist.get_rank()
        if rank == 1:
            refuse(monkeypatch, directory, call, number)
        with pytest.raises(MemoError, match="another rank could not open its files" if rank == 0 else says):
            start(ds_config(3, memo=over_files(tmp_path, 1 << 24)), model=model())
        dist.barrier()
        assert os.listdir(tmp_path) == []


class TestOneRankFails(DistributedTest):
    world_size = 2
    init_distributed = False

    def test_a_read_that_fails_on_one_rank(self, tmp_path, monkeypatch):
        """One clear error there; the other ends within the process group's time-out, also if its peer lives on."""
        deepspeed.init_distributed(timeout=timedelta(seconds=20), dist_backend="gloo")
        rank, over = dist.get_rank(), tmp_path / "over"
        files = tmp_path / "files"
        files.mkdir(exist_ok=True)
        _, _, report = trained(MEMO, 3)
        memo = over_files(files, report["host"]["peak_used"] // 2)
        engine = start(ds_config(3, memo=memo), model=model())
        train(engine, steps=1)
        begin = time.monotonic()
        if rank == 1:
            refuse(monkeypatch, direct_files, "preadv", errno.EIO)
            with pytest.raises(MemoError, match=rf"rank 1 could not read its file in {files}: .*Input/output error"):
                train(engine, steps=1)
            while not over.exists() and time.monotonic() < begin + 120:
                time.sleep(0.1)
        else:
            with pytest.raises(RuntimeError):
                train(engine, steps=1)
            over.write_text("")
        assert time.monotonic() - begin < 90
        torch.distributed.destroy_process_group()  # nothing can be said in it any more


KILLED = """
import os, signal, sys
from ds_memo.nvme import direct_files
from ds_memo.runtime.attach import attach
from tests.models import Batch, build
model, batch = build("llama", num_hidden_layers=8), Batch.random(2, 33)
section = {"enabled": True, "alpha": 0.5, "resident_layers": 0, "host_memory_gib": float(sys.argv[2])}
handle = attach(model, section | {"nvme": {"path": sys.argv[1], "gib": 0.25}})
model(inputs_embeds=batch.embeds, labels=batch.labels).loss.backward()
print("stepped", handle.report()["nvme"]["bytes_read"], flush=True)
setattr(direct_files.os, sys.argv[3], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
model(inputs_embeds=batch.embeds, labels=batch.labels).loss.backward()
"""


@pytest.mark.processes
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_kill_9_in_forward_and_in_backward_leaves_no_file(call, tmp_path):
    _, _, largest = by_host("llama", settings(0.5, 0, None), 8)
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(host_of(3 * largest)), call],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout.startswith("stepped") and int(child.stdout.split()[1]) > 0
    assert os.listdir(tmp_path) == []
