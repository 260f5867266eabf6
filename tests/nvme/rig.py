"""Rig of the NVMe home's tests: attach with late files, a watched engine, and a host that holds little."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import ds_memo.runtime.session as session_module
from ds_memo.nvme import direct_files
from ds_memo.nvme.file_home import FileHome
from ds_memo.runtime.session import Session
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import GIB
from tests.nvme.ordered_files import OrderedFiles
from tests.swap.ordered import OrderedStreams
from tests.swap.rig import attached

FILES_GIB = 1 / 32
FRAMES = 4
"""The host holds so many of the largest frames."""
DELAYS_S = (0.0, 0.0, 1e-4, 5e-4, 2e-3)


@contextmanager
def late_files(seed: int, delays_s: tuple[float, ...] = DELAYS_S) -> Iterator[None]:
    """Have each part of a transfer wait a random time on its thread."""
    draw, turn, move = random.Random(seed), threading.Lock(), direct_files._move_all

    def late(*args: Any) -> None:
        with turn:
            delay = draw.choice(delays_s)
        time.sleep(delay)
        move(*args)

    with mock.patch.object(direct_files, "_move_all", late):
        yield


class Watched(HostSlab):
    """A slab that checks its budget at each allocation and knows its largest block."""

    largest = 0
    allocations = 0

    def allocate(self, nbytes: int, wanted_by: str) -> Any:
        block = super().allocate(nbytes, wanted_by)
        assert self.used <= self.budget.nbytes and self.pool.used <= self.pool.limit and self.size <= self.pool.limit
        Watched.largest = max(Watched.largest, block.nbytes)
        Watched.allocations += 1
        return block


def host_of(nbytes: int) -> float:
    """Return memo.host_memory_gib for so many bytes, in whole pages."""
    return -(-nbytes // PAGE) * PAGE / GIB


@contextmanager
def attached_with_files(
    model: Any,
    streams: Any,
    config: dict[str, Any],
    path: Any,
    host_bytes: int,
    home: type[FileHome] = FileHome,
    slab: type[HostSlab] = Watched,
    engine: type[SwapEngine] = SwapEngine,
) -> Iterator[Session]:
    """Attach over files below a path, to a host of so many bytes. A checker of order also follows the files."""
    open_files = session_module.open_files

    def opened(*args: Any) -> Any:
        files = open_files(*args)
        return OrderedFiles(files, streams) if isinstance(streams, OrderedStreams) else files

    more = {"nvme": {"path": str(path), "gib": FILES_GIB}, "host_memory_gib": host_of(host_bytes)}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(session_module, "FileHome", home))
        patches.enter_context(mock.patch.object(session_module, "open_files", opened))
        yield patches.enter_context(attached(model, streams, config | more, engine, slab))
