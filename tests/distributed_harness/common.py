"""DistributedTest: a class whose tests each run in `world_size` fresh processes that form a process group.

    class TestSum(DistributedTest):
        world_size = 2                                     # or [1, 2]: once with each; @pytest.mark.world_size(4) on one test

        @pytest.mark.parametrize("number", [1, 2])
        def test_sum(self, number, tmp_path):              # fixtures are made in the parent and must survive pickling
            assert dist.get_world_size() == 2              # deepspeed.comm is up, on gloo or NCCL

It keeps the contract of DeepSpeed's class of this name (DeepSpeed: tests/unit/common.py): `pytest.skip` works inside, a failing
rank's traceback is the test's, and a group that hangs is killed after `exec_timeout` seconds. Beyond it, the stacks of ranks that
hang are shown, what ranks print is shown with the test, and whatever a rank started dies with it.
With DEEPSPEED_TESTS=/path/to/DeepSpeed/tests the tests run under DeepSpeed's own class instead.
"""

from __future__ import annotations

import faulthandler
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from _pytest.fixtures import FixtureLookupError
from _pytest.outcomes import Skipped

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from tests.haste import forkserver, make_haste

ON_CPU = get_accelerator().device_name() == "cpu"
if ON_CPU:  # here, because every rank imports this file: gloo serves, and nothing has to be compiled
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

TIMEOUT_S = int(os.environ.get("DS_UNITTEST_TIMEOUT", "300"))
GRACE_S = 5
"""Seconds that the other ranks get to say what they saw once one has failed."""


class OwnDistributedTest:
    """See the top of this file."""

    is_dist_test = True
    world_size: int | list[int] = 2
    backend: str | None = None
    """Absent: what DeepSpeed uses on this accelerator, gloo or NCCL."""
    init_distributed = True
    set_dist_env = True
    requires_cuda_env = True
    exec_timeout: ClassVar[float] = TIMEOUT_S

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def class_tmpdir(cls, tmpdir_factory):
        """Return a folder that all tests of the class share."""
        return tmpdir_factory.mktemp(cls.__name__)

    def __call__(self, request: pytest.FixtureRequest) -> None:
        """Run the requested test; tests/conftest.py calls this in place of the method."""
        name = request.function.__name__
        kwargs = {}
        for parameter in inspect.signature(getattr(self, name)).parameters:
            with suppress(FixtureLookupError):  # a default of the method's own
                kwargs[parameter] = request.getfixturevalue(parameter)
        mark = request.node.get_closest_marker("world_size")
        sizes = mark.args[0] if mark else kwargs.get("world_size", self.world_size)
        for size in [sizes] if isinstance(sizes, int) else sizes:
            self._run(name, kwargs, size, Path(request.getfixturevalue("tmp_path_factory").mktemp("ranks")))

    def _run(self, name: str, kwargs: dict[str, Any], size: int, folder: Path) -> None:
        if not ON_CPU and get_accelerator().device_count() < size:
            _skip(f"{size} GPUs needed, {get_accelerator().device_count()} found")
        # A server imports once for all; a CUDA context would not survive a fork.
        context = forkserver() if ON_CPU else multiprocessing.get_context("spawn")
        ranks = [_Rank(context, self, name, kwargs, rank, size, folder) for rank in range(size)]
        try:
            hung = not _wait(ranks, time.monotonic() + self.exec_timeout)
            stacks = [rank.stack() for rank in ranks if rank.running] if hung else []
        finally:
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            print(rank.printed(), end="")
        if hung:
            pytest.fail(f"hung: killed after {self.exec_timeout} s\n" + "\n".join(stacks), pytrace=False)
        # The first to fail is the cause; the others then lost their peer.
        failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.ended)
        if failed:
            pytest.fail("\n".join(f"rank {rank.rank} of {size}: {rank.failure}" for rank in failed), pytrace=False)
        skipped = {rank.skipped for rank in ranks}
        if skipped != {None}:
            if len(skipped) > 1:
                pytest.fail(f"some ranks skipped, others did not: {[rank.skipped for rank in ranks]}", pytrace=False)
            _skip(skipped.pop())


class _Rank:
    """One process of a test, seen from the parent."""

    def __init__(self, context: Any, test: Any, name: str, kwargs: dict, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self.failure: str | None = None
        self.skipped: str | None = None
        self.ended = float("inf")
        self._output = folder / f"rank{rank}.txt"
        self._stacks = folder / f"rank{rank}.stacks.txt"
        self.result, theirs = context.Pipe(duplex=False)
        settings = (type(test), name, kwargs, rank, size, folder)
        self.process = context.Process(target=_be_a_rank, args=(*settings, theirs), daemon=False)
        self.process.start()
        theirs.close()

    @property
    def running(self) -> bool:
        return self.ended == float("inf")

    def poll(self) -> None:
        """Record the process's answer, or that it died without one."""
        ended = not self.process.is_alive()  # asked first: it may answer and end between the two questions
        said = None
        with suppress(EOFError, OSError):
            if self.result.poll():
                said = self.result.recv()
        if said is None and not ended:
            return
        self.ended = time.monotonic()
        self.process.join(GRACE_S)
        if said is None:
            code = self.process.exitcode
            self.failure = f"died of {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        else:
            self.skipped, self.failure = said
        if said == (None, None) and self.process.exitcode:
            self.failure = f"passed, then exited with code {self.process.exitcode}"

    def stack(self) -> str:
        """Return the stack of each thread."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while not self._stacks.exists() or not self._stacks.read_text().strip():
            if time.monotonic() > deadline:
                return f"rank {self.rank} says nothing"
            time.sleep(0.1)
        return f"rank {self.rank} is at\n{self._stacks.read_text()}"

    def printed(self) -> str:
        text = self._output.read_text(errors="replace") if self._output.exists() else ""
        return "".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines())

    def kill(self) -> None:
        """End the process and all that it started.

        After it and its children have ended, another process may have its number, so no signal is sent then.
        """
        if self.process.is_alive() or not Path(f"/proc/{self.process.pid}").exists():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.result.close()


def _wait(ranks: list[_Rank], deadline: float) -> bool:
    """Wait until all have ended, or some time after the first failure; return False at the deadline."""
    while any(rank.running for rank in ranks):
        now = time.monotonic()
        if any(rank.failure for rank in ranks):
            deadline = min(deadline, min(rank.ended for rank in ranks) + GRACE_S)
        if now >= deadline:
            for rank in ranks:
                if rank.running and any(other.failure for other in ranks):
                    rank.failure, rank.ended = "still ran when another rank had failed; killed", now
            return not any(rank.running for rank in ranks)
        waiting = [rank for rank in ranks if rank.running]
        wait([source for rank in waiting for source in (rank.result, rank.process.sentinel)], deadline - now)
        for rank in waiting:
            rank.poll()
    return True


def _be_a_rank(test: type, name: str, kwargs: dict[str, Any], rank: int, size: int, folder: Path, result: Connection) -> None:
    os.setsid()  # one signal then reaches all child processes
    make_haste()
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1), os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=(folder / f"rank{rank}.stacks.txt").open("w"), all_threads=True)
    skipped = failure = None
    try:
        if test.set_dist_env:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # asked for by DeepSpeed, used by none: a file serves
            where |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ.update({key: str(value) for key, value in where.items()})
        if not ON_CPU:
            get_accelerator().set_device(rank)
        if test.init_distributed:
            backend = test.backend or get_accelerator().communication_backend_name()
            store = f"file://{folder}/store"
            deepspeed.init_distributed(dist_backend=backend, init_method=store, rank=rank, world_size=size)
            dist.barrier()
        try:
            getattr(test(), name)(**kwargs)
        except Skipped as skip:
            skipped = skip.msg
        if dist.is_initialized():
            dist.barrier()  # a group that is taken down under another rank's last collective ends that rank
            dist.destroy_process_group()
    except BaseException:
        failure = traceback.format_exc()
    sys.stdout.flush(), sys.stderr.flush()
    result.send((skipped, failure))
    result.close()
    if failure:
        os._exit(1)  # peers that wait for this rank learn it from the broken connection


def _skip(reason: str) -> None:
    raise Skipped(reason, _use_item_location=True)


if "DEEPSPEED_TESTS" in os.environ:
    if ON_CPU:
        os.environ.setdefault("LOCAL_SIZE", "4")  # how many ranks its class believes a CPU to hold
    sys.path.insert(0, os.environ["DEEPSPEED_TESTS"])
    from unit.common import DistributedTest
else:
    DistributedTest = OwnDistributedTest
