"""Packed documents are profiled at short lengths, on a device that has no room for an uncheckpointed layer at full length."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.profile import run
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.live import LiveBytes
from tests.everyday import everyday
from tests.models import VOCAB, build
from tests.sequence.test_documents import use_flash
from tests.sequence.whole_and_parts import mean_loss

DOCUMENTS = (30, 5, 100, 1, 900, 964)
LENGTH = sum(DOCUMENTS)
LONGEST = 256
"""Tokens of the longest measured call."""
DEVICE = 12 << 20
"""Bytes: enough for a step whose layers are checkpointed, not for one layer of LENGTH tokens that saves all for its backward."""

pytestmark = pytest.mark.usefixtures("own_cache", "times_by_flops")


class SmallDevice(LiveBytes):
    """A device of so many bytes, as the CPU is not."""

    def _count(self, storage: torch.UntypedStorage) -> None:
        super()._count(storage)
        if self.live > DEVICE:
            raise torch.OutOfMemoryError(f"{self.live} bytes")


def batch(told_by: str) -> dict[str, Any]:
    """Tokens as Transformers' DataCollatorWithFlattening packs them."""
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
    ends = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32)
    told: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    told |= {"max_length_q": max(DOCUMENTS), "max_length_k": torch.tensor(max(DOCUMENTS))}
    return {"input_ids": tokens, "position_ids": positions, **(told if told_by == "cu_seq_lens" else {})}


def profiled(told_by: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[list[int]]]:
    """Train a step whose layers are measured on a SmallDevice; return the report, and the documents' ends in measured calls."""
    model = build("llama")
    kernels = use_flash(model, "flash_attention_2", monkeypatch)
    measured: list[list[int]] = []
    measure_kinds = run.measure_kinds

    def on_a_small_device(*args: Any) -> Any:
        before = len(kernels.calls)
        with SmallDevice():
            kinds = measure_kinds(*args)
        measured.extend(kernels.calls[before:])
        return kinds

    monkeypatch.setattr(run, "measure_kinds", on_a_small_device)
    monkeypatch.setattr(run, "LONGEST", LONGEST)
    monkeypatch.setattr(run, "SHORTEST", LONGEST)
    handle = ds_memo.attach(model, {"device_memory_gib": DEVICE / 2**30, "plan": {"enabled": False}})
    given = batch(told_by)
    mean_loss(model(**given, use_cache=False).logits, given["input_ids"]).backward()
    report = handle.report()
    handle.detach()
    return report, measured


@pytest.mark.parametrize("told_by", everyday(["cu_seq_lens", "position_ids"], ["cu_seq_lens"]))
def test_a_packed_batch_is_shortened(told_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, measured = profiled(told_by, monkeypatch)
    assert report["profile"]["method"] == "fit"
    assert {tuple(ends) for ends in measured} == {(0, 30, 35, 64), (0, 30, 35, 128), (0, 30, 35, 135, 136, LONGEST)}


@pytest.mark.slow
def test_a_layer_at_full_length_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of the test above."""
    monkeypatch.setattr(CaughtCall, "can_shorten", lambda call: False)
    with pytest.warns(ds_memo.MemoWarning, match="no profile could be made .*OutOfMemoryError"):
        report, _ = profiled("cu_seq_lens", monkeypatch)
    assert report["profile"] is None
