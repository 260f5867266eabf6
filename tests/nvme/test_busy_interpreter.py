"""Files make progress while the training thread computes in Python and never sleeps.

python -m tests.nvme.test_busy_interpreter FOLDER       # GB/s, with the interpreter idle and busy
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

from tests.nvme.files import MIB, Files, content, fill, slab_of

BLOCK = 64 * MIB
BLOCKS = 4
SECONDS = 3.0


def spin(until) -> int:
    """Compute in Python until a condition holds; return the rounds."""
    rounds = 0
    while not until():
        rounds += 1
    return rounds


def test_transfers_end_while_python_computes(tmp_path):
    files, slab = Files(tmp_path), slab_of(2 * 16 * MIB // 4096)
    block = slab.allocate(16 * MIB, "a test")
    fill(block, 1)
    wanted, extent = content(block), files.extent(16 * MIB, "a test")
    deadline = time.monotonic() + 60
    write = files.write(block, extent, ())
    assert spin(lambda: files.done(write) or time.monotonic() > deadline)
    assert files.done(write) and write.failure is None
    fill(block, 2)
    read = files.read(extent, block, ())
    assert spin(lambda: files.done(read) or time.monotonic() > deadline)
    assert files.done(read) and bool((content(block) == wanted).all())
    files.close()


def rate(files: Files, pairs: list, writes: bool, busy: bool) -> float:
    """Return GB/s while some blocks are moved again and again."""

    def move(pair):
        block, extent = pair
        return files.write(block, extent, ()) if writes else files.read(extent, block, ())

    begin, moved = time.perf_counter(), 0
    under_way = deque((move(pair), pair) for pair in pairs)
    while under_way:
        transfer, pair = under_way.popleft()
        if busy:
            spin(lambda transfer=transfer: transfer.over.is_set())
        files.finished(transfer)
        moved += BLOCK
        if time.perf_counter() - begin < SECONDS:
            under_way.append((move(pair), pair))
    return moved / (time.perf_counter() - begin) / 1e9


def measure(folder: Path) -> None:
    files, slab = Files(folder, budget=2 * BLOCK * BLOCKS), slab_of(BLOCK * BLOCKS // 4096)
    blocks = [slab.allocate(BLOCK, "a measurement") for _ in range(BLOCKS)]
    for block in blocks:
        fill(block, 0)
    pairs = [(block, files.store(block)) for block in blocks]
    for _ in range(2):
        for writes in (True, False):
            idle, busy = (rate(files, pairs, writes, busy) for busy in (False, True))
            print(f"{'write' if writes else 'read'}: {idle:.2f} GB/s idle, {busy:.2f} GB/s busy")
    files.close()


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
