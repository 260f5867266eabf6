"""Ranks that are not there: a process group of N in which every other rank does what this one does, at the same time.

Collectives move no values. They take their time on a stream of their own, behind what the current stream has and before what
waits for them, as NCCL's do. So this one rank of N has the pieces, gathers, buckets and groups that it would have among N.

Ranks are numbered node by node. Sends have a stream, and receives another: a link carries both directions at once.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from benchmarks.emulated_time import Clock
from ds_memo.distributed import agree

NAME = "alike"
_ONE_WAY, _THERE_AND_BACK = 1, 2
sent: collections.Counter[tuple[str, str]] = collections.Counter()
"""Bytes of the device that this rank has sent, by kind ("all-to-all", "P2P", "collective") and way ("inside a node", "between
nodes"). A collective of ranks of several nodes goes between nodes."""


most_received: dict[torch.dtype, int] = {}
"""Most bytes that were alive at once of what has come from one rank alone, by dtype."""
_received: collections.Counter[torch.dtype] = collections.Counter()
listeners: list[Callable[[int, list[torch.Tensor], list[torch.Tensor]], None]] = []
"""Called with each exchange: its stream, and tensors of the device that it reads and writes."""


class Alike(dist.ProcessGroup):
    """One of some ranks that all do the same.

    Args:
        rank: this one's number among them.
        ranks: their numbers in the run.
        clock: on which collectives take their time, by the bandwidth that the machine has among these ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], name: str, clock: Clock) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self._size, self._name, self._clock = rank, len(ranks), name, clock
        self._stream, self._receiving = torch.cuda.Stream(), torch.cuda.Stream()
        per_node = int(clock.machine.gpus_per_node)
        self._is_near = [of // per_node == ranks[rank] // per_node for of in ranks]
        apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self._bytes_per_s = clock.machine.bandwidth(len(ranks), apart)

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
        return self._takes(tensors, tensors, _THERE_AND_BACK)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._takes(tensors, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            for piece in output:
                _tell(piece, mine)
        return self._takes(inputs, outputs)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> dist.Work:
        for piece in output.view(self._size, -1):
            _tell(piece, mine.view(-1))
        return self._takes(mine, output)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._takes(inputs, outputs)

    allreduce_coalesced, broadcast = allreduce, reduce
    scatter = reduce_scatter = _reduce_scatter_base = gather
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = gather

    def alltoall_base(
        self, output: torch.Tensor, mine: torch.Tensor, come: Sequence[int] = (), go: Sequence[int] = (), *_: Any
    ) -> dist.Work:
        come, go = come or [len(output) // self._size] * self._size, go or [len(mine) // self._size] * self._size
        for piece in output.split(list(come)):
            _tell(piece, mine.split(list(go))[self._rank])
        return self._trade(mine.split(list(go)), output.split(list(come)))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._trade(inputs, outputs)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        nbytes = _on_device(tensors)
        sent["P2P", self._way(to)] += nbytes
        return self._spend(nbytes / self._link(to), tensors, (), self._stream)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        for x in tensors:
            _received[x.dtype] += x.nbytes
            most_received[x.dtype] = max(most_received.get(x.dtype, 0), _received[x.dtype])
            weakref.finalize(x.untyped_storage(), _received.subtract, {x.dtype: x.nbytes}).atexit = False
        return self._spend(_on_device(tensors) / self._link(source), (), tensors, self._receiving)

    # as torch 2.15 calls them
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._takes([], [])

    def _start_coalescing(self, device: torch.device) -> None: ...

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._takes([], [])

    def _takes(self, read: Any, written: Any, ways: int = _ONE_WAY) -> dist.Work:
        nbytes = ways * max(_on_device(read), _on_device(written)) * (self._size - 1) / self._size
        sent["collective", "inside a node" if all(self._is_near) else "between nodes"] += math.ceil(nbytes)
        return self._spend(nbytes / self._bytes_per_s, read, written, self._stream)

    def _trade(self, go: Sequence[torch.Tensor], come: Sequence[torch.Tensor]) -> dist.Work:
        """Send each rank a piece of its own. Traffic in and between nodes overlaps, as do both directions; the slowest counts."""
        seconds = 0.0
        for pieces, counted in ((go, True), (come, False)):
            by_way = collections.Counter[bool]()
            for other, piece in enumerate(pieces):
                if other != self._rank:
                    by_way[self._is_near[other]] += _on_device(piece)
                    sent["all-to-all", self._way(other)] += counted * _on_device(piece)
            machine = self._clock.machine
            seconds = max(seconds, by_way[True] / machine.intra_node, by_way[False] / machine.inter_node)
        return self._spend(seconds, go, come, self._stream)

    def _way(self, other: int) -> str:
        return "inside a node" if self._is_near[other] else "between nodes"

    def _link(self, other: int) -> float:
        """Return the bytes a second to or from another rank."""
        return self._clock.machine.intra_node if self._is_near[other] else self._clock.machine.inter_node

    def _spend(self, seconds: float, read: Any, written: Any, stream: torch.cuda.Stream) -> dist.Work:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._clock.spend(seconds)
        for listen in listeners:
            listen(stream.cuda_stream, *([x for x in tree_leaves(tensors) if x.is_cuda] for tensors in (read, written)))
        return _UnderWay(stream.record_event(), (read, written))


def _on_device(tensors: Any) -> int:
    """Return the bytes of those tensors that are on the device."""
    return sum(x.nbytes for x in tree_leaves(tensors) if x.is_cuda)


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
        future.set_result(tree_leaves(self._moved and self._moved[1]))
        return future


def among(ranks: int, clock: Clock, rank: int = 0) -> None:
    """Make this process one of so many ranks."""

    def make(options: Any, _: Any) -> Alike:
        ranks = options.global_ranks_in_group or range(options.group_size)
        return Alike(options.group_rank, ranks, options.group_id, clock)

    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=ranks)
    agree.meet = lambda mine, ranks, *_: [mine] * len(ranks)  # who would answer has the same to say
    agree.announce = lambda mine, *_, **__: [mine] * ranks
