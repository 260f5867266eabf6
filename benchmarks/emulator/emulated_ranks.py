"""Ranks that are not there: a process group of N in which every other rank does what this one does, at the same time.

Collectives move no values. They take their time on a stream of their own, behind what the current stream has and before what
waits for them, as NCCL's do. So this one rank of N has the pieces, gathers, buckets and groups that it would have among N.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from benchmarks.emulated_time import Clock
from ds_memo.distributed import agree

NAME = "alike"
_ONE_WAY, _THERE_AND_BACK = 1, 2


class Alike(dist.ProcessGroup):
    """One of `size` ranks that all do the same.

    Args:
        clock: on which collectives take their time, by the bus bandwidth that the machine has among so many ranks.
    """

    def __init__(self, rank: int, size: int, name: str, clock: Clock) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._clock = rank, size, name, clock
        self._stream = torch.cuda.Stream()

    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def supports_splitting(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=dist.default_pg_timeout))

    # ---- what each rank has is what this one has

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._takes(tensors, _THERE_AND_BACK)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._takes(tensors, _THERE_AND_BACK)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._takes(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._takes(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            for piece in output:
                _tell(piece, mine)
        return self._takes(outputs)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> dist.Work:
        for piece in output.view(self._size, -1):
            _tell(piece, mine.view(-1))
        return self._takes(output)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(inputs)

    def _reduce_scatter_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._takes(mine)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(inputs)

    def alltoall_base(self, output: torch.Tensor, mine: torch.Tensor, *_: Any) -> dist.Work:
        return self._takes(mine)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(inputs)

    # as torch 2.15 calls them
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._takes([])

    def _start_coalescing(self, device: torch.device) -> None: ...

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._takes([])

    def _takes(self, moved: Any, ways: int = _ONE_WAY) -> dist.Work:
        nbytes = sum(x.nbytes for x in tree_leaves(moved) if x.is_cuda)
        seconds = ways * nbytes * (self._size - 1) / self._size / self._clock.machine.bandwidth(self._size)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._clock.spend(seconds)
        return _UnderWay(self._stream.record_event(), moved)


def _tell(piece: torch.Tensor, mine: torch.Tensor) -> None:
    """Exchange host tensors between the ranks; tensors on the device have no values."""
    if not piece.is_cuda:
        piece.copy_(mine)


class _UnderWay(dist.Work):
    """A collective. Its tensors live until it was waited for, as under NCCL."""

    def __init__(self, over: torch.cuda.Event, moved: Any) -> None:
        super().__init__()
        self._over, self._moved = over, moved

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self._over)
        self._moved = None
        return True

    def is_completed(self) -> bool:
        return self._over.query()

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future()
        future.set_result(tree_leaves(self._moved))
        return future


def among(ranks: int, clock: Clock) -> None:
    """Make this process rank 0 of so many."""

    def make(options: Any, _: Any) -> Alike:
        return Alike(options.group_rank, options.group_size, options.group_id, clock)

    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=ranks)
    agree.meet = lambda mine, ranks, *_: [mine] * len(ranks)  # who would answer has the same to say
    agree.words = lambda mine, *_: [mine] * ranks
