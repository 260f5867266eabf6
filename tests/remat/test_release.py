"""A step's tensors go when the step is over, not when Python next looks for reference cycles."""

import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ds_memo
from ds_memo.profile import LiveBytes


@pytest.mark.parametrize("resident_layers", [0, 2])
def test_nothing_waits_for_the_garbage_collector(resident_layers):
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config).train()
    handle = ds_memo.attach(model, {"enabled": True, "alpha": 0.5, "resident_layers": resident_layers})
    tokens = torch.randint(0, 32, (1, 64))
    after, slab = [], []
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as count:
            for _ in range(5):  # the first is analysed, the others follow the recipe
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                model.zero_grad()
                after.append(count.live)
                slab.append(handle.report()["host"]["slab"])
    finally:
        gc.enable()
        handle.detach()
    assert after[2] == after[3] == after[4], after
    assert slab[2] == slab[3] == slab[4], slab
