"""Packed documents: whatever shares a sequence, each document gets the logits and gradients that it gets alone, or a refusal.

The table in docs/parallel.md has a row for each attention implementation; this file has the tests behind its cells.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex

import ds_memo
from ds_memo.autotune.policy import PlacementPolicy
from ds_memo.deepspeed import sequence
from ds_memo.hf import sequence as hf_sequence
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.profile import run
from ds_memo.remat import layer_state
from ds_memo.sequence import attention
from ds_memo.sequence.parts import SequenceParts
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import LAYERS, Different, assert_same_grads, build
from tests.sequence.whole_and_parts import SUMS, Batch, mean_loss, memo, part, summed_gradients, whole

EXACT = 1e-6
"""Largest relative distance of logits (of the largest) and of a gradient (of its norm) from the documents run apart."""
LENGTH = 64
UNPACKED = ((LENGTH,), (LENGTH,))
HALVES = ((32, 32), (32, 32))
SPREAD = ((20, 25, 19), (64,))
"""Borders off the ranks' own, a document on both ranks and on three of four, and a row that is one document."""
PADDED = ((40, 13, *(1,) * 11), (30, 34))
LAYOUTS = (HALVES, SPREAD, PADDED)
FLASHES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def assert_as_apart(got: tuple, want: tuple) -> None:
    distance = (got[0] - want[0]).abs().max() / want[0].abs().max()
    if not distance <= EXACT:
        raise Different(f"logits are off by {distance:.1e}")
    assert_same_grads(got[1], want[1], EXACT)


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
        assert int(max_seqlen_q) == int(max_seqlen_k) == max(b - a for a, b in itertools.pairwise(borders))
        self.calls.append(borders)
        return torch.cat([causal_attention(q[a:b], k[a:b], v[a:b], softmax_scale) for a, b in itertools.pairwise(borders)])

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
    """Switch a model to flash attention as if the package were installed."""
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
    make = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **kwargs: make(**kwargs | {"_compile": False}))  # 20 s quicker
    model.config._attn_implementation = "flex_attention"  # set_attn_implementation() asks for a GPU


def use(model: torch.nn.Module, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation in FLASHES:
        use_flash(model, implementation, monkeypatch)
    elif implementation == "flex_attention":
        use_flex(model, monkeypatch)
    else:
        model.config._attn_implementation = implementation


# ---- one rank: what Transformers makes of position_ids, with memo too


@pytest.mark.parametrize("implementation", everyday(["sdpa", "eager", "flex_attention", *FLASHES], ["sdpa", FLASHES[0]]))
def test_one_rank(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [UNPACKED, *LAYOUTS]
    if implementation in FLASHES:
        layouts = [UNPACKED, *(layout[:1] for layout in LAYOUTS)]
    wants = [Batch(layout).apart(build("llama")) for layout in layouts]
    model = build("llama")
    use(model, implementation, monkeypatch)
    for alpha in (None, 0.5):
        if alpha is not None:
            ds_memo.attach(model, memo(alpha))
        for layout, want in zip(layouts, wants, strict=True):
            for _ in range(2):
                assert_as_apart(Batch(layout).together(model), want)


def test_transformers_tells_documents_by_position_ids_under_flash_in_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several rows is one document to it, as docs/parallel.md says."""
    model = build("llama")
    want = Batch(HALVES).apart(model)
    kernels = use_flash(model, "flash_attention_2", monkeypatch)
    with pytest.raises(Different):
        assert_as_apart(Batch(HALVES).together(model), want)
    assert kernels.calls == [[]] * LAYERS


# ---- in parts


class TestInParts(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ulysses", [2, 1])
    def test_layouts(self, ulysses):
        """Grouped heads, as many for keys as for queries, experts; layouts come twice in a row, and again after others."""
        for name, alphas in (("llama", (None, 0.5)), ("neox", (0.5,)), ("mixtral", (0.5,))):
            wants = {layout: Batch(layout).apart(build(name)) for layout in (UNPACKED, *LAYOUTS)}
            for alpha in alphas:
                model = build(name)
                sequence.set_up(model, 2, ulysses)
                handle = ds_memo.attach(model, memo(alpha)) if alpha is not None else None
                for layout in (UNPACKED, UNPACKED, HALVES, HALVES, SPREAD, SPREAD, PADDED, HALVES, PADDED, UNPACKED):
                    assert_as_apart(Batch(layout).in_parts(model), wants[layout])
                assert handle is None or not handle.report()["warnings"]

    @pytest.mark.parametrize(
        "how, ulysses", [("checkpoints", 2), ("memo", 1), ("attention recomputed", 2), ("attention recomputed", 1)]
    )
    def test_a_replay_has_the_documents_of_its_forward(self, ulysses, how, monkeypatch):
        """Two forwards of other documents and an evaluation before the backwards, and one buffer for all position_ids."""
        looks = counted(monkeypatch)
        model = build("llama")
        sequence.set_up(model, 2, ulysses)
        checkpoints = how == "checkpoints"
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif how == "memo":
            ds_memo.attach(model, memo(0.5))
        else:
            recompute_attention(model, monkeypatch)
        packs = [Batch(HALVES, seed=1), Batch(SPREAD, seed=2)]
        evaluated, buffer = Batch(PADDED, seed=3), torch.empty(2, LENGTH // 2, dtype=torch.long)
        wants = [pack.apart(build("llama")) for pack in packs]
        for _ in range(3):
            losses = []
            for pack in packs:
                buffer.copy_(part(pack.positions))
                logits = model(input_ids=part(pack.tokens), position_ids=buffer, use_cache=False).logits
                losses.append(sequence.mean_over_ranks(mean_loss(logits, part(pack.labels)), part(pack.labels), SUMS))
            buffer.copy_(part(evaluated.positions))
            with torch.no_grad():
                got = whole(model(input_ids=part(evaluated.tokens), position_ids=buffer, use_cache=False).logits)
            assert_as_apart((got, {}), (evaluated.apart(build("llama"))[0], {}))
            if checkpoints:  # torch's own tell a layer nothing of its forward
                with pytest.raises(ds_memo.MemoError, match="Run each forward's backward before the next one"):
                    losses[0].backward()
                model.zero_grad()
                break
            for loss, want in zip(losses, wants, strict=True):
                loss.backward()
                assert_same_grads(summed_gradients(model), want[1], EXACT)
        assert len(looks) == (3 if checkpoints else 3 * 3), "one look for a forward, none for a replay"
        if checkpoints:
            for pack, want in zip(packs, wants, strict=True):
                assert_as_apart(pack.in_parts(model), want)

    def test_a_replay_that_takes_the_latest_documents(self, monkeypatch):
        """A negative control of the test above."""
        monkeypatch.setattr(layer_state, "PLAIN", layer_state.PLAIN - {SequenceParts})
        model = build("llama")
        sequence.set_up(model, 2)
        recompute_attention(model, monkeypatch)
        want = Batch(SPREAD).apart(build("llama"))[1]
        Batch(SPREAD).in_parts(model)
        loss = Batch(SPREAD).forward(model)[1]
        Batch(HALVES).forward(model)
        loss.backward()
        with pytest.raises(Different):
            assert_same_grads(summed_gradients(model), want, 1e-3)

    def test_position_ids_of_one_row_for_all_and_a_model_without_its_head(self):
        pack = Batch(HALVES)
        want = pack.apart(build("llama"))
        pack.positions = pack.positions[:1]
        for ulysses, alpha in ((2, None), (2, 0.5), (1, 0.5)):
            model = build("llama")
            sequence.set_up(model, 2, ulysses)
            if alpha is not None:
                ds_memo.attach(model, memo(alpha))
            for _ in range(2):
                assert_as_apart(pack.in_parts(model), want)
            hidden = model.model(input_ids=part(pack.tokens), position_ids=part(Batch(HALVES).positions), use_cache=False)
            assert_as_apart((whole(model.lm_head(hidden[0])), {}), (want[0], {}))

    def test_refusals(self):
        """By every rank, before any attention runs."""
        pack = Batch(HALVES)
        tokens, positions = part(pack.tokens), part(pack.positions)
        model = build("llama")
        sequence.set_up(model, 2)
        for first, by_rank in (
            (40, "position_ids of row 1 rise from 39 to 45 at token 8 of rank 1's part; expected steps of 1"),
            (32, "position_ids of row 1 go from 31 to 37 between the parts of ranks 0 and 1; expected 32"),
        ):
            gap = Batch(UNPACKED).positions.clone()
            gap[1, first:] += 5
            with pytest.raises(ds_memo.MemoError, match=by_rank):
                model(input_ids=tokens, position_ids=part(gap))
        with pytest.raises(ds_memo.MemoError, match=r"called with cu_seq_lens_q.*Leave it out: position_ids"):
            model(input_ids=tokens, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 32], dtype=torch.int32))
        mask = torch.ones(2, LENGTH)
        mask[1, 30:40] = 0
        with pytest.raises(ds_memo.MemoError, match="attention_mask of row 1 is 0 at tokens 30 to 39 and 1 on both sides"):
            model(input_ids=tokens, position_ids=part(Batch(UNPACKED).positions), attention_mask=part(mask))
        assert_as_apart(pack.in_parts(model), pack.apart(build("llama")))

    @pytest.mark.parametrize("cuts", [((32, 64), (0, 32)), ((0, 40), (32, 64))], ids=["swapped", "overlapping"])
    def test_parts_that_are_no_sequence(self, cuts):
        """Refused by every rank in one line, where they passed for two documents."""
        first, last = cuts[dist.get_rank()]
        pack = Batch(UNPACKED)
        sequence.set_up(model := build("llama"), 2)
        with pytest.raises(
            ds_memo.MemoError, match="Give each rank its part in the order of the ranks, and no token twice"
        ) as by_rank:
            model(input_ids=pack.tokens[:, first:last], position_ids=pack.positions[:, first:last])
        assert "\n" not in str(by_rank.value)

    @pytest.mark.parametrize("ulysses", [2, 1])
    def test_a_profile_shortens_the_parts(self, ulysses, tmp_path, monkeypatch):
        """Cut parts are no longer neighbours, but the last document goes on from one into the next."""
        monkeypatch.setattr(run, "SHORTEST", 64)
        seen = set()
        put_in(
            monkeypatch,
            attention,
            "plan",
            lambda right, parts, mask: seen.add((parts.length, parts.documents)) or right(parts, mask),
        )
        for first in ((), (20,)):  # one document; packed
            seen.clear()
            model = build("llama")
            sequence.set_up(model, 2, ulysses)
            cache = str(tmp_path / str(len(first)))
            handle = ds_memo.attach(model, {"tile_tokens": 0, "plan": {"enabled": False}, "cache_dir": cache})
            Batch(((*first, 400 - sum(first)),)).in_parts(model)
            assert handle.report()["profile"]
            assert seen == {(length, ((0, *first),)) for length in (64, 128, 256, 400)}
            handle.detach()


def recompute_attention(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach memo; layers run in tiles, and attention again in each backward."""
    again = Placement(PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, 0.0, tiles=Tiles(4, 2))
    monkeypatch.setattr(PlacementPolicy, "placement", lambda self, layer: again)
    ds_memo.attach(model, memo(0.0, resident_layers=0, tile_tokens=4))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note every search for documents."""
    looks: list[Any] = []
    put_in(monkeypatch, hf_sequence, "documents_of", lambda right, by_rank: looks.append(by_rank) or right(by_rank))
    return looks


# ---- what is told from position_ids


@pytest.mark.parametrize(
    "positions, starts",
    [
        ([[0, 1, 2, 3]], [(0,)]),
        ([[7, 8, 9, 10]], [(0,)]),
        ([[0]], [(0,)]),
        ([[0, 1, 0, 1], [0, 1, 2, 0]], [(0, 2), (0, 3)]),
        ([[0, 1, 2, 3], [5, 6, 0, 1]], [(0,), (0, 2)]),
        ([[0, 1, 0, 0]], [(0, 2, 3)]),
        ([[1, 1, 0, 1]], [(0, 1, 2)]),
        ([[2, 3, 2, 3]], [(0, 2)]),
    ],
)
def test_documents(positions: list, starts: list) -> None:
    """However the tokens lie on ranks, some of which may have none."""
    for dtype in (torch.int64, torch.int32):
        whole = torch.tensor(positions, dtype=dtype)
        rows, length = whole.shape
        for borders in itertools.combinations_with_replacement(range(length + 1), 2):
            parts = whole.tensor_split(borders, dim=1)
            by_rank = [hf_sequence.describe_part(rows, part.shape[1], part) for part in parts]
            assert list(hf_sequence.documents_of(by_rank)) == starts


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("borders", [(), (7,), (11, 30)])
def test_parts_in_another_order(ranks: int, borders: tuple[int, ...]) -> None:
    """Refused if a document is torn: orders of whole documents give each the same values."""
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise((0, *borders, 36))])[None]
    size, whole = 36 // ranks, torch.arange(36)[None]
    for order in itertools.permutations(range(ranks)):
        by_rank = [hf_sequence.describe_part(1, size, positions[:, size * i : size * (i + 1)]) for i in order]
        tokens = torch.cat([whole[:, size * i : size * (i + 1)] for i in order], 1)[0].tolist()
        inside = [tokens.index(a) + 1 != tokens.index(a + 1) for a in range(35) if a + 1 not in borders] if ranks > 1 else []
        if any(inside):
            with pytest.raises(ds_memo.MemoError, match=r"the parts of ranks|order is not that of the ranks"):
                hf_sequence.documents_of(by_rank)
        else:
            hf_sequence.documents_of(by_rank)
