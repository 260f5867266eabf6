"""The order in which a run is profiled."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from ds_memo.profile import run
from tests.profile.samples import make_sample


def test_the_device_is_awake_before_anything_is_measured(monkeypatch):
    """A first profile is taken on an idle GPU, and what it says stays in the cache."""
    order = []

    def measured(*args):
        order.append("measured")
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_wake", lambda device: order.append(f"woken {device}"))
    monkeypatch.setattr(run, "_measure_kind", measured)
    with pytest.raises(KeyboardInterrupt):
        run.take_profile(types.SimpleNamespace(calls=[0], device=torch.device("cuda", 0)), warn=print)
    assert order == ["woken cuda:0", "measured"]


def test_a_cpu_is_not_woken(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda *args: pytest.fail("matrix products on a CPU"))
    run._wake(torch.device("cpu"))


@pytest.mark.parametrize(
    ("fewer_at", "used", "told"),
    [((), (1024, 2048), None), ((0,), (2048, 4096), "other sizes than the lines say"), ((0, 1), (4096,), "other tensors")],
)
def test_lengths_at_which_a_layer_keeps_fewer_tensors(fewer_at, used, told):
    """Experts that no token visits, where there are few tokens."""
    samples = [make_sample(length) for length in (1024, 2048, 4096)]
    samples = [replace(s, outputs=s.outputs[:-1]) if i in fewer_at else s for i, s in enumerate(samples)]
    warned = []
    profile = run._profile("a layer", "fit", samples, warned.append)
    assert tuple(sample.length for sample in profile.samples) == used
    profile.costs(1, 8192)
    assert [told in said for said in warned] == ([True] if told else [])
