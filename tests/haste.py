"""Speeds up a test process, once, when it has imported what it needs."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import sys
from contextlib import suppress
from multiprocessing.context import BaseContext

from ds_memo.compiled import Unavailable
from ds_memo.plan import search

PRELOADED = ["torch", "torch._dynamo", "deepspeed", "transformers", "transformers.models.llama.modeling_llama"]
"""Modules that most tests use."""
FOR_FORKED = [
    *PRELOADED,
    "torch._inductor.compile_fx",
    "ds_memo.deepspeed.initialize",
    "tests.distributed_harness.common",
    "tests.frozen",
]
"""Imports of the fork server; the last one freezes them. DeepSpeed's ZeRO imports torch's inductor for Muon, which takes every
rank more than a second."""


def make_haste() -> None:
    """Measure bandwidths for a shorter time, compile the exact search before any test keeps a time limit, and freeze imported
    objects (half a million, 0.3 s per garbage collection)."""
    with suppress(Unavailable):
        search.load()
    if "torch" in sys.modules:
        from ds_memo.profile import bandwidth

        bandwidth.SECONDS = 0.02
    if "transformers" in sys.modules:
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def forkserver() -> BaseContext:
    """Return a context whose processes have imported FOR_FORKED.

    A process has one server, which imports the list of its first user. So all users pass the same list.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(FOR_FORKED)
    return context
