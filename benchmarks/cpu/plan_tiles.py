"""Plan layers in tiles: python -m benchmarks.plan --tiles

Trains a model of 32 layers and 64 tiles, 64 wide, on the allocator op for CPUs. The first three steps are logged, the fourth
follows the plan. Then the log is planned once more, on an idle machine or not: processor seconds beside wall seconds. 4 minutes.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo
from ds_memo.plan import plan_trace

LAYERS, TILES, TOKENS = 32, 64, 256


def tiles() -> dict:
    """Return the plan's numbers, and what the step that followed it hit and missed."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, use_cache=False, **sizes))
    section = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": TOKENS, "head_groups": 2}
    handle = ds_memo.attach(model, section)
    ids = torch.randint(sizes["vocab_size"], (TILES, TOKENS))  # a sequence is a tile: attention takes little time
    for _ in range(4):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
    report, addresses = handle.report(), handle._session.addresses
    assert report["tiles"]["layers"] == list(range(LAYERS))
    trace = addresses.log.trace()
    handle.detach()
    began, busy = time.perf_counter(), time.process_time()
    plan = plan_trace(trace)
    return {
        "layers": LAYERS,
        "tiles": TILES,
        "requests": len(trace.requests),
        "CPU s": round(time.process_time() - busy, 2),
        "seconds": round(time.perf_counter() - began, 2),
        "peak/bound": round(plan.peak / plan.lower_bound, 4),
        "by": plan.method,
        "hits": report["plan"]["hits"],
        "misses": sum(report["plan"]["misses"].values()),
    }
