"""A layer without an attention kernel is told what would help it, and nothing where nothing is amiss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from tests import architectures


def said(model: nn.Module) -> tuple[list[str], int]:
    """Return the warnings of a step, and how often attention ran again."""
    ids = torch.randint(3, architectures.VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0, "plan": {"enabled": False}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=ids, labels=ids).loss.backward()
    report = handle.report()
    handle.detach()
    return report["warnings"], report["attention_recomputed"]


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next"])
def test_layers_that_have_no_attention(name: str) -> None:
    """State spaces, convolutions, linear attention; Qwen3-Next's experts are chosen by a softmax."""
    assert said(architectures.build(name)) == ([], 0)


def test_values_that_are_not_as_wide_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-head latent attention is on sdpa, which has no kernel for it on a CPU. Equally wide, it has."""
    own: dict[str, Any] = architectures.OWN["deepseek_v3"]
    assert said(architectures.build("deepseek_v3")) == ([], 0)
    monkeypatch.setitem(architectures.OWN, "deepseek_v3", own | {"v_head_dim": 16})
    (warning,), again = said(architectures.build("deepseek_v3"))
    assert "though it calls scaled_dot_product_attention" in warning and "attn_implementation" not in warning
    assert again == architectures.LAYERS
