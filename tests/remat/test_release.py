"""Tensors are freed after their last use, without waiting for garbage collection or the next step."""

import gc

import pytest
import torch

import ds_memo
from ds_memo.profile.live import LiveBytes
from tests.models import build


@pytest.fixture
def run():
    """Run three steps of a small model without garbage collection. Return bytes after each forward, each step, and the slab's."""

    def steps(**memo) -> dict[str, list[int]]:
        model = build("llama")
        handle = ds_memo.attach(model, {"enabled": True, **memo})
        tokens = torch.randint(0, 32, (1, 64))
        held = {"forward": [], "step": [], "slab": []}
        gc.collect()
        gc.disable()
        try:
            with LiveBytes() as count:
                for _ in range(3):  # the first is analysed, the others follow the recipe
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    held["forward"].append(count.live)
                    loss.backward()
                    model.zero_grad()
                    del loss
                    held["step"].append(count.live)
                    held["slab"].append(handle.report()["host"]["slab"])
        finally:
            gc.enable()
            handle.detach()
        return held

    return steps


@pytest.mark.parametrize("resident_layers", [0, 2])
def test_nothing_waits_for_the_garbage_collector(run, resident_layers):
    held = run(alpha=0.5, resident_layers=resident_layers)
    assert len(set(held["step"])) == 1, held
    assert len(set(held["slab"])) == 1, held


def test_the_first_step_holds_no_more_than_the_next(run):
    held = run(alpha=0.0, resident_layers=0)
    assert len(set(held["forward"])) == 1, held
