"""Every causal language model of Transformers in parts on two ranks: exact, or refused before training; none in between.

pytest -m sweep tests/deepspeed/test_ulysses_sweep.py -s        # prints each family and the counts

The results stand in tests/data/ulysses_families.json, from which docs/support.md is made. With WRITE=1 in the environment the
test writes them anew.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import deepspeed.comm as dist
import pytest
import torch

import ds_memo
from ds_memo.deepspeed import sequence
from tests import architectures
from tests.deepspeed.matrix import mean_loss
from tests.deepspeed.test_ulysses import SUMS, part
from tests.distributed_harness.common import DistributedTest
from tests.models import gradients

RESULTS = Path(__file__).parents[1] / "data" / "ulysses_families.json"
LENGTH = 40
EXACT_LOGITS, EXACT_GRADIENTS = 1e-5, 1e-3
"""Largest relative distance in float32. The worst found are 1e-7 and 3e-5: a gradient that sums terms of both signs."""
NOISE = 1e-9
"""Share of the largest gradient below which a gradient is zero in exact arithmetic, as a key's bias."""
SECONDS = 200
"""For one family. Kimi-Linear takes a minute on a busy machine."""
KINDS = {
    "computes token": "mixes tokens outside attention, or numbers them by itself",
    "needs a mask of length": "has eager attention alone",
    "attends to a window": "has windows that sdpa knows by the mask alone",
    "no position_ids": "hands attention no position_ids",
    "elements a head": "has keys and values of two sizes",
    "cannot be tried": "fails with DeepSpeed's attention, or at other lengths",
    "attention heads are no multiple": "has heads that do not divide",
}
"""Words of a refusal, and its kind."""
EXACT = {"llama", "qwen3", "qwen3_moe", "mixtral", "gemma", "glm4_moe", "gpt_neox", "olmo2", "phi3", "mistral", "gemma3_text"}
REFUSED = {"qwen3_next", "qwen3_5", "nemotron_h", "jamba", "lfm2_moe", "falcon_h1", "mamba2", "bart", "llama4_text"}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, architectures.VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], torch.arange(LENGTH).expand(2, -1), tokens[:, 1:]


def in_parts(name: str) -> float:
    """Return how far logits and gradients of parts are from those of whole sequences; above 1: not exact.

    Raises:
        ds_memo.MemoError: the model is refused.
    """
    tokens, positions, labels = batch()
    model = architectures.build(name).eval()
    whole = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    mean_loss(whole, labels).backward()
    want = gradients(model)
    model.zero_grad()
    sequence.set_up(model, 2)
    sequence.refuse_inexact(model, model)
    logits = model(input_ids=part(tokens), position_ids=part(positions), use_cache=False).logits
    sequence.mean_over_ranks(mean_loss(logits, part(labels)), part(labels), SUMS).backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
    got = gradients(model)
    largest = max(float(gradient.norm()) for gradient in want.values() if gradient is not None)
    of_gradients = [
        (got[key] - gradient).norm() / gradient.norm() / EXACT_GRADIENTS
        for key, gradient in want.items()
        if gradient is not None and gradient.norm() > NOISE * largest
    ]
    of_logits = (logits - part(whole)).norm() / part(whole).norm() / EXACT_LOGITS
    worst = torch.stack([of_logits.detach(), *of_gradients]).nan_to_num(torch.inf).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
class TestFamilies(DistributedTest):
    world_size = 2
    exec_timeout: ClassVar[float] = 1800

    def test_each_is_exact_or_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for field in ("sliding_window", "attention_window"):  # what lies behind a window is seen, too
            monkeypatch.setitem(architectures.SIZES, field, 128)
        found: dict[str, str] = {}
        signal.signal(signal.SIGALRM, _too_late)
        for name in architectures.NAMES:
            if name in architectures.NOT_COMPARED:
                continue
            signal.alarm(SECONDS)
            try:
                off = in_parts(name)
                found[name] = "exact" if off <= 1 else f"WRONG: {off:.2g} times the distance allowed"
                said = found[name]
            except ds_memo.MemoError as refusal:
                said = str(refusal)
                found[name] = next((kind for words, kind in KINDS.items() if words in said), f"WRONG: {said}")
            except Exception as error:
                found[name] = said = f"WRONG: {error!r}"
            if dist.get_rank() == 0:
                print(f"{name}: {said[:150]}", flush=True)
        signal.alarm(0)
        if dist.get_rank() == 0:
            print(*(f"{count:4} {kind}" for kind, count in Counter(found.values()).most_common()), sep="\n", flush=True)
        wrong = {name: kind for name, kind in found.items() if kind.startswith("WRONG")}
        assert not wrong
        if os.environ.get("WRITE") and dist.get_rank() == 0:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        exact = {name for name, kind in found.items() if kind == "exact"}
        assert exact >= EXACT and not exact & REFUSED and found.keys() >= REFUSED
        assert os.environ.get("WRITE") or found == json.loads(RESULTS.read_text())


def _too_late(*_: Any) -> None:
    pytest.fail(f"a family took more than {SECONDS} s")
