"""The order of a profile's measurements."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from ds_memo.distributed.agree import Failed, on_this_rank
from ds_memo.profile import run, stopwatch
from ds_memo.remat.layer import Layer
from tests.profile.samples import make_sample


def test_times_of_a_gpu_that_was_woken_otherwise_are_not_used_again(monkeypatch):
    """Profiles before had 0.3 s of warm-up, ones for data, and copies within the CPU's cache. Their key says nothing of it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    asked = run.Asked([], {}, "fit", {}, {}, torch.device("cuda", 0), host_budget=0, warn=print)
    key = asked.key()
    assert key["conditions"] == {"sustained_s": stopwatch.SUSTAINED_S, "host_span": run.SPAN}
    monkeypatch.setattr(stopwatch, "SUSTAINED_S", 0.3)
    assert asked.key() != key
    assert replace(asked, device=torch.device("cpu")).key()["conditions"] == {}


@pytest.mark.parametrize(
    ("fewer_at", "used", "told"),
    [((), (1024, 2048, 4096), None), ((0,), (2048, 4096), "other sizes at 1024"), ((0, 1), (4096,), "other tensors")],
)
def test_lengths_at_which_a_layer_keeps_fewer_tensors(fewer_at, used, told):
    """With few tokens, no token visits some experts."""
    samples = [make_sample(length) for length in (1024, 2048, 4096)]
    samples = [replace(s, outputs=s.outputs[:-1]) if i in fewer_at else s for i, s in enumerate(samples)]
    warned = []
    profile = run._profile("a layer", samples, warned.append)
    assert tuple(sample.length for sample in profile.samples) == used
    profile.costs(1, 8192)
    assert [told in said for said in warned] == ([True] if told else [])


@pytest.mark.parametrize(
    "method, least, used", [("fit", 5000, [5000]), ("fit", 0, [1024, 2048, 4096]), ("fit", 9999, None), ("direct", 9999, None)]
)
def test_a_layer_that_takes_no_other_length_than_its_own(method, least, used, monkeypatch):
    """DeepSpeed's Ulysses is such a layer if lengths are fixed."""
    module, warned, ran = torch.nn.Linear(2, 2), [], []

    def measure(call, length, *rest):
        ran.append(length)
        if length < least:
            raise AssertionError(f"does not match\nthe required shape {least}")
        return make_sample(length)

    monkeypatch.setattr(run, "measure", measure)
    call = types.SimpleNamespace(layer=Layer(0, "blocks.0", module), batch=1, autocast=())
    asked = types.SimpleNamespace(
        calls={0: call}, method=method, lengths={0: (1024, 2048, 4096) if method == "fit" else (5000,)}, full={0: 5000},
        attention=None, device=torch.device("cpu"), in_tiles=False, run_length=0, warn=warned.append, progress=str,
        do=on_this_rank,
    )  # fmt: skip
    if used is None:
        with pytest.raises(Failed, match="the required shape 9999"):
            run._measure_kind(asked, 0)
        assert ran == ([1024, 5000] if method == "fit" else [5000]) and len(warned) == (method == "fit")
        return
    profile = run._measure_kind(asked, 0)
    assert [sample.length for sample in profile.samples] == used
    why = "AssertionError: does not match the required shape 5000"
    said = f"profile: blocks.0 cannot be measured at 1,024 tokens ({why}); measured at 5,000 instead"
    assert warned == ([said] if least else [])
