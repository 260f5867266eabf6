"""Layers that attend to an encoder's states: no profile is made, and training is stock's with what is configured or without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import ds_memo
from ds_memo.profile.caught_call import CaughtCall, layer_calls
from ds_memo.profile.layer_kinds import kinds_of
from ds_memo.remat.layer import Layer
from tests.autotune.test_kinds import assert_as_predicted, attached, batch, encoder_and_decoder, outcome
from tests.distributed_harness.common import ON_CPU, DistributedTest
from tests.inside import inside
from tests.models import assert_same, compare_with_stock

LENGTHS = [(120, 40), (240, 40), (60, 40), (40, 120), (200, 200), (90, 200), (240, 16)]
"""Lengths of the encoder's input and the decoder's."""
REFUSAL = (
    "no profile could be made (layer model.decoder.layers.0 attends to 120 states of an encoder: its costs depend on two "
    "lengths, and a profile has one): the last two layers are resident and alpha is what the host holds. Set memo.alpha and "
    "memo.resident_layers to choose otherwise."
)


def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 96}
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).train()


def inputs(encoder: int, decoder: int) -> dict[str, torch.Tensor]:
    return {**batch(encoder), "labels": batch(decoder, seed=1)["labels"]}


def test_without_a_profile(tmp_path: Path) -> None:
    """It is said once, it shows in the report, and gradients are stock's."""
    model = encoder_and_decoder()
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)})
    with pytest.warns(ds_memo.MemoWarning) as said:
        for lengths in LENGTHS:
            assert_same(outcome(model, inputs(*lengths)), outcome(stock, inputs(*lengths)))
    report = handle.report()
    assert report["warnings"] == [str(warning.message) for warning in said] == [REFUSAL]
    assert report["profile"] is None and report["predicted"] is None and report["bytes_to_host"] and report["checkpointing"]
    assert not [*tmp_path.glob("profiles/*")]
    handle.detach()


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
def test_t5_without_a_profile(tmp_path: Path) -> None:
    """Its layers hand on position biases, which want a gradient."""
    section = {"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}
    report = compare_with_stock(t5(), lambda model, number: outcome(model, inputs(*LENGTHS[number])), section)
    assert sum("120 states of an encoder" in warning for warning in report["warnings"]) == 1
    assert report["profile"] is None


@pytest.mark.slow
def test_both_as_long_in_the_first_batch(tmp_path: Path) -> None:
    """Then a profile is made. Other lengths are solved as if both were as long, which is said; gradients are stock's."""
    model = encoder_and_decoder()
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path)
    assert_same(outcome(model, inputs(40, 40)), outcome(stock, inputs(40, 40)))
    assert_as_predicted(handle)
    for lengths in [*LENGTHS, (40, 40)]:
        assert_same(outcome(model, inputs(*lengths)), outcome(stock, inputs(*lengths)))
    report = handle.report()
    as_long, again = report["warnings"]
    assert as_long.startswith("layer model.decoder.layers.0 attends to an encoder's states, which were as long as its own")
    assert again.startswith("BartDecoderLayer: cannot be measured again (layer model.decoder.layers.0 attends to 40 states of")
    assert report["profile"]["changes"] == [  # the decoder, once both are as long again
        f"measured Bart{kind}Layer again, with {length} tokens: the first batches told too little"
        for kind, length in (("Encoder", 120), ("Decoder", 200))
    ]
    handle.detach()


def test_what_wants_a_gradient_in_training_wants_one_in_the_profile() -> None:
    """T5's layers hand on two position biases: of self-attention it is trained, of cross-attention it is zeros."""
    handle = ds_memo.attach(model := t5(), {"alpha": 0.5, "resident_layers": 1})
    given, kinds = inputs(12, 8), kinds_of(inside(handle).layers)
    instead, cpu = inside(handle).remat.instead, torch.device("cpu")
    profiled = layer_calls(instead, cpu, model, (), given, kinds, lambda calls: len(calls) == max(kinds) + 1)
    trained: dict[int, CaughtCall] = {}

    def note(layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        trained.setdefault(kinds[layer.index], CaughtCall(layer, fn, args, kwargs))
        return fn(*args, **kwargs)

    with inside(handle).remat.instead(note):
        model(**given)
    handle.detach()
    wants = [[[x.requires_grad for x in call._other_tensors()] for call in calls.values()] for calls in (profiled, trained)]
    assert wants[0] == wants[1] and list(profiled) == list(trained)
    assert wants[0][-1].count(True) == 2, "the position bias and the encoder's states"


@pytest.mark.skipif(not ON_CPU, reason="two CPU ranks")
class TestEncoderOnRanks(DistributedTest):
    world_size = 2
    exec_timeout = 60

    @pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
    def test_all_ranks_go_without_a_profile(self, tmp_path: Path) -> None:
        """Also one whose first batch has both as long; all of them say the same."""
        model = encoder_and_decoder()
        stock = copy.deepcopy(model)
        handle = attached(model, tmp_path)
        for lengths in LENGTHS[:2] if dist.get_rank() else [(50, 50), (60, 30)]:
            assert_same(outcome(model, inputs(*lengths)), outcome(stock, inputs(*lengths)))
        assert handle.report()["warnings"] == [REFUSAL] and handle.report()["profile"] is None
        handle.detach()
