"""The files of one rank, from the "memo" section's nvme."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ds_memo.config import NvmeConfig
from ds_memo.errors import MemoError
from ds_memo.memory.host import ranks_on_node
from ds_memo.memory.numa import node_of
from ds_memo.nvme.direct_files import DirectFiles
from ds_memo.nvme.directory import Directory, near, open_directory, room
from ds_memo.swap.stream_protocol import Streams
from ds_memo.units import GIB


def open_files(
    config: NvmeConfig,
    device: torch.device,
    streams: Streams,
    agree: Callable[[int], int],
    warn: Callable[[str], None],
) -> DirectFiles:
    """Open a file in each directory that this rank uses: those on drives near its device.

    Args:
        agree: returns the bytes of all ranks for those of this one. All ranks call it together.

    Raises:
        MemoError: a directory is refused, or has no room, on this rank or on another.
    """
    try:
        files = _opened(config, device, streams, warn)
    except Exception:
        agree(0)  # the others hear of it here, not in their first collective, where they would wait
        raise
    agreed = agree(files.budget)
    if not agreed:
        files.close()
        raise MemoError("another rank could not open its files for activations; look at its error")
    files.limit(agreed)
    return files


def directories_of(config: NvmeConfig, device: torch.device, warn: Callable[[str], None]) -> list[Directory]:
    """Return the directories of a rank: of those in the section, the ones near its device."""
    node = node_of(device)
    return near([open_directory(path, warn) for path in config.paths], None if node is None else node.number)


def _opened(config: NvmeConfig, device: torch.device, streams: Streams, warn: Callable[[str], None]) -> DirectFiles:
    directories, ranks = directories_of(config, device, warn), ranks_on_node()
    free = room(directories)
    budget = int(free if config.gib is None else config.gib * GIB) // ranks
    files = DirectFiles(directories, budget, streams, preallocate=config.gib is not None)
    if not files.budget:
        files.close()
        raise MemoError(
            f"memo.nvme: {budget / GIB:.3g} GiB for each of {ranks} ranks in {', '.join(str(d.path) for d in directories)}, "
            "too little for one stripe; free some, or raise memo.nvme.gib"
        )
    try:
        silently = any(files.buffer_silently())
    except OSError as error:
        files.close()
        raise MemoError(f"memo.nvme.path: the first write failed: {error}; name a directory on another drive") from error
    if silently:
        warn(
            f"memo.nvme.path: {', '.join(sorted({d.kind for d in directories}))} keeps in the page cache what was to bypass it, "
            "and host memory is what is short. Name a directory on ext4 or xfs"
        )
    return files


def shares_drives_with(config: NvmeConfig, path: str) -> bool:
    """Return True if a path is on a file system that memo.nvme.path uses."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    return any(os.stat(directory).st_dev == device for directory in config.paths)
