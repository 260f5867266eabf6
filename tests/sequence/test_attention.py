"""Attention of every kind in parts is that of whole sequences: under Ulysses, around a ring and both, packed, with memo too."""

from __future__ import annotations

import pytest

from ds_memo.hf import sequence as hf_sequence
from ds_memo.sequence import kernels, masks
from tests.distributed_harness.common import DistributedTest
from tests.everyday import everyday
from tests.faults import put_in
from tests.sequence.test_cuda_kernels import card, chosen
from tests.sequence.whole_and_parts import GRADIENTS, LOGITS, assert_exact, distances, memo

FAMILIES = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3")
"""Causal, a window, soft caps, a window in some layers, sinks, chunks, keys and values of two sizes."""
PACKED = ((20, 25, 19), (64,))
"""Borders off the ranks' own, a document on several ranks, and a row that is one document."""
UNEVEN = ((45,), (45,))
UNEVEN_PACKED = ((20, 27, 20), (1, 66))


class TestTwoRanks(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("name, ulysses", [("llama", 1), *((name, 2 - number % 2) for number, name in enumerate(FAMILIES))])
    def test_families(self, name, ulysses):
        assert_exact(name, ulysses, UNEVEN)
        assert_exact(name, ulysses, PACKED)

    @pytest.mark.parametrize("ulysses", [2, 1])
    def test_lengths(self, ulysses):
        for lengths in (((41,),), UNEVEN, ((67,),), UNEVEN_PACKED, ((5,),), ((2,),)):
            assert_exact("llama", ulysses, lengths)

    @pytest.mark.parametrize("ulysses", [2, 1])
    def test_parts_as_a_caller_has_them(self, ulysses):
        """SequenceParts of any lengths, one of them without a token."""
        for parts in ((40, 5), (1, 44), (45, 0), (0, 45)):
            assert_exact("llama", ulysses, ((20, 25), (45,)), parts=parts)

    @pytest.mark.parametrize("alpha, ulysses", [(0.0, 2), (0.5, 1), (1.0, 2)])
    def test_memo(self, ulysses, alpha):
        assert_exact("gpt_oss", ulysses, UNEVEN, memo=memo(alpha))
        assert_exact("llama", ulysses, UNEVEN_PACKED, memo=memo(alpha))

    def test_tiles(self):
        for name, ulysses in (("llama", 2), ("mistral", 1)):
            assert_exact(name, ulysses, UNEVEN, memo=memo(0.5, tile_tokens=11))
            assert_exact(name, ulysses, UNEVEN_PACKED, memo=memo(0.0, tile_tokens=11))
        assert_exact("nemotron_h", 2, UNEVEN, memo=memo(0.5, tile_tokens=11))

    def test_hybrids(self):
        """Convolutions, scans and attention, whose replays trade heads again."""
        for name, ulysses in (("qwen3_next", 2), ("nemotron_h", 1), ("lfm2_moe", 2), ("jamba", 1), ("falcon_h1", 2)):
            assert_exact(name, ulysses, UNEVEN_PACKED, memo=memo(0.5))


class TestCudaKernels(DistributedTest):
    """The kernels of a Hopper card, by stand-ins (tests/attention_kernels.py): cuDNN's, and flash for windows and documents.

    Padding is no document.
    """

    world_size = 2

    @pytest.mark.parametrize("ulysses", [2, 1])
    def test_with_memo_whole_and_in_tiles(self, ulysses, monkeypatch):
        for name, lengths in (("llama", UNEVEN), ("llama", ((20, 25),)), ("mistral", UNEVEN), ("one key head", UNEVEN)):
            ways = {"without memo": None, "whole": memo(0.5), "in tiles": memo(0.5, tile_tokens=11)}
            for way, section in ways.items():
                with card(monkeypatch, (9, 0)):
                    of_logits, of_gradients, where = distances(name, ulysses, lengths, memo=section)
                assert of_logits < 10 * LOGITS and of_gradients < 10 * GRADIENTS, (name, way, where)
                expected = {"cudnn"} if lengths == UNEVEN else {"flash"}
                assert chosen == expected or (name == "mistral" and "flash" in chosen), (name, way, chosen)


class TestControls(DistributedTest):
    """Mistakes that the comparisons above would show: each is off by more than a thousandth, where 1e-6 is allowed."""

    world_size = 2

    def test_results_of_blocks_added_without_it(self, monkeypatch):
        put_in(monkeypatch, kernels, "merge", lambda right, out, lse, more, more_lse: out.add_(more.to(out.dtype)).div_(2))
        assert distances("llama", 1, UNEVEN)[0] > 1e-3

    @pytest.mark.parametrize("ulysses", [2, 1])
    def test_documents_and_windows_not_seen(self, ulysses, monkeypatch):
        put_in(monkeypatch, hf_sequence, "SequenceParts", lambda right, ranks, length, documents: right(ranks, length))
        assert distances("llama", ulysses, UNEVEN)[0] <= LOGITS
        assert distances("llama", ulysses, UNEVEN_PACKED)[0] > 1e-3
        put_in(monkeypatch, masks, "_plan", lambda right, parts, mask: right(parts, masks.Mask()))
        assert distances("llama", ulysses, UNEVEN)[0] <= LOGITS
        assert distances("mistral", ulysses, UNEVEN)[0] > 1e-3


class TestFourRanks(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("name", everyday(FAMILIES, ["llama"], ["gpt_oss", "llama4_text"]))
    def test_two_by_two(self, name):
        assert_exact(name, 2, UNEVEN)
        assert_exact(name, 2, PACKED)

    @pytest.mark.parametrize("name, ulysses", [("six heads", 4), ("one key head", 4), ("six heads", 1), ("one key head", 2)])
    def test_heads_that_do_not_divide(self, name, ulysses):
        assert_exact(name, ulysses, UNEVEN_PACKED)
        assert_exact(name, ulysses, ((41,),), memo=memo(0.5))


class TestThreeRanks(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("ulysses", [3, 1])
    def test_three(self, ulysses):
        for name in ("llama", "six heads"):
            assert_exact(name, ulysses, UNEVEN_PACKED)
            assert_exact(name, ulysses, ((41,),))
