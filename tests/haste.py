"""What makes a process of the tests quicker: done once, when it has imported what it will need."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import sys
from multiprocessing.context import BaseContext

PRELOADED = ["torch", "torch._dynamo", "deepspeed", "transformers", "transformers.models.llama.modeling_llama"]
"""What most tests use sooner or later."""
FOR_FORKED = [
    *PRELOADED,
    "torch._inductor.compile_fx",
    "ds_memo.deepspeed.initialize",
    "tests.distributed_harness.common",
    "tests.frozen",
]
"""What the process that forks others imports for them; its last sees to garbage. DeepSpeed's ZeRO imports torch's inductor, for
Muon: more than a second of every rank's."""


def make_haste() -> None:
    """Bandwidths are measured for less long, and no collection of garbage looks at what importing has left (half a million
    objects, which take it a third of a second)."""
    if "torch" in sys.modules:
        from ds_memo.profile import bandwidth

        bandwidth.SECONDS = 0.02
    if "transformers" in sys.modules:
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def forkserver() -> BaseContext:
    """Starts processes that have imported FOR_FORKED. There is one server per process, which imports what its first user names:
    all name the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(FOR_FORKED)
    return context
