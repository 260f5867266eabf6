"""Mixers of Transformers on parts of sequences against whole documents: outputs and all gradients, in float64."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.sequence import exchange, mixers
from ds_memo.sequence.catch_mixers import CAUGHT, catch_mixers
from ds_memo.sequence.parts import SequenceParts
from ds_memo.sequence.ranks import ranks_of
from ds_memo.tiles.check.refuse import is_external
from tests import architectures
from tests.distributed_harness.common import DistributedTest
from tests.models import HIDDEN
from tests.sequence.float64 import float64

EXACT, WRONG = 1e-12, 1e-3
EVERYDAY = ("qwen3_next", "nemotron_h", "recurrent_gemma")
REST = (
    *("qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "falcon_h1", "mamba2", "bamba", "granitemoehybrid"),
    *("zamba2", "jamba", "falcon_mamba", "mamba", "lfm2", "lfm3"),
)
WHOLE = ("minimax", "zaya", "rwkv")
ONE = ((0,),)
PACKED = ((0, 13, 14, 29), (0, 7))
"""Two rows; the second document of the first is one token long."""
ALIKE = ((0, 17, 20),)
OWN = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
}
"""Sizes of some families: a layer that mixes, and few heads."""
LENGTH = 37
"""Divides by no number of ranks here: there is padding."""

ranks = functools.cache(lambda ulysses: ranks_of(dist.group.WORLD, ulysses))


def mixer(name: str, **sizes: Any) -> nn.Module:
    """Return a mixer with states that live for many tokens: otherwise no test would see whether they arrive."""
    architectures.OWN[name] = architectures.OWN.get(name, {}) | sizes
    model = architectures.build(name)
    hooked = catch_mixers(model)
    assert catch_mixers(model) == hooked
    assert all(len(module._forward_pre_hooks) == len(module._forward_hooks) == 1 for module in hooked)
    assert not any(is_external(hook) for module in hooked for hook in module._forward_hooks.values())
    block = "RecurrentGemmaRecurrentBlock"  # it has the convolution and the scan as modules
    found = [module for module in model.modules() if type(module).__name__ == block] or hooked
    module = next(module for module in found if not isinstance(module, nn.Conv1d))
    for parameter_name, parameter in module.named_parameters():
        if parameter_name.endswith(("A_log", "recurrent_param")):
            parameter.data.sub_(5)
    return module


def run(module: nn.Module, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the output (b, s, …)."""
    given = {
        "RecurrentGemmaRecurrentBlock": {"position_ids": positions, "attention_mask": None, "use_cache": False},
        "MiniMaxLightningAttention": {"position_embeddings": None, "attention_mask": None},
        "ZayaCCAProjection": {"past_key_values": None},
    }
    out = module(x, **given.get(type(module).__name__, {}))
    if type(module).__name__ == "ZayaCCAProjection":
        return torch.cat([part.flatten(2) for part in out], 2)
    return out[0] if isinstance(out, tuple) else out


def give(module: nn.Module, parts: SequenceParts | None) -> None:
    for part in module.modules():
        part._ds_memo_parts = parts


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm().clamp(min=1e-30))


def worst(module: nn.Module, parts: SequenceParts, given: SequenceParts | None = None) -> float:
    """Return the largest relative difference from whole documents, of output or gradient, that any rank sees.

    Args:
        given: what the module is told, if not `parts`.
    """
    length, unpadded = parts.length, parts.unpadded
    torch.manual_seed(1)
    x, positions = torch.randn(2, length, HIDDEN), torch.zeros(2, length, dtype=torch.long)
    leaf, rows = x.clone().requires_grad_(), []
    give(module, None)
    for row, starts in zip(range(2), parts.documents if len(parts.documents) == 2 else parts.documents * 2, strict=True):
        outs = []
        for start, stop in itertools.pairwise((*starts, length)):
            positions[row, start:stop] = torch.arange(stop - start)
            outs.append(run(module, leaf[row : row + 1, start:stop], positions[row : row + 1, start:stop]))
        rows.append(torch.cat(outs, 1))
    expected = torch.cat(rows)
    weights = torch.randn(expected.shape)
    weights[:, unpadded:] = 0
    module.zero_grad()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}

    module.zero_grad()
    give(module, given or parts)
    CAUGHT.clear()
    mine = parts.own_of(x, 1).requires_grad_()
    got = run(module, mine, parts.own_of(positions, 1))
    (got * parts.own_of(weights, 1)).sum().backward()
    assert CAUGHT
    real = parts.own_of(torch.arange(length), 0) < unpadded
    differences = [off(got[:, real], parts.own_of(expected, 1)[:, real])] if real.any() else []
    differences.append(off(parts.own_of(leaf.grad, 1) + 1, mine.grad + 1))  # a part of padding alone has none
    for name, expected_gradient in gradients.items():
        found = module.get_parameter(name).grad
        assert found is not None, f"{name} has no gradient here, and an engine's exchange would wait for it"
        dist.all_reduce(found)
        differences.append(off(found, expected_gradient))
    largest = torch.tensor(max(differences))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def layouts(every: bool) -> list[SequenceParts]:
    """Return parts of packed rows, and if `every` of one document and of pieces shorter than a halo, by Ulysses and by ring."""
    size = dist.get_world_size()
    sides = [number for number in range(1, size + 1) if size % number == 0]
    cases = [(LENGTH, PACKED)]
    if every:
        cases += [(LENGTH, ONE), (LENGTH, ALIKE), (2 * size - 1, ONE), (2 * size, ((0, 3),))]
    return [SequenceParts(ranks(ulysses), *case) for ulysses in sides for case in cases]


@float64()
def check(name: str, every: bool = False, **sizes: Any) -> None:
    module = mixer(name, **OWN.get(name, {}) | sizes)
    for parts in layouts(every):
        difference = worst(module, parts)
        assert difference < EXACT, (name, parts.ranks.ulysses, parts.unpadded, parts.documents, difference)


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_mixers_on_parts_are_those_of_whole_documents(self):
        for name in EVERYDAY:
            check(name, every=True)

    @pytest.mark.slow
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", REST)
    def test_other_families(self, name):
        check(name)

    @float64()
    def test_a_wrong_exchange_is_seen(self):
        module, parts = mixer("qwen3_next"), SequenceParts(ranks(1), 40)
        assert worst(module, parts) < EXACT

        halos, to_tokens, own = mixers._halos, exchange.to_tokens, parts.own
        mixers._halos = lambda x, reach, parts: halos(x, reach, parts).index_fill(1, torch.arange(0, 2 * reach, reach), 0)
        assert worst(module, parts) > WRONG, "a halo of one token less"
        mixers._halos = halos

        exchange.to_tokens = lambda x, counts, group: to_tokens(x.roll(own, 1), counts, group)
        assert worst(module, parts) > WRONG, "blocks go to the wrong rank"
        exchange.to_tokens = to_tokens

        alone = SequenceParts(ranks(1), 40, ((0, 10, 30),))  # where pieces begin: what comes if tokens stay on their rank
        assert worst(module, parts, given=alone) > WRONG, "states and halos end with a piece"

    @float64()
    def test_a_profile_calls_with_fewer_tokens(self):
        parts = SequenceParts(ranks(1), 40, ((0, 11),))
        for name in ("qwen3_next", "recurrent_gemma"):
            assert worst(mixer(name), parts.shortened(12), given=parts) < EXACT

    @float64()
    def test_modules_that_run_on_all_tokens(self):
        for name in WHOLE:
            module = mixer(name)
            for ulysses in (1, 2):
                assert worst(module, SequenceParts(ranks(ulysses), 37)) < EXACT, name
            with pytest.raises(MemoError, match=r"packed documents.*begins at token 7"):
                worst(module, SequenceParts(ranks(2), 37, ((0, 7),)))

    @float64()
    def test_documents_are_told_to_kernels(self):
        """Kernels of fla and mamba-ssm take documents as cu_seqlens of one row and as seq_idx."""
        reference, calls = _kernels()
        for name in ("qwen3_next", "nemotron_h"):
            module = mixer(name)
            for documents in (PACKED, ALIKE):
                calls.clear()
                assert worst(module, SequenceParts(ranks(1), LENGTH, documents)) < EXACT
                assert calls == [reference[name]], "one call"

    @float64()
    def test_what_would_be_wrong_is_refused(self):
        parts = SequenceParts(ranks(2), 40)
        module = mixer("qwen3_next")
        give(module, parts)
        x = torch.randn(2, parts.own, HIDDEN)
        with pytest.raises(MemoError, match=r"got seq_idx.*position_ids"):
            module(x, seq_idx=torch.zeros(2, parts.own))
        with pytest.raises(MemoError, match="cu_seqlens"):
            module(x, cu_seq_lens_q=torch.tensor([0, 5]))
        with pytest.raises(MemoError, match="got 21 tokens, this rank's part has 20"):
            module(torch.randn(2, parts.own + 1, HIDDEN))
        module(x, position_ids=torch.zeros(2, parts.own))  # a keyword that no function takes
        module = mixer("recurrent_gemma")
        give(module, parts)
        module.rg_lru.recurrent_states = torch.zeros(2, HIDDEN)
        with pytest.raises(MemoError, match="recurrent_states, as where a cache is used"):
            module.rg_lru(x, torch.zeros(2, parts.own, dtype=torch.long))
        module.conv_1d.padding = (0,)
        with pytest.raises(MemoError, match=r"20 tokens with padding 0; .* 20 and padding 3"):
            run(module, x, torch.zeros(2, parts.own, dtype=torch.long))
        with pytest.raises(MemoError, match=r"the tensor decay of shape \(2,\)"):
            mixers.scan("chunk_kda", lambda value, decay: value, (torch.zeros(1, 20, 2, 4), torch.ones(2)), {}, parts)


class TestThreeRanks(DistributedTest):
    world_size = 3

    def test_heads_that_do_not_divide(self):
        check("qwen3_next")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ("nemotron_h", "recurrent_gemma"))
    def test_other_families(self, name):
        check(name)


@pytest.mark.slow
class TestFourRanks(DistributedTest):
    world_size = 4

    def test_pieces_shorter_than_a_halo(self):
        check("qwen3_next", every=True)

    @pytest.mark.parametrize("name", ("mamba", "lfm2"))
    def test_families(self, name):
        check(name)

    def test_fewer_heads_than_ranks(self):
        check("qwen3_next", linear_num_value_heads=2, linear_num_key_heads=1)
        check("nemotron_h", mamba_num_heads=2)


def _kernels() -> tuple[dict[str, str], list[str]]:
    """Put kernels where Transformers looks for them: its own functions, document by document as they are told.

    Return the kernel's name of each family, and a list to which each call adds its name.
    """
    calls: list[str] = []

    def own(family: str, name: str):
        return inspect.unwrap(vars(sys.modules[f"transformers.models.{family}.modeling_{family}"])[name])

    def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens, use_qk_l2norm_in_kernel):
        borders = [0, q.shape[1]]
        if cu_seqlens is not None:
            calls.append("chunk_gated_delta_rule")
            borders = cu_seqlens.tolist()
            assert len(q) == 1 and (borders[0], borders[-1]) == (0, q.shape[1])
        function = functools.partial(own("qwen3_next", "torch_chunk_gated_delta_rule"), use_qk_l2norm_in_kernel=True)
        each = [function(*(x[:, a:b] for x in (q, k, v, g, beta)))[0] for a, b in itertools.pairwise(borders)]
        return torch.cat(each, 1), None

    def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, dt_limit, seq_idx=None):
        if seq_idx is None:
            seq_idx = torch.zeros(x.shape[:2], dtype=torch.int32)
        else:
            calls.append("mamba_chunk_scan_combined")
        assert seq_idx.shape == x.shape[:2] and seq_idx.dtype == torch.int32
        rest = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        rows = []
        for row, numbers in enumerate(seq_idx):
            cuts = [0, *torch.unique_consecutive(numbers, return_counts=True)[1].cumsum(0).tolist()]
            here = [[t[row : row + 1, a:b] for t in (x, dt, B, C)] for a, b in itertools.pairwise(cuts)]
            scan = own("nemotron_h", "mamba2_chunk_scan")
            rows.append(torch.cat([scan(x, dt, A, B, C, **rest) for x, dt, B, C in here], 1))
        return torch.cat(rows)

    for package, kernel in (("fla", chunk_gated_delta_rule), ("mamba_ssm", mamba_chunk_scan_combined)):
        sys.modules[package] = types.ModuleType(package)
        setattr(sys.modules[package], kernel.__name__, kernel)
    return {"qwen3_next": "chunk_gated_delta_rule", "nemotron_h": "mamba_chunk_scan_combined"}, calls
