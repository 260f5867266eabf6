"""Packed documents: whatever shares a sequence, each document gets the logits and gradients that it gets alone, or a refusal.

The table in docs/parallel.md has a row for each attention implementation; this file has the tests behind its cells.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_memo
from ds_memo.integrate import documents, ulysses
from tests.integrate.matrix import mean_loss
from tests.integrate.test_ulysses import SUMS, part
from tests.models import LAYERS, VOCAB, Different, assert_same_grads, build, gradients
from tests.unit.common import DistributedTest

EXACT = 1e-6
"""Largest relative distance of logits (of the largest) and of a gradient (of its norm) from the documents run apart."""
LENGTH = 64
HALVES = ((32, 32), (32, 32))
SPREAD = ((20, 25, 19), (64,))
"""Borders off the ranks' own, a document on both ranks and on three of four, and a row that is one document."""
PADDED = ((40, 13, *(1,) * 11), (30, 34))
LAYOUTS = (HALVES, SPREAD, PADDED)
FLASHES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


class Packed:
    """A batch of sequences and the documents in it.

    Args:
        lengths: of each document, by row.
    """

    def __init__(self, lengths: tuple[tuple[int, ...], ...], seed: int = 0) -> None:
        self.lengths = lengths
        length = sum(lengths[0])
        self.tokens = torch.randint(0, VOCAB, (len(lengths), length), generator=torch.Generator().manual_seed(seed))
        self.positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        self.labels = self.tokens.roll(-1, 1)
        self.labels[:, 2:9] = -100

    def apart(self, model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """Logits (b, s, vocabulary) and gradients of the mean loss, each document in a forward of its own."""
        rows = []
        for tokens, lengths in zip(self.tokens, self.lengths, strict=True):
            alone = [model(input_ids=piece[None], use_cache=False).logits for piece in tokens.split(lengths)]
            rows.append(torch.cat(alone, dim=1))
        logits = torch.cat(rows)
        mean_loss(logits, self.labels).backward()
        return logits.detach(), gradients(model)

    def together(self, model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        logits = model(input_ids=self.tokens, position_ids=self.positions, use_cache=False).logits
        mean_loss(logits, self.labels).backward()
        return logits.detach(), gradients(model)

    def forward(self, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of a sequence-parallel model's logits, and the loss over whole sequences."""
        logits = model(input_ids=part(self.tokens), position_ids=part(self.positions), use_cache=False).logits
        return logits, ulysses.mean_over_ranks(mean_loss(logits, part(self.labels)), part(self.labels), SUMS)

    def in_parts(self, model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        logits, loss = self.forward(model)
        loss.backward()
        return whole(logits), summed_gradients(model)


def whole(logits: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach().contiguous())
    return torch.cat(parts, dim=1)


def summed_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    return gradients(model)


def assert_as_apart(got: tuple, want: tuple) -> None:
    distance = (got[0] - want[0]).abs().max() / want[0].abs().max()
    if not distance <= EXACT:
        raise Different(f"logits are off by {distance:.1e}")
    assert_same_grads(got[1], want[1], EXACT)


def memo(alpha: float | None) -> dict[str, Any] | None:
    return None if alpha is None else {"alpha": alpha, "resident_layers": 1, "plan": {"enabled": False}}


# ---- stand-ins for kernels that a CPU has not, which do what the arguments say and nothing else


class Varlen:
    """flash-attn's functions, with the signature of flash-attn 2. Documents are known from cu_seqlens alone."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        """The borders of each call; none for one without."""

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        """q, k, v (tokens, heads, head size)."""
        assert causal and dropout_p == 0.0 and tuple(window_size) == (-1, -1)
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        borders = cu_seqlens_q.tolist()
        assert borders == cu_seqlens_k.tolist() and borders[0] == 0 and borders[-1] == len(q) == len(k) == len(v)
        assert int(max_seqlen_q) == int(max_seqlen_k) == max(b - a for a, b in zip(borders, borders[1:], strict=False))
        self.calls.append(borders)
        return torch.cat(
            [causal_attention(q[a:b], k[a:b], v[a:b], softmax_scale) for a, b in zip(borders, borders[1:], strict=False)]
        )

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        """q, k, v (b, tokens, heads, head size)."""
        assert causal and dropout_p == 0.0 and tuple(window_size) == (-1, -1)
        self.calls.append([])
        return torch.stack([causal_attention(*row, softmax_scale) for row in zip(q, k, v, strict=True)])


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def use_flash(model: torch.nn.Module, implementation: str, monkeypatch: pytest.MonkeyPatch) -> Varlen:
    """Switch to it as if it were installed."""
    kernels = Varlen()
    loaded = (kernels.flash_attn_func, kernels.flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: loaded)
    monkeypatch.setattr(flash, "_loaded_implementation", None, raising=False)
    model.config._attn_implementation = implementation  # set_attn_implementation() asks for the package and a GPU
    return kernels


def of_flex_attention(q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_aux=None, **kwargs):
    """FlexAttention with a backward, which PyTorch's own lacks on a CPU. As the kernels do, it passes over blocks that the mask
    does not list, and asks mask_mod only in those that are not listed as full."""
    b, _, s, _ = q.shape
    asked = torch_flex.create_mask(block_mask.mask_mod, b, 1, s, s, device="cpu")
    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices, s, block_mask.BLOCK_SIZE[0])
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, s, block_mask.BLOCK_SIZE[0])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=full | (partial & asked), scale=scale, enable_gqa=enable_gqa)
    return out if return_aux is None else (out, None)


def listed(counts: torch.Tensor, indices: torch.Tensor, length: int, block: int) -> torch.Tensor:
    """Dense (b, 1, s, s) of the blocks that a BlockMask lists."""
    dense = torch.zeros(indices.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
        dense[tuple(place)][indices[tuple(place)][: counts[tuple(place)]].long()] = True
    return dense.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :length, :length]


def use_flex(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: of_flex_attention)
    model.config._attn_implementation = "flex_attention"  # set_attn_implementation() asks for a GPU


def use(model: torch.nn.Module, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation in FLASHES:
        use_flash(model, implementation, monkeypatch)
    elif implementation == "flex_attention":
        use_flex(model, monkeypatch)
    else:
        model.config._attn_implementation = implementation


# ---- one rank: what Transformers makes of position_ids, with memo too


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention", *FLASHES])
def test_one_rank(implementation: str, alpha: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    wants = {layout: Packed(layout).apart(model) for layout in LAYOUTS}
    plain = Packed(((LENGTH,), (LENGTH,))).apart(model)
    use(model, implementation, monkeypatch)
    if alpha is not None:
        ds_memo.attach(model, memo(alpha))
    for _ in range(2):
        assert_as_apart(Packed(((LENGTH,), (LENGTH,))).together(model), plain)
        for layout, want in wants.items():
            if implementation in FLASHES:  # Transformers reads several rows as one document each
                with pytest.raises(Different):
                    assert_as_apart(Packed(layout).together(model), want)
                layout = layout[:1]
                want = Packed(layout).apart(build("llama"))
            assert_as_apart(Packed(layout).together(model), want)


# ---- Ulysses


class TestUlysses(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("alpha", [None, 0.0, 0.5, 1.0])
    @pytest.mark.parametrize("name", ["llama", "neox", "mixtral"])
    def test_sdpa(self, name, alpha):
        """Grouped heads, as many for keys as for queries, experts; each layout twice, and twice more after others."""
        model = build(name)
        ulysses.set_up(model, 2)
        if alpha is not None:
            handle = ds_memo.attach(model, memo(alpha))
        for layout in (((LENGTH,), (LENGTH,)), *LAYOUTS * 2):
            want = Packed(layout).apart(build(name))
            for _ in range(2):
                assert_as_apart(Packed(layout).in_parts(model), want)
        assert alpha is None or not handle.report()["warnings"]

    @pytest.mark.parametrize("alpha", [None, 0.5])
    @pytest.mark.parametrize("implementation", ["flex_attention", *FLASHES])
    def test_with_kernels_of_their_own(self, implementation, alpha, monkeypatch):
        model = build("llama")
        use(model, implementation, monkeypatch)
        ulysses.set_up(model, 2)
        if alpha is not None:
            ds_memo.attach(model, memo(alpha))
        for layout in (((LENGTH,), (LENGTH,)), *LAYOUTS):
            want = Packed(layout).apart(build("llama"))
            for _ in range(2):
                assert_as_apart(Packed(layout).in_parts(model), want)
