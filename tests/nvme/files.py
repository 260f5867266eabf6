"""Directories, blocks and files for tests."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ds_memo.nvme.direct_files import DirectFiles, DirectTransfer
from ds_memo.nvme.directory import Directory
from ds_memo.nvme.extents import Extent
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import COMPUTE, ThreadStreams

CPU = torch.device("cpu")
MIB = 1 << 20


def directory(path: Path) -> Directory:
    path.mkdir(exist_ok=True)
    return Directory(path, os.stat(path).st_dev, "ext4", None)


def slab_of(pages: int) -> HostSlab:
    return HostSlab(pages * PAGE, HostPool(CPU))


def fill(block: Block, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for view in block.views(0, block.nbytes):
        view.copy_(torch.randint(0, 256, (view.numel(),), generator=made, dtype=torch.uint8))


def content(block: Block) -> torch.Tensor:
    return torch.cat(block.views(0, block.nbytes))


class Files(DirectFiles):
    """Files that wait for no stream, over so many directories below a path."""

    def __init__(self, below: Path, directories: int = 1, budget: int = 256 * MIB, preallocate: bool = False) -> None:
        self.streams = ThreadStreams()
        super().__init__([directory(below / str(number)) for number in range(directories)], budget, self.streams, preallocate)

    def finished(self, transfer: DirectTransfer) -> DirectTransfer:
        """Wait for a transfer; raise what made it fail."""
        self.wait(transfer, self.streams.mark(COMPUTE))
        if transfer.failure is not None:
            raise transfer.failure
        return transfer

    def store(self, block: Block) -> Extent:
        extent = self.extent(block.nbytes, "a test")
        self.finished(self.write(block, extent, ()))
        return extent

    def load(self, extent: Extent, block: Block) -> torch.Tensor:
        self.finished(self.read(extent, block, ()))
        return content(block)

    def close(self) -> None:
        super().close()
        self.streams.close()
