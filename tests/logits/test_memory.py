"""Memory of lazy logits: what a step leaves behind, and what is predicted for other lengths."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.autotune.budgets import HeadMemory
from ds_memo.logits.head_bytes import BYTES_PER_LOGIT, LEAST_ROWS, MOST_ROWS, HeadBytes, tile_rows
from ds_memo.logits.lazy_value import HeadInputs
from ds_memo.logits.nodes import HeadGradients
from ds_memo.profile.live import LiveBytes
from ds_memo.units import GIB
from tests.logits.rig import BATCH, IDS, LENGTH, VOCAB, attached, causal, compare, logits_of, with_labels

Of = Callable[[torch.Tensor], torch.Tensor]


def alive(kind: type = HeadInputs) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


LOSSES: dict[str, Of] = {
    "cross_entropy": lambda y: F.cross_entropy(y.float().view(-1, VOCAB), IDS.view(-1)),
    "log-probabilities": lambda y: ((y.double() / 0.7).log_softmax(-1).gather(-1, IDS[..., None])).mean(),
    "in place": lambda y: y.clone().div_(0.7)[:, 1:].logsumexp(-1).mean(),
    "own detached": lambda y: (y.detach().softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    "two": lambda y: F.cross_entropy(y.view(-1, VOCAB), IDS.view(-1)) + y.logsumexp(-1).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_script_that_holds_its_loss_holds_no_hidden_states(name: str) -> None:
    model = causal()
    before = alive()
    with attached(model):
        loss = LOSSES[name](logits_of(model))
        loss.backward()
        assert alive() == before
        with torch.no_grad():
            metric = LOSSES[name](logits_of(model))
        assert alive() == before
    assert loss.requires_grad and not metric.requires_grad


def test_a_loss_in_parts_holds_gradients_of_one_head() -> None:
    """Each takes a float32 copy of the head's weight."""

    def loss(model: nn.Module) -> torch.Tensor:
        parts = zip(logits_of(model).view(-1, VOCAB).split(100), IDS.view(-1).split(100), strict=True)
        losses = [F.cross_entropy(part, ids) for part, ids in parts]
        held.append(alive(HeadGradients))
        return torch.stack(losses).mean()

    held: list[int] = []
    compare(causal(), loss)
    assert held == [0, 1]


def test_a_script_that_holds_logits_holds_hidden_states_alone() -> None:
    model = causal()
    before = alive()
    with attached(model):
        kept = logits_of(model).float().log_softmax(-1)[:, 1:].detach()
        assert alive() == before + 1
        del kept
        assert alive() == before


@pytest.mark.parametrize("train", [True, False])
def test_no_more_than_tiles_are_alive(train: bool) -> None:
    """With a large vocabulary, in bytes: a fraction of one copy of the logits."""
    import transformers

    vocabulary, tokens = 2048, 4096
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=tokens,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    with attached(model, warns=""), torch.set_grad_enabled(train), LiveBytes() as count:
        loss = model(input_ids=ids, labels=ids).loss
        if train:
            loss.backward()
    tile = LEAST_ROWS * vocabulary * BYTES_PER_LOGIT
    assert count.peak < tile + 16 * tokens * 8 * 4 + 2**20, f"{count.peak / 2**20:.1f} MiB, of which a tile is {tile / 2**20:.1f}"
    assert count.peak < tokens * vocabulary * 4


def test_rows_of_a_tile() -> None:
    assert tile_rows(VOCAB, 2**20) == LEAST_ROWS
    assert tile_rows(VOCAB, 80 * GIB) == MOST_ROWS
    rows = tile_rows(128_256, 80 * GIB)
    assert rows == 384 and rows * 128_256 * BYTES_PER_LOGIT < GIB
    assert tile_rows(128_256, 16 * GIB) == LEAST_ROWS


# ---- predicted

LAZY = HeadBytes(rows=384, fixed=3 * GIB, per_token=8200)


def seen(*passes: tuple[int, int]) -> HeadMemory:
    memory = HeadMemory()
    for tokens, nbytes in passes:
        memory = memory.with_seen(tokens, nbytes, [LAZY])
    return memory


def test_a_constant_does_not_grow_with_the_length() -> None:
    memory = seen((8192, 3 * GIB + 8192 * 8000))
    assert memory.at(8192) == 3 * GIB + 8192 * 8000
    assert memory.at(2**20) == memory.at(8192) + (2**20 - 8192) * 8200


def test_a_longer_pass_that_took_more_is_known_exactly() -> None:
    memory = seen((8192, 3 * GIB), (2**18, 3 * GIB + 2**18 * 10_000))
    assert memory.at(2**18) == 3 * GIB + 2**18 * 10_000
    assert memory.at(2**20) == memory.at(2**18) + 3 * 2**18 * 8200


def test_a_short_pass_after_long_ones_says_nothing_of_long_ones() -> None:
    """Below a tile logits are whole, and each token takes all of its logits."""
    long = seen((2**18, 3 * GIB))
    both = long.with_seen(256, 256 * 1_740_000, [LAZY])
    assert both.at(2**20) == long.at(2**20)
    assert both.at(128) == 128 * 1_740_000 and both.at(384) == 384 * 1_740_000


def test_a_short_lazy_pass_after_long_ones_is_no_slope() -> None:
    """Half a GiB beyond the formula, by 512 tokens, would be a TiB at a Mi of tokens."""
    long, nbytes = seen((2**18, 3 * GIB)), 3 * GIB + GIB // 2
    both = long.with_seen(512, nbytes, [LAZY])
    assert both.at(2**20) <= long.at(2**20) + GIB // 2
    assert long.at(512) < nbytes <= both.at(512)


def test_without_lazy_heads_bytes_are_by_token() -> None:
    assert HeadMemory().with_seen(1000, 5000, []).at(3000) == 15_000


def test_the_head_tells_its_bytes() -> None:
    model = causal()
    with attached(model) as handle:
        (head,) = handle._session.heads
        assert head.bytes is None
        with_labels(model).backward()
        assert head.bytes.rows == LEAST_ROWS < BATCH * LENGTH
        assert head.bytes.fixed >= LEAST_ROWS * VOCAB * BYTES_PER_LOGIT and head.bytes.per_token < VOCAB * 8
