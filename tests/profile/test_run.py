"""The order in which a run is profiled."""

from __future__ import annotations

import types

import pytest
import torch

from ds_memo.profile import run


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
