"""Two ways to write blocks to a drive and read them back: threads of the standard library, and DeepSpeed's AsyncIO.

    python -m benchmarks.nvme [DIRECTORY] [--gib 2] [--rounds 7] [--json PATH]

Both bypass the page cache and move random blocks from and to memory that is made for them. Printed: median GB/s of each
direction, the range, and how many bytes the page cache holds of the files behind it (it should be none). AsyncIO wants libaio and
compiles for minutes; where it cannot be loaded, that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from ds_memo.nvme.direct_files import DirectFiles
from ds_memo.nvme.directory import open_directory
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.streams import streams_for
from ds_memo.units import GIB, MIB

BLOCK = 64 * MIB
"""Bytes of a block: about the size of a frame of a long layer's tile."""
AIO = {"block_size": MIB, "queue_depth": 64, "single_submit": True, "overlap_events": True, "intra_op_parallelism": 4}
"""DeepSpeed's "aio" section, the fastest of six that were tried, with as many threads as the other way."""
Way = Callable[[bool], None]
"""Writes (True) or reads all blocks."""


@contextmanager
def by_threads(directory: str, blocks: list[Any]) -> Iterator[Way]:
    """Yield the way that ds_memo takes."""
    streams = streams_for(torch.device("cpu"))
    files = DirectFiles([open_directory(directory, print)], len(blocks) * BLOCK + 8 * MIB, streams, preallocate=True)
    extents = [files.extent(BLOCK, "the benchmark") for _ in blocks]

    def move(writes: bool) -> None:
        transfers = [
            files.write(block, extent, ()) if writes else files.read(extent, block, ())
            for block, extent in zip(blocks, extents, strict=True)
        ]
        files.finish()
        if failure := next((t.failure for t in transfers if t.failure is not None), None):
            raise failure

    try:
        yield move
    finally:
        files.close()
        streams.close()


@contextmanager
def by_async_io(directory: str, blocks: list[Any]) -> Iterator[Way]:
    """Yield DeepSpeed's way."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(*AIO.values())
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        names = [os.path.join(folder, str(number)) for number in range(len(blocks))]
        # Of its own making: from other memory it copies to these first, and has a sixth of the rate.
        tensors = [handle.new_cpu_locked_tensor(BLOCK, torch.empty(0, dtype=torch.uint8)) for _ in blocks]
        for tensor, block in zip(tensors, blocks, strict=True):
            torch.cat(block.views(0, BLOCK), out=tensor)
        before = [_sum([tensor]) for tensor in tensors]

        def move(writes: bool) -> None:
            for name, tensor in zip(names, tensors, strict=True):
                (handle.async_pwrite if writes else handle.async_pread)(tensor, name, 0)
            if handle.wait() != len(names):
                raise OSError("AsyncIO has lost a transfer")

        yield move
        if [_sum([tensor]) for tensor in tensors] != before:
            raise OSError("AsyncIO has read something else than it has written")


WAYS = {"threads": by_threads, "async_io": by_async_io}


def measure(directory: str, gib: float, rounds: int) -> dict[str, Any]:
    """Return GB/s of each round, by way and direction, and the growth of the page cache over all rounds."""
    device, count = torch.device("cpu"), max(1, int(gib * GIB) // BLOCK)
    slab = HostSlab(count * BLOCK, HostPool(device))
    blocks = [slab.allocate(BLOCK, "the benchmark") for _ in range(count)]
    found: dict[str, Any] = {"directory": directory, "bytes": count * BLOCK, "gb_per_s": {}, "missing": {}}
    try:
        for block in blocks:
            for view in block.views(0, BLOCK):
                view.random_()
        before = [_sum(block.views(0, BLOCK)) for block in blocks]
        for name, way in WAYS.items():
            found["gb_per_s"][name] = {"write": [], "read": []}
            try:
                with way(directory, blocks) as move:
                    move(True)  # the first write to preallocated bytes is slow
                    cached = _cached()
                    for _ in range(rounds):
                        for direction in ("write", "read"):
                            begin = time.perf_counter()
                            move(direction == "write")
                            rate = count * BLOCK / (time.perf_counter() - begin) / 1e9
                            found["gb_per_s"][name][direction].append(rate)
                    found.setdefault("page_cache_grew", {})[name] = _cached() - cached
                if [_sum(block.views(0, BLOCK)) for block in blocks] != before:
                    raise OSError("threads have read something else than they have written")
            except (ImportError, RuntimeError) as error:  # no DeepSpeed; no libaio, or no compiler
                found["missing"][name] = str(error)
                del found["gb_per_s"][name]
    finally:
        for block in blocks:
            slab.free(block)
        slab.close()
    return found


def _sum(parts: list[torch.Tensor]) -> int:
    return sum(int(part.view(torch.int64).sum()) for part in parts)


def _cached() -> int:
    """Return the bytes of files in this machine's page cache."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Cached"].split()[0]) * 1024


def table(found: dict[str, Any]) -> list[str]:
    """Return the medians as a Markdown table."""
    rows = []
    for name, rates in found["gb_per_s"].items():
        cells = [f"{statistics.median(of):.2f} GB/s ({min(of):.2f} to {max(of):.2f})" for of in rates.values()]
        rows.append((name, *cells, f"{found['page_cache_grew'][name] / MIB:.0f} MiB"))
    rows += [(name, f"not here: {why}", "", "") for name, why in found["missing"].items()]
    return results.markdown(("way", "write", "read", "page cache grew by"), rows)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.nvme", description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=float, default=2.0, help="moved in each round; default: 2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.directory, options.gib, options.rounds)
    print(*table(found), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
