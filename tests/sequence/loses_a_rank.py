"""A rank of a ring that trains, for test_lost_rank.py: python -m tests.sequence.loses_a_rank RANK RANKS STORE SIGNAL.

In the third step rank 2 sends itself the signal, in the middle of a forward, between two steps of the ring.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import deepspeed
import pytest
import torch

from ds_memo.deepspeed import sequence
from ds_memo.sequence import kernels
from tests.faults import put_in
from tests.models import LAYERS, build
from tests.sequence.whole_and_parts import Batch

LOST, STEPS = 2, 3
SECONDS = 20
"""After which the process groups give up a rank."""


def main(rank: int, ranks: int, store: str, how: int) -> None:
    torch.set_num_threads(1)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({key: str(value) for key, value in where.items()})
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=SECONDS)
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    model = build("llama")
    sequence.set_up(model, ranks, ulysses=1)
    calls = 0

    def lost(right, *args):
        nonlocal calls
        calls += 1
        if rank == LOST and calls == (STEPS - 1) * LAYERS * ranks + 2:
            os.kill(os.getpid(), how)
        return right(*args)

    put_in(pytest.MonkeyPatch(), kernels, "forward", lost)
    for step in range(STEPS):
        Batch(((45,),), step).in_parts(model)
        print(f"step {step} is done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
