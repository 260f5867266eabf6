"""Routers that mask expert groups in zeroed memory (DeepSeek-V3, GLM-4.5): only GEMMs that they read keep all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import ds_memo
from tests.inside import gemms_of
from tests.models import HIDDEN, Block, compare_with_stock, every_config, step
from tests.remat.situations import BATCH, drive, toy

EXPERTS, GROUPS = 8, 4


class Grouped(Block):
    """A block that chooses experts from two of four groups, like DeepSeek-V3; an expert is a scale."""

    fills = "nothing"
    """A second writer of the mask, which PyTorch does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(self.norm2(x).flatten(0, 1)).sigmoid()
        groups = scores.view(-1, GROUPS, EXPERTS // GROUPS).sum(-1)
        mask = torch.zeros_like(groups)
        if self.fills == "an unseen kernel":
            with _disable_current_modes(), torch.no_grad():
                mask.add_(groups > groups.mean(), alpha=0.5)
        mask.scatter_(1, groups.topk(2, dim=-1)[1], 1.0)
        allowed = mask.unsqueeze(-1).expand(-1, GROUPS, EXPERTS // GROUPS).reshape(-1, EXPERTS)
        chosen = scores.masked_fill(~allowed.bool(), 0.0).topk(2, dim=-1)[1]
        weights = scores.gather(1, chosen) * self.scales[chosen]
        return super().feed(x) * weights.sum(-1).view(*x.shape[:2], 1)


class Filled(Grouped):
    fills = "an unseen kernel"


def rows(model: nn.Module, alpha: float) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and kept rows of each GEMM of the first layer that the replay needs."""
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": 0})
    step(model, BATCH)
    found = [(op.shape, op.rows) for op in gemms_of(handle, -1) if op.wanted]
    handle.detach()
    return found


@every_config
@pytest.mark.parametrize("block", [Grouped, Filled])
def test_gradients(block: type[Grouped], config: dict[str, Any]) -> None:
    assert compare_with_stock(toy(block), drive, config)["attention_recomputed"] == 0


def test_only_the_router_is_kept_whole() -> None:
    tokens = BATCH.embeds.shape[0] * BATCH.embeds.shape[1]
    assert [kept for shape, kept in rows(toy(Grouped), 0.5) if shape[1] != EXPERTS] == [tokens // 2] * 4
    assert [kept for shape, kept in rows(toy(Grouped), 0.5) if shape[1] == EXPERTS] == [tokens]


def test_all_before_is_kept_whole_where_a_kernel_may_have_made_the_mask() -> None:
    """It left other values than the op that made the memory, so it may have read anything."""
    tokens = BATCH.embeds.shape[0] * BATCH.embeds.shape[1]
    before, behind = [tokens] * 3, [tokens // 2] * 2  # qkv, o, router; up, down
    assert [kept for _, kept in rows(toy(Filled), 0.5)] == before + behind


def test_glm() -> None:
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "first_k_dense_replace": 1, "pad_token_id": 0}
    experts = {"n_routed_experts": EXPERTS, "n_group": GROUPS, "topk_group": 2, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**sizes, **heads, **experts, moe_intermediate_size=32)).train()
    tokens = BATCH.embeds.shape[0] * BATCH.embeds.shape[1]
    assert [kept for shape, kept in rows(model, 0.5)[:4] if shape[0] == tokens] == [tokens // 2] * 4
    compare_with_stock(model, drive, {"alpha": 0.5, "resident_layers": 1})
