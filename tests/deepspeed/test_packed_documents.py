"""Packed documents: whatever shares a sequence, each document gets the logits and gradients that it gets alone, or a refusal.

The table in docs/parallel.md has a row for each attention implementation; this file has the tests behind its cells.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import CheckpointError
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_memo
from ds_memo.deepspeed import documents, ulysses
from ds_memo.profile import run
from tests.deepspeed.matrix import mean_loss
from tests.deepspeed.test_ulysses import SUMS, part
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.inside import inside
from tests.models import LAYERS, VOCAB, Different, assert_same_grads, build, gradients

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
        logits = self.apart_logits(model)
        mean_loss(logits, self.labels).backward()
        return logits.detach(), gradients(model)

    def apart_logits(self, model: torch.nn.Module) -> torch.Tensor:
        rows = []
        for tokens, lengths in zip(self.tokens, self.lengths, strict=True):
            alone = [model(input_ids=piece[None], use_cache=False).logits for piece in tokens.split(lengths)]
            rows.append(torch.cat(alone, dim=1))
        return torch.cat(rows)

    def together(self, model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        logits = model(input_ids=self.tokens, position_ids=self.positions, use_cache=False).logits
        mean_loss(logits, self.labels).backward()
        return logits.detach(), gradients(model)

    def forward(self, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of a sequence-parallel model's logits, and the loss over whole sequences."""
        logits = model(input_ids=part(self.tokens), position_ids=part(self.positions), use_cache=False).logits
        return logits, sequence.mean_over_ranks(mean_loss(logits, part(self.labels)), part(self.labels), SUMS)

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
    wants = [Packed(layout).apart(build("llama")) for layout in layouts]
    model = build("llama")
    use(model, implementation, monkeypatch)
    for alpha in (None, 0.5):
        if alpha is not None:
            ds_memo.attach(model, memo(alpha))
        for layout, want in zip(layouts, wants, strict=True):
            for _ in range(2):
                assert_as_apart(Packed(layout).together(model), want)


def test_transformers_tells_documents_by_position_ids_under_flash_in_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several rows is one document to it, as docs/parallel.md says."""
    model = build("llama")
    want = Packed(HALVES).apart(model)
    kernels = use_flash(model, "flash_attention_2", monkeypatch)
    with pytest.raises(Different):
        assert_as_apart(Packed(HALVES).together(model), want)
    assert kernels.calls == [[]] * LAYERS


# ---- Ulysses


class TestUlysses(DistributedTest):
    world_size = 2

    def test_sdpa(self):
        """Grouped heads, as many for keys as for queries, experts; layouts come twice in a row, and again after others."""
        for name, alphas in (("llama", (None, 0.5)), ("neox", (0.5,)), ("mixtral", (0.5,))):
            wants = {layout: Packed(layout).apart(build(name)) for layout in (UNPACKED, *LAYOUTS)}
            for alpha in alphas:
                model = build(name)
                sequence.set_up(model, 2)
                handle = ds_memo.attach(model, memo(alpha)) if alpha is not None else None
                for layout in (UNPACKED, UNPACKED, HALVES, HALVES, SPREAD, SPREAD, PADDED, HALVES, PADDED, UNPACKED):
                    assert_as_apart(Packed(layout).in_parts(model), wants[layout])
                assert handle is None or not handle.report()["warnings"]

    def test_kernels_that_are_told(self, monkeypatch):
        wants = {layout: Packed(layout).apart(build("llama")) for layout in (UNPACKED, *LAYOUTS)}
        alone = [("flex_attention", None), (FLASHES[0], None)]
        for implementation, alpha in (*alone, *((name, 0.5) for name in ("flex_attention", *FLASHES))):
            model = build("llama")
            use(model, implementation, monkeypatch)
            sequence.set_up(model, 2)
            handle = ds_memo.attach(model, memo(alpha)) if alpha is not None else None
            for layout in (UNPACKED, UNPACKED, *LAYOUTS, *LAYOUTS):
                assert_as_apart(Packed(layout).in_parts(model), wants[layout])
            assert handle is None or implementation in FLASHES or handle.report()["attention_recomputed"] == 0

    def test_without_what_it_knows_of_documents(self, monkeypatch):
        """A negative control of the tests above: DeepSpeed's attention as it is."""
        monkeypatch.setattr(ulysses, "attention_within", lambda name, attend, position_ids: attend)
        model = build("llama")
        sequence.set_up(model, 2)
        assert_as_apart(Packed(UNPACKED).in_parts(model), Packed(UNPACKED).apart(build("llama")))
        for layout in LAYOUTS:
            with pytest.raises(Different, match="logits"):
                assert_as_apart(Packed(layout).in_parts(model), Packed(layout).apart(build("llama")))

    @pytest.mark.parametrize("alpha", [None, 0.5])
    def test_a_replay_has_the_documents_of_its_forward(self, alpha, monkeypatch):
        """Two forwards of other documents and an evaluation before the backwards, and one buffer for all position_ids."""
        looks = counted(monkeypatch)
        model = build("llama")
        sequence.set_up(model, 2)
        if alpha is None:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            ds_memo.attach(model, memo(alpha))
        packs = [Packed(HALVES, seed=1), Packed(SPREAD, seed=2)]
        evaluated, buffer = Packed(PADDED, seed=3), torch.empty(2, LENGTH // 2, dtype=torch.long)
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
            for loss, want in zip(losses, wants, strict=True):
                loss.backward()
                assert_same_grads(summed_gradients(model), want[1], EXACT)
        assert len(looks) == 3 * 3, "one look for a forward, none for a replay"

    def test_a_replay_that_takes_the_latest_documents(self, monkeypatch):
        """A negative control of the test above."""
        model = build("llama")
        sequence.set_up(model, 2)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        latest = Latest()
        monkeypatch.setattr(ulysses._parallel[model], "_within", latest)
        loss = Packed(SPREAD).forward(model)[1]
        Packed(HALVES).forward(model)
        with pytest.raises((Different, CheckpointError)):
            loss.backward()
            assert_same_grads(summed_gradients(model), Packed(SPREAD).apart(build("llama"))[1], EXACT)

    def test_documents_that_change_with_every_step(self):
        """Layers whose calls keep leaving their recipes are analysed in each; steps alike have one again."""
        model = build("llama")
        sequence.set_up(model, 2)
        handle = ds_memo.attach(model, memo(0.5))
        generator = random.Random(0)
        recomputed = []
        for step in range(20):
            lengths = random_lengths(generator) if step < 12 else (30, 34)
            assert_as_apart(Packed((lengths,), step).in_parts(model), Packed((lengths,), step).apart(build("llama")))
            recomputed.append(handle.report()["attention_recomputed"])
        assert recomputed[0] == 0 < recomputed[6] == recomputed[-1], "three times left, then never again"
        assert all(layer.follows_recipes and layer.recipes for layer in inside(handle).layers)

    def test_position_ids_of_one_row_for_all_and_a_model_without_its_head(self):
        """Seen in the layers, by what they are given themselves."""
        pack = Packed(HALVES)
        want = pack.apart(build("llama"))
        pack.positions = pack.positions[:1]
        for alpha in (None, 0.5):
            model = build("llama")
            sequence.set_up(model, 2)
            if alpha is not None:
                ds_memo.attach(model, memo(alpha))
            for _ in range(2):
                assert_as_apart(pack.in_parts(model), want)
            hidden = model.model(input_ids=part(pack.tokens), position_ids=part(Packed(HALVES).positions), use_cache=False)
            assert_as_apart((whole(model.lm_head(hidden[0])), {}), (want[0], {}))

    def test_padding_on_the_left(self):
        """As Transformers numbers it under a padding mask: tokens that count do not see it."""
        pack = Packed(((7, 57), (20, 44)))
        want = pack.apart(build("llama"))[0]
        model = build("llama")
        sequence.set_up(model, 2)
        for pad in (0, 1):
            for positions, lengths in zip(pack.positions, pack.lengths, strict=True):
                positions[: lengths[0]] = pad
            got = pack.in_parts(model)[0]
            for row, lengths in enumerate(pack.lengths):
                assert_as_apart((got[row, lengths[0] :], {}), (want[row, lengths[0] :], {}))

    def test_refusals(self, monkeypatch):
        """By every rank, before any attention runs."""
        pack = Packed(HALVES)
        tokens, positions = part(pack.tokens), part(pack.positions)
        model = build("llama")
        sequence.set_up(model, 2)
        gap = Packed(UNPACKED).positions.clone()
        gap[1, 40:] += 5
        with pytest.raises(ds_memo.MemoError, match="position_ids of row 1 rise from 39 to 45 at token 40; expected steps of 1"):
            model(input_ids=tokens, position_ids=part(gap))
        with pytest.raises(ds_memo.MemoError, match=r"position_ids have the shape \(3, 2, 32\); expected \(rows, tokens\)"):
            model(input_ids=tokens, position_ids=positions.expand(3, -1, -1))
        with pytest.raises(ds_memo.MemoError, match=r"called with cu_seq_lens_q.*Leave it out: position_ids"):
            model(input_ids=tokens, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 32], dtype=torch.int32))
        ALL_ATTENTION_FUNCTIONS.register("of_my_own", sdpa_attention_forward)
        model = build("llama")
        model.config._attn_implementation = "of_my_own"
        sequence.set_up(model, 2)
        with pytest.raises(ds_memo.MemoError, match=r'position_ids of row 0 start again at token 32.*"of_my_own".*is not known'):
            model(input_ids=tokens, position_ids=positions)
        assert_as_apart(Packed(UNPACKED).in_parts(model), Packed(UNPACKED).apart(build("llama")))
        window = build("mistral")
        use(window, "flex_attention", monkeypatch)
        sequence.set_up(window, 2)
        with pytest.raises(ds_memo.MemoError, match=r'a window of 8 tokens of 64.*"flex_attention" knows.*flash_attention_2'):
            window(input_ids=tokens, position_ids=positions)

    def test_a_profile_shortens_the_parts(self, tmp_path, monkeypatch):
        """Cut parts are no longer neighbours, but the last document goes on from one into the next."""
        monkeypatch.setattr(run, "SHORTEST", 64)
        look, seen = documents.document_lengths, []
        monkeypatch.setattr(documents, "document_lengths", lambda whole: seen.append(tuple(look(whole)[0])) or look(whole))
        for first in ((), (20,)):  # one document; packed
            seen.clear()
            model = build("llama")
            sequence.set_up(model, 2)
            cache = str(tmp_path / str(len(first)))
            handle = ds_memo.attach(model, {"tile_tokens": 0, "plan": {"enabled": False}, "cache_dir": cache})
            Packed(((*first, 400 - sum(first)),)).in_parts(model)
            assert handle.report()["profile"]
            assert {*seen} == {(*first, length - sum(first)) for length in (64, 128, 256, 400)}
            handle.detach()

    def test_under_deepspeed(self, monkeypatch):
        """Losses of three steps, as one rank has them. ZeRO-3 hands position_ids on as they are, so no layer looks for itself."""
        packs = [Packed(layout, seed) for seed, layout in enumerate((SPREAD, PADDED, HALVES))]
        model, wants = build("llama"), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for pack in packs:
            loss = mean_loss(pack.apart_logits(model), pack.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            wants.append(loss.item())
        model = build("llama")
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "memo": {"enabled": True, **memo(0.5)},
        }
        engine = ds_memo.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        looks = counted(monkeypatch)
        for pack, want in zip(packs, wants, strict=True):
            logits = engine(input_ids=part(pack.tokens), position_ids=part(pack.positions), use_cache=False).logits
            loss = sequence.mean_over_ranks(mean_loss(logits, part(pack.labels)), part(pack.labels), engine)
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(want, rel=EXACT)
        assert len(looks) == len(packs)


class TestFewKeyHeads(DistributedTest):
    world_size = 4

    def test_more_ranks_than_key_and_value_heads(self):
        model = build("llama")  # 4 heads, 2 of them for keys and values
        sequence.set_up(model, 4)
        ds_memo.attach(model, memo(0.5))
        for layout in LAYOUTS * 2:
            assert_as_apart(Packed(layout).in_parts(model), Packed(layout).apart(build("llama")))


class Latest:
    """A dictionary that returns what was put in last, whatever the key."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.value = value

    def get(self, key: Any, default: Any) -> Any:
        return self.value


def counted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Note the position_ids of every search for documents."""
    looks: list[torch.Tensor] = []
    look = documents.document_lengths
    monkeypatch.setattr(documents, "document_lengths", lambda position_ids: looks.append(position_ids) or look(position_ids))
    return looks


# ---- what is told from position_ids


def random_lengths(generator: random.Random, length: int = LENGTH, sizes: tuple[int, ...] = (1, 2, 7, 20, 33)) -> tuple[int, ...]:
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, generator.choice(sizes)))
    return tuple(lengths)


@pytest.mark.parametrize(
    "positions, lengths",
    [
        ([[0, 1, 2, 3]], [[4]]),
        ([[7, 8, 9, 10]], [[4]]),
        ([[0]], [[1]]),
        ([[0, 1, 0, 1], [0, 1, 2, 0]], [[2, 2], [3, 1]]),
        ([[0, 1, 2, 3], [5, 6, 0, 1]], [[4], [2, 2]]),
        ([[0, 1, 0, 0]], [[2, 1, 1]]),
        ([[1, 1, 0, 1]], [[1, 1, 2]]),
        ([[2, 3, 2, 3]], [[2, 2]]),
    ],
)
def test_document_lengths(positions: list, lengths: list) -> None:
    for dtype in (torch.int64, torch.int32):
        assert documents.document_lengths(torch.tensor(positions, dtype=dtype)) == lengths


@pytest.mark.parametrize("name", ["sdpa", *FLASHES, "of_my_own"])
def test_a_batch_without_borders_runs_as_it_did(name: str) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    assert documents.attention_within(name, attend, torch.arange(8).expand(3, -1)) is attend


@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 300, 513, 1024])
def test_the_mask_of_flex_attention(length: int) -> None:
    """The one that PyTorch makes of a tensor of s × s, block by block."""
    generator = random.Random(length)
    lengths = [random_lengths(generator, length, (1, 2, 60, 128, 129, 300, 1000)) for _ in range(3)] + [(length,)]
    number = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])

    def within(b, h, q, kv):
        return (q >= kv) & (number[b, q] == number[b, kv])

    got = documents.block_mask(lengths, torch.device("cpu"))
    want = torch_flex.create_block_mask(within, len(lengths), None, length, length, device="cpu")
    assert got.shape == want.shape and torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = f"{name}_num_blocks", f"{name}_indices"
        assert torch.equal(getattr(got, counts), getattr(want, counts))
        blocks = -(-length // 128) * 128
        both = [listed(getattr(mask, counts), getattr(mask, indices), blocks, 128) for mask in (got, want)]
        assert torch.equal(*both)
    sizes = len(lengths), 1, length, length
    asked = [torch_flex.create_mask(mask.mask_mod, *sizes, device="cpu") for mask in (got, want)]
    assert torch.equal(*asked)
