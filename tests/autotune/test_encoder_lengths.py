"""Decoders that attend to an encoder's states: what they keep and take depends on two lengths, and both change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import ds_memo
from ds_memo.autotune import model_profile as profiling
from ds_memo.profile import run
from ds_memo.profile.call import LayerCall, layer_calls
from ds_memo.profile.kinds import kinds_of
from ds_memo.profile.layer import measure
from ds_memo.profile.sample import LayerProfile
from ds_memo.remat.checkpoint import Layer
from tests.autotune.test_kinds import assert_as_predicted, attached, batch, encoder_and_decoder, outcome
from tests.models import assert_same

LENGTHS = [(120, 40), (240, 40), (60, 40), (40, 120), (200, 200), (90, 200), (240, 16)]
"""Lengths of the encoder's input and the decoder's."""


def inputs(encoder: int, decoder: int) -> dict[str, torch.Tensor]:
    return {**batch(encoder), "labels": batch(decoder, seed=1)["labels"]}


@pytest.mark.parametrize("first", [0, 3, 4], ids=["a long text", "a short text", "both as long"])
def test_bytes_are_as_predicted_at_all_lengths(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first batch could not tell, for both were as long: then it is measured once more."""
    monkeypatch.setattr(profiling, "SHORTEST", 16)
    model = encoder_and_decoder()
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path, device_memory_gib=16 / 1024)
    for encoder, decoder in LENGTHS[first:] + LENGTHS[:first]:
        assert_same(outcome(model, inputs(encoder, decoder)), outcome(stock, inputs(encoder, decoder)))
        assert_as_predicted(handle)
    again = [change for change in handle.report()["profile"]["changes"] if "again" in change]
    assert again == (
        ["measured BartDecoderLayer again, with 200 tokens beside 90: the first batches told too little"] * (first == 4)
    )
    encoder, decoder = handle._session.tuner.profile.kinds
    assert encoder.half_source is None and decoder.half_source is not None
    handle.detach()


def test_the_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's length is not known: what is kept is not what was said."""
    measured = run._measure_kind
    monkeypatch.setattr(run, "_measure_kind", lambda *args: replace(measured(*args), half_source=None))
    handle = attached(model := encoder_and_decoder(), tmp_path)
    for encoder, decoder in LENGTHS[:2]:
        outcome(model, inputs(encoder, decoder))
    with pytest.raises(AssertionError):
        assert_as_predicted(handle)
    handle.detach()


def test_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times_by_flops: None) -> None:
    """Two short lengths and a check, all beside the same part of the encoder's states."""
    for module in (run, profiling):
        monkeypatch.setattr(module, "SHORTEST", 64)
    monkeypatch.setattr(run, "LONGEST", 64)
    monkeypatch.setattr(run, "WIDTHS", 1)
    model = encoder_and_decoder()
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path, device_memory_gib=4 / 1024)
    for encoder, decoder in [(240, 200), (100, 130), (250, 100)]:
        assert_same(outcome(model, inputs(encoder, decoder)), outcome(stock, inputs(encoder, decoder)))
        assert_as_predicted(handle)
    decoder = handle._session.tuner.profile.kinds[1]
    assert [(s.length, s.source) for s in decoder.taken] == [(16, 64), (32, 64), (64, 64)]
    assert (decoder.half_source.length, decoder.half_source.source) == (64, 32)
    handle.detach()


def test_an_encoder_that_cannot_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are as they were called; what depends on its length is not known, and said once."""
    model = encoder_and_decoder()
    stock = copy.deepcopy(model)
    measure = run.measure

    def refuses(call: Any, length: int, device: Any, kernel: Any, source: int) -> Any:
        assert source in (0, call.source), "the encoder knows its length"
        return measure(call, length, device, kernel, source)

    monkeypatch.setattr(run, "measure", refuses)
    handle = attached(model, tmp_path)
    for encoder, decoder in [(120, 40), (120, 60), (100, 40)]:
        assert_same(outcome(model, inputs(encoder, decoder)), outcome(stock, inputs(encoder, decoder)))
    report = handle.report()
    (said,) = report["warnings"]
    assert "cannot be measured at 40 tokens beside 120" in said and "the encoder knows its length" in said
    assert report["profile"]["changes"] == []
    handle.detach()


def test_ranks_with_other_lengths_keep_the_memory_of_the_one_that_needs_most() -> None:
    from ds_memo.profile.merge_ranks import most_careful
    from tests.profile.samples import make_profile, make_sample

    def of_rank(source: int, working: int) -> Any:
        half = replace(make_sample(2048, working=working), source=source // 2)
        (kind,) = make_profile().kinds
        samples = tuple(replace(make_sample(n, working=working), source=source) for n in (1024, 2048))
        return replace(make_profile(), kinds=(replace(kind, samples=samples, half_source=half),))

    (kind,) = most_careful([of_rank(512, 100), of_rank(512, 300)]).kinds
    assert [sample.working_bytes for sample in (*kind.taken, kind.half_source)] == [300 * 1024, 300 * 2048, 300 * 2048]


@pytest.mark.parametrize("encoder, decoder, most", [(2000, 960, 1.15), (2000, 240, 1.9), (240, 2000, 1.25)])
def test_what_the_device_holds_at_once_is_never_said_too_low(encoder: int, decoder: int, most: float, tmp_path: Path) -> None:
    """Whichever of the two rules: between two shares that were measured nearly exact, beyond them at most what is possible."""
    handle = attached(model := encoder_and_decoder(positions=2048), tmp_path)

    def called(*lengths: int) -> LayerCall:
        calls = layer_calls(
            handle._session.remat, model, (), inputs(*lengths), kinds_of(handle._session.layers), lambda calls: len(calls) == 2
        )
        return calls[1]

    first, cpu = called(1024, 512), torch.device("cpu")
    shorter, longest, half = (measure(first, n, cpu, source=m) for n, m in [(256, 1024), (512, 1024), (512, 512)])
    said = LayerProfile("", (shorter, longest), half_source=half).costs(1, decoder, encoder)
    there = measure(called(encoder, decoder), decoder, cpu)
    for want, got in [
        (there.forward_bytes, said.working.forward),
        (there.working_bytes, said.working.backward),
        (there.working_bytes_at_0, said.working_at_0.backward),
        (there.working_bytes_without_attention, said.working_without_attention.backward),
    ]:
        assert want <= got <= most * want
    handle.detach()


def test_what_wants_a_gradient_in_training_wants_one_in_the_profile() -> None:
    """T5's layers hand on two position biases: of self-attention it is trained, of cross-attention it is zeros."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 99}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).train()
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    given, kinds = inputs(12, 8), kinds_of(handle._session.layers)
    profiled = layer_calls(handle._session.remat, model, (), given, kinds, lambda calls: len(calls) == max(kinds) + 1)
    trained: dict[int, LayerCall] = {}

    def note(layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], _: bool) -> Any:
        trained.setdefault(kinds[layer.index], LayerCall(layer, fn, args, kwargs))
        return fn(*args, **kwargs)

    with handle._session.remat.instead(note):
        model(**given)
    handle.detach()
    wants = [[[x.requires_grad for x in call._other_tensors()] for call in calls.values()] for calls in (profiled, trained)]
    assert wants[0] == wants[1] and list(profiled) == list(trained)
    assert wants[0][-1].count(True) == 2, "the position bias and the encoder's states"
