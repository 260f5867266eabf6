"""QLoRA: bitsandbytes' products with 4-bit weights count as GEMMs, and gradients of adapters are those without memo."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ds_memo
from ds_memo.remat import op_policy
from tests.quantized import with_adapters

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
WHOLE = {"resident_layers": 0}


def built() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=2, **sizes)).to(torch.bfloat16)
    return with_adapters(model, 8, quantized=True)


def trained(model: nn.Module, steps: int = 1) -> list[torch.Tensor]:
    """Return the loss and the adapters' gradients of the last step."""
    ids = torch.randint(0, 1000, (1, 2048), generator=torch.Generator().manual_seed(2))
    for _ in range(steps):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return trained(built())


@pytest.mark.parametrize(
    ("config", "recomputed"),
    [
        (WHOLE | {"alpha": 1.0}, 0.0),
        (WHOLE | {"alpha": 0.5}, 0.4),
        (WHOLE | {"alpha": 0.0}, 0.8),
        (WHOLE | {"alpha": 0.0, "tile_tokens": 256}, 0.8),
        pytest.param({}, 0.0, marks=pytest.mark.slow),
    ],
    ids=["all-kept", "half", "none", "tiles", "solved"],
)
def test_gradients_are_those_without_memo(expected: list[torch.Tensor], config: dict, recomputed: float) -> None:
    model = built()
    memo = ds_memo.attach(model, config)
    found = trained(model, steps=3)
    report = ds_memo.report(memo)
    memo.detach()
    exact = "tile_tokens" not in config
    for here, there in zip(found, expected, strict=True):
        error = (here - there).float().norm() / there.float().norm()
        assert error == 0 if exact else error < 3e-3
    assert report["gemm_flops_recomputed_fraction"] == pytest.approx(recomputed, abs=0.05)
    assert not report["warnings"] and report["logits"] is not None


def test_products_that_are_no_gemms_are_all_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers would keep without the op's entry: the products of adapters alone."""

    def kept() -> int:
        monkeypatch.setattr(op_policy, "_KINDS", {})
        memo = ds_memo.attach(model := built(), WHOLE | {"alpha": 1.0})
        trained(model)
        stored = ds_memo.report(memo)["stored_bytes_per_layer"]
        memo.detach()
        return sum(stored)

    all_products = kept()
    monkeypatch.setattr(op_policy, "QUANTIZED_NAMES", set())
    assert kept() < 0.7 * all_products
