"""Every causal language model of Transformers in parts: exact, or refused before training; none in between.

pytest -m sweep tests/sequence/test_sweep.py -s        # prints each family and the counts

Two ranks trade heads; four do so in pairs, around a ring of two. Sequences hold one document, then several. The results stand in
tests/data/sequence_families.json, from which docs/support.md is made. With WRITE=1 in the environment the test writes them anew.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.distributed.agree import from_all_ranks
from ds_memo.hf.find_layers import find_layers
from ds_memo.runtime.sequence import decoders
from tests import architectures
from tests.distributed_harness.common import DistributedTest
from tests.runtime.test_sequence import gradients
from tests.sequence.whole_and_parts import Batch, Lengths, Outcome, make, mean_loss, whole

RESULTS = Path(__file__).parents[1] / "data" / "sequence_families.json"
LAYOUTS: tuple[Lengths, ...] = (((40,), (40,)), ((14, 9, 17), (10, 30)))
EXACT_LOGITS, EXACT_GRADIENTS = 1e-5, 1e-3
"""Largest relative distance in float32, of sums whose terms have both signs."""
SECONDS = 300
"""For one family on a busy machine."""
KINDS = {
    "is an encoder and a decoder": "has an encoder and a decoder",
    "cannot keep them apart": "exact with one document to a row; more are refused",
    "computes token": "mixes tokens outside attention and known mixers, or numbers them by itself",
    "an nn.Conv1d of": "mixes tokens by a convolution that is not known",
    "cannot be tried": "computes attention, or masks, by code of its own",
    "a mask of its own": "computes attention, or masks, by code of its own",
    "makes a mask": "makes a mask that is no interval of keys",
    "which attention in parts does not know": "hands attention more than queries, keys and values",
}
"""Words of a refusal, and its kind."""
EXACT = {
    *("llama", "qwen3", "qwen3_moe", "mixtral", "gemma", "glm4_moe", "gpt_neox", "olmo2", "phi3", "mistral", "gemma2"),
    *(
        "gemma3_text",
        "gpt_oss",
        "llama4_text",
        "deepseek_v3",
        "qwen3_next",
        "qwen3_5",
        "nemotron_h",
        "jamba",
        "falcon_h1",
        "mamba2",
    ),
}
REFUSED = {"bart"}


def wholes(name: str) -> tuple[Any, list[Batch], list[Outcome]]:
    model = make(name)
    batches = [Batch(lengths, vocabulary=model.config.get_text_config().vocab_size) for lengths in LAYOUTS]
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa knows no soft cap
    return model, batches, [batch.apart(model) for batch in batches]


def under_fsdp2(name: str, layouts: int) -> float:
    """Return the same on a mesh, whose ranks hold pieces of the weights, too. The first `layouts` are compared."""
    model, batches, wants = wholes(name)
    ranks = dist.get_world_size()
    shared = ds_memo.share_sequences(model, init_device_mesh("cpu", (ranks,)), ulysses_size=2)
    as_whole = decoders[model].takes_whole
    for _, layer in find_layers(model, None) if name != "zamba2" else ():  # whose layers share weights
        fully_shard(layer)
    fully_shard(model)
    worst: list[Any] = []
    for batch, want in list(zip(batches, wants, strict=True))[:layouts]:
        given = {"input_ids": batch.tokens, "position_ids": batch.positions, "labels": batch.labels}
        given = shared.part(given, as_whole)
        labels = given.pop("labels")
        logits = model(**given, use_cache=False).logits
        shared.mean_loss(mean_loss(logits, labels), labels).backward()
        of_logits, of_gradient, _ = Outcome(whole(logits), gradients(model)).off(want)
        worst += from_all_ranks(max(of_logits / EXACT_LOGITS, of_gradient / EXACT_GRADIENTS))
    return max(worst)


def in_parts(name: str) -> float:
    """Return how far logits and gradients of parts are from those of whole sequences; above 1: not exact.

    Raises:
        ds_memo.MemoError: the model is refused.
    """
    model, batches, wants = wholes(name)
    ranks = dist.get_world_size()
    sequence.set_up(model, ranks, ulysses=2)
    sequence.refuse_inexact(model, model)
    worst: list[Any] = [0.0] * ranks
    for batch, want in zip(batches, wants, strict=True):
        if max(worst) <= 1:  # what is wrong is not made good by a refusal of the next batch
            of_logits, of_gradient, _ = batch.in_parts(model).off(want)
            dist.all_gather_object(worst, max(of_logits / EXACT_LOGITS, of_gradient / EXACT_GRADIENTS))
    return max(worst)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
class TestFamilies(DistributedTest):
    exec_timeout: ClassVar[float] = 3600

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_each_is_exact_or_refused(self, world_size: int) -> None:
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
        assert not {name: kind for name, kind in found.items() if kind.startswith("WRONG")}
        ways = {} if not RESULTS.exists() else json.loads(RESULTS.read_text())
        if os.environ.get("WRITE") and dist.get_rank() == 0:
            RESULTS.write_text(json.dumps({**ways, str(world_size): found}, indent=1) + "\n")
        exact = {name for name, kind in found.items() if kind == "exact"}
        assert exact >= EXACT and not exact & REFUSED and found.keys() >= REFUSED
        assert os.environ.get("WRITE") or not architectures.IS_PINNED or found == ways[str(world_size)]

    def test_what_is_exact_is_so_under_fsdp2(self) -> None:
        """On a mesh of two ranks, without DeepSpeed's engine."""
        kinds = {name: kind for name, kind in json.loads(RESULTS.read_text())["2"].items() if name in architectures.NAMES}
        off = {name: under_fsdp2(name, 2 if kind == "exact" else 1) for name, kind in kinds.items() if kind.startswith("exact")}
        assert off.keys() >= EXACT and not {name: far for name, far in off.items() if far > 1}


def _too_late(*_: Any) -> None:
    pytest.fail(f"a family took more than {SECONDS} s")
