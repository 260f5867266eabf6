"""Sequence parallelism from a caller's side: gradients, with memo and head groups; refusals; batches and the loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import deepspeed.comm as dist
import pytest
import torch
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

import ds_memo
from ds_memo.autotune.policy import PlacementPolicy
from ds_memo.deepspeed import sequence
from ds_memo.head_groups import HeadGroup
from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.runtime.sequence import decoders
from ds_memo.tiles import attention
from ds_memo.tiles.modes import SupplyHeads
from tests.deepspeed.matrix import mean_loss
from tests.distributed_harness.common import DistributedTest
from tests.faults import put_in
from tests.inside import inside
from tests.models import FP32, VOCAB, Different, Toy, assert_same_grads, build, gradients

LENGTH = 24
MEMO = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
SUMS = SimpleNamespace(zero_optimization_stage=lambda: 1)  # an engine that adds up what the ranks have, as assert_whole does


def batch(seed=0, rows=2):
    """Tokens, position_ids, aligned labels, each (rows, LENGTH); more labels are left out of the first half."""
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    labels[:, 2:9] = -100
    return tokens[:, :-1], torch.arange(LENGTH).expand(rows, -1), labels


def part(value):
    return value.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def whole_gradients(model, seed=0, rows=2):
    tokens, positions, labels = batch(seed, rows)
    mean_loss(model(input_ids=tokens, position_ids=positions, use_cache=False).logits, labels).backward()
    return gradients(model)


def gradients_of_parts(model, seed=0, rows=2):
    tokens, positions, labels = map(part, batch(seed, rows))
    loss = mean_loss(model(input_ids=tokens, position_ids=positions, use_cache=False).logits, labels)
    sequence.mean_over_ranks(loss, labels, SUMS).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    return gradients(model)


class TestGradients(DistributedTest):
    world_size = 2

    def test_parts_give_what_whole_sequences_give(self):
        """GQA, a head size of its own, a model without key and value heads in its configuration, experts."""
        for name in ("llama", "qwen3", "neox", "mixtral"):
            want = whole_gradients(build(name))
            parallel = build(name)
            sequence.set_up(parallel, 2)
            assert_same_grads(gradients_of_parts(parallel), want, FP32)
            handle = ds_memo.attach(parallel, MEMO)
            for _ in range(3):  # analysed, then recorded
                assert_same_grads(gradients_of_parts(parallel), want, FP32)
            report = handle.report()
            assert report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0 and not report["warnings"], name
            assert_same_grads(gradients_of_parts(parallel, rows=3), whole_gradients(build(name), rows=3), FP32)  # another batch
            handle.detach()

    def test_labels_of_a_part(self):
        """A model computes the loss of its part if it is told which token each position predicts."""
        tokens, positions, labels = (part(value).contiguous() for value in batch())
        model = build("llama")
        sequence.set_up(model, 2)
        loss = model(input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels).loss
        sequence.mean_over_ranks(loss, labels, SUMS).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        assert_same_grads(gradients(model), whole_gradients(build("llama")), FP32)

    def test_a_plain_model_beside_it_stays_plain(self):
        want = whole_gradients(build("llama"))
        sequence.set_up(build("llama"), 2)
        assert_same_grads(whole_gradients(build("llama")), want, 0.0)
        assert_same_grads(whole_gradients(build("qwen2")), whole_gradients(build("qwen2")), 0.0)

    def test_ranks_that_see_a_call_differently_stay_in_step(self):
        """One rank analyses what the other follows, and their alphas differ: all-to-alls still meet, gradients are right."""
        parallel = build("llama")
        sequence.set_up(parallel, 2)
        handle = ds_memo.attach(parallel, MEMO | {"alpha": 0.25 + 0.5 * dist.get_rank()})
        for step in range(6):
            if step % 3 == dist.get_rank():
                for layer in inside(handle).layers:
                    layer.recipes.clear()
            assert_same_grads(gradients_of_parts(parallel, step), whole_gradients(build("llama"), step), FP32)

    def test_a_part_without_labels(self):
        parallel = build("llama")
        sequence.set_up(parallel, 2)
        tokens, positions, labels = batch()
        labels[:, : LENGTH // 2] = -100
        model = build("llama")
        want = mean_loss(model(input_ids=tokens, use_cache=False).logits, labels)
        loss = mean_loss(parallel(input_ids=part(tokens), position_ids=part(positions)).logits, part(labels))
        assert torch.isnan(loss) == (dist.get_rank() == 0)
        loss = sequence.mean_over_ranks(loss, part(labels), SUMS)
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        loss.backward()
        grads = [p.grad for p in parallel.parameters() if p.grad is not None]
        assert grads and all(torch.isfinite(grad).all() for grad in grads)

    def test_what_goes_wrong_is_said_by_every_rank(self):
        tokens, positions, labels = map(part, batch())
        model = build("llama")
        sequence.set_up(model, 2)
        given = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        layer = (torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16))
        for more, message in (
            ({"position_ids": None}, "was called without position_ids"),
            ({"past_key_values": DynamicCache([layer])}, "a cache is of whole sequences"),
            ({"labels": labels}, "was called with labels, and would leave each part's last token out"),
            ({"attention_mask": torch.zeros(2, 1, 12, 12)}, r"a mask of its own \(a Tensor of shape \(2, 1, 12, 12\)\)"),
            ({"attention_mask": torch.ones(2, 24)}, r"attention_mask has the shape \(2, 24\); expected \(2, 12\)"),
            ({"position_ids": positions.expand(3, 2, -1)}, r"the shape \(3, 2, 12\); expected \(rows, tokens\)"),
        ):
            with pytest.raises(ds_memo.MemoError, match=message):
                model(**given | more)
        assert_same_grads(gradients_of_parts(model), whole_gradients(build("llama")), FP32)  # the ranks are still in step
        with pytest.raises(ds_memo.MemoError, match="drops 10% of attention's weights"):
            dropping = build("llama", attention_dropout=0.1)
            sequence.set_up(dropping, 2)
            dropping(**given)
        for other, message in (
            (Toy(), "Toy is no Hugging Face model"),
            (
                T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCAB)),
                "T5ForConditionalGeneration is an encoder and a decoder",
            ),
        ):
            with pytest.raises(ds_memo.MemoError, match=message):
                sequence.set_up(other, 2)
        with pytest.raises(ds_memo.MemoConfigError, match="sequence_parallel_size: got 4, but the 2 ranks of this run"):
            sequence.set_up(build("llama"), 4)

    def test_parts_of_unequal_size_are_said_by_every_rank(self):
        model = build("llama")
        sequence.set_up(model, 2)
        tokens, positions, _ = batch(rows=3)
        mine = (slice(0, 3), slice(0, 10)) if dist.get_rank() == 0 else (slice(0, 2), slice(10, 24))
        with pytest.raises(ds_memo.MemoError, match=r"unequal size \(rows x tokens: 3 x 10 on rank 0, 2 x 14 on rank 1\)"):
            model(input_ids=tokens[mine], position_ids=positions[mine])
        assert_same_grads(gradients_of_parts(model), whole_gradients(build("llama")), FP32)  # the ranks are still in step

    def test_rotary_frequencies_that_depend_on_the_length(self):
        longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
        for rope, off in (
            ({"rope_type": "dynamic", "factor": 4.0}, "up to 12, 24"),
            ({**longrope, "original_max_position_embeddings": 16}, "up to 12, 24"),
            ({**longrope, "original_max_position_embeddings": 8}, None),
            ({**longrope, "original_max_position_embeddings": 24}, None),
        ):
            shape = {"rope_parameters": {"rope_theta": 1e4, **rope}, "max_position_embeddings": 16}
            want = whole_gradients(build("llama", **shape))
            parallel = build("llama", **shape)
            sequence.set_up(parallel, 2)
            if off is None:
                assert_same_grads(gradients_of_parts(parallel), want, FP32)
                continue
            with pytest.raises(ds_memo.MemoError, match=f'embeddings of type "{rope["rope_type"]}" .* {off}'):
                gradients_of_parts(parallel)
            decoders[parallel]._rotary = None  # without the check gradients are wrong
            with pytest.raises(Different):
                assert_same_grads(gradients_of_parts(parallel), want, 1e-2)

    def test_split(self):
        """Both ranks read batches of their own and get their part of all, in turn, with every label, until one has no more."""
        sequence.set_up(build("llama"), 2)
        names = ("input_ids", "position_ids", "labels")

        def read(number, rank):  # of a length that differs between ranks, and does not divide
            return dict(zip(names, (value[:, : 24 - rank] for value in batch(10 * number + rank)), strict=True)) | {
                "kind": number
            }

        own = (read(number, dist.get_rank()) for number in range(2 + dist.get_rank()))
        parts = list(sequence.split(own, torch.device("cpu")))
        assert len(parts) == 4
        for number, got in enumerate(parts):
            want = read(*divmod(number, 2))
            assert got.keys() == {*names, "kind"} and got["kind"] == want["kind"]
            assert all(torch.equal(got[name], part(want[name])) for name in names)


IN_TILES = {"alpha": 0.0, "resident_layers": 0, "plan": {"enabled": False}, "tile_tokens": 4}


def gradients_in_groups(name, ranks, groups, **shape):
    """Return those of a model in tiles, and the groups that attention's backward ran for."""
    parallel, ran = build(name, **shape), set()
    sequence.set_up(parallel, ranks)
    handle = ds_memo.attach(parallel, IN_TILES | {"head_groups": groups})
    with pytest.MonkeyPatch.context() as patch:
        note = lambda right, *args: ran.add((args[2].number, args[2].groups)) or right(*args)  # noqa: E731
        put_in(patch, SupplyHeads, "__init__", note)
        for _ in range(2):
            found = gradients_of_parts(parallel)
    report = handle.report()
    assert len(report["tiles"]["layers"]) == len(inside(handle).layers) and report["attention_recomputed"] == 0
    handle.detach()
    return found, ran, report["warnings"]


class TestHeadGroups(DistributedTest):
    world_size = 2

    def test_in_groups_of_each_ranks_heads(self):
        for name, groups, shape in (
            ("neox", 2, {}),  # of two key-value heads
            ("llama", 4, {"num_attention_heads": 8, "num_key_value_heads": 4}),  # and of heads that share one
        ):
            want = whole_gradients(build(name, **shape))
            found, ran, warnings = gradients_in_groups(name, 2, groups, **shape)
            assert_same_grads(found, want, FP32)
            assert ran == {(number, groups) for number in range(groups)} and not warnings, name

    def test_attention_is_recomputed_in_groups(self, monkeypatch):
        again = Placement(PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, 0.0, tiles=Tiles(4, 2))
        monkeypatch.setattr(PlacementPolicy, "placement", lambda self, layer: again)
        want, parallel = whole_gradients(build("llama")), build("llama")
        sequence.set_up(parallel, 2)
        handle = ds_memo.attach(parallel, IN_TILES)
        for step in range(1, 3):
            assert_same_grads(gradients_of_parts(parallel), want, FP32)
            assert handle.report()["attention_recomputed"] == step * parallel.config.num_hidden_layers

    def test_what_is_wrong_is_noticed(self, monkeypatch):
        """Keys of another group; gradients of keys that are those of the last group that shares them, without the others."""

        def wrong_keys(right, group, tensor, dim):
            return right(replace(group, number=1 - group.number) if tensor.shape[dim] == 4 else group, tensor, dim)

        shape = {"num_attention_heads": 8, "num_key_value_heads": 4}
        want = whole_gradients(build("llama", **shape))
        for fault, groups in (
            ((HeadGroup, "_part", wrong_keys), 2),
            ((attention, "add_to", lambda _, *a: dict.__setitem__(*a)), 4),
        ):
            with monkeypatch.context() as patch:
                put_in(patch, *fault)
                found, _, _ = gradients_in_groups("llama", 2, groups, **shape)
            with pytest.raises(AssertionError):
                assert_same_grads(found, want, FP32)

    def test_groups_that_do_not_divide_a_ranks_heads_are_named(self):
        want = whole_gradients(build("llama"))
        found, ran, (warning,) = gradients_in_groups("llama", 2, 4)
        assert_same_grads(found, want, FP32)
        assert ran == {(0, 1)} and "do not divide the 2 heads of a rank" in warning

    @pytest.mark.world_size(4)
    def test_more_ranks_than_key_and_value_heads(self):
        shape = {"num_attention_heads": 8, "num_key_value_heads": 2}
        want = whole_gradients(build("llama", **shape))
        found, ran, warnings = gradients_in_groups("llama", 4, 2, **shape)
        assert_same_grads(found, want, FP32)
        assert ran == {(0, 2), (1, 2)} and not warnings


# ---- before anything starts


@pytest.mark.parametrize(
    "size, ulysses, world, message",
    [
        (2, None, 3, "sequence_parallel_size: got 2, but the 3 ranks of this run are no multiple of it; choose a divisor"),
        (4, 3, 8, "memo.ulysses_size: got 3; allowed: a number that divides sequence_parallel_size, which is 4"),
        (2, 4, 8, "memo.ulysses_size: got 4; allowed: a number that divides sequence_parallel_size, which is 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(size, ulysses, world, message):
    with pytest.raises(ds_memo.MemoConfigError, match=message):
        sequence.check(size, ulysses, world)


@pytest.mark.parametrize("value", [0, -2, 1.5, "2", True, None])
def test_the_field(value):
    assert sequence.size_in({}) == 1 and sequence.size_in({"sequence_parallel_size": 4}) == 4
    with pytest.raises(ds_memo.MemoConfigError, match="a whole number above 0"):
        sequence.size_in({"sequence_parallel_size": value})


def test_reduce_scatter():
    zero = {"stage": 3, "reduce_scatter": False}
    with pytest.raises(ds_memo.MemoConfigError, match=r"zero_optimization\.reduce_scatter"):
        sequence.refuse_conflicts({"zero_optimization": zero})
    sequence.refuse_conflicts({"zero_optimization": zero | {"stage": 2}})
    sequence.refuse_conflicts({})
