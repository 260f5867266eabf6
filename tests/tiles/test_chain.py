"""Convolutions and scans in tiles go on from tile to tile, without attention or beside it; gradients are the whole layer's.

Values are float64 where rounding would hide a small fault, or would look like one: a chunk of 64 tokens amplifies it.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.tile_models import step, without_random_numbers
from ds_memo.profile.live import LiveBytes
from ds_memo.remat.layer_call import CannotTile
from ds_memo.sequence.carry import Carry
from ds_memo.sequence.catch_mixers import Carrying, calls_mixers
from ds_memo.tiles import tile_runs
from ds_memo.tiles.layer import TiledCall
from tests import architectures
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import FP32, Different, poisoned_memory
from tests.runtime.traces import fingerprint
from tests.sequence.float64 import float64
from tests.tiles.rig import assert_within, attached, layers_of

Patch = pytest.MonkeyPatch
EXACT = 1e-11
BATCH = 2, 37
"""Sequences and length. No tile length divides it."""
DOCUMENTS = 9, 20
"""First tokens of packed documents."""
OWN: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 2},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"num_hidden_layers": 2},
    "in_a_row": {"num_hidden_layers": 2},
}
FAMILIES = (
    "lfm2",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "lfm3",
    "kimi_linear",
    "bailing_hybrid",
    "jamba",
    "mamba",
    "falcon_mamba",
    "recurrent_gemma",
    "falcon_h1",
    "zamba2",
    "in_a_row",
)


def in_a_row(self: Any, x: torch.Tensor, mamba_attention_mask: Any = None, **kwargs: Any) -> tuple[torch.Tensor]:
    """Run a layer of Falcon-H1 so that attention reads what a mixer has made, and a mixer what attention has."""
    x = x + self.mamba(self.input_layernorm(x), attention_mask=mamba_attention_mask)
    x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
    return (x + self.mamba(self.pre_ff_layernorm(x), attention_mask=mamba_attention_mask),)


def build(name: str, **own: Any) -> nn.Module:
    """Return a model whose states live for many tokens: otherwise no test would see whether they arrive."""
    own = OWN.get(name, {}) | own
    model = without_random_numbers(architectures.build("falcon_h1" if name == "in_a_row" else name, **own))
    for part in layers_of(model) if name == "in_a_row" else ():
        part.__class__ = type("InARow", (type(part),), {"forward": in_a_row})
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("A_log", "recurrent_param")):
            parameter.data.sub_(4)
    return model


def check(
    name: str,
    tile: int,
    alpha: float,
    tolerance: float = EXACT,
    batch: tuple[int, int] = BATCH,
    steps: int = 2,
    packed: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({}),
    own: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Compare steps in tiles with stock's: the first analyses, the second follows the recipes. Return the report.

    Args:
        settings: further ones of memo.
        own: fields of the model's configuration.
    """
    with float64() if tolerance == EXACT else nullcontext():
        model = build(name, **own)
        if packed:
            ends = [0, *DOCUMENTS, batch[1]]
            positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(ends)]).expand(batch)
            model.register_forward_pre_hook(lambda _, args, named: (args, {**named, "position_ids": positions}), with_kwargs=True)
        loss, want = step(model, batch)
        with attached(model, tile=tile, alpha=alpha, quiet=True, **settings) as handle:
            for _ in range(steps):
                with poisoned_memory():
                    found, got = step(model, batch)
                assert abs(found - loss) <= tolerance * abs(loss)
                assert_within(got, want, tolerance)
            return handle.report()


def assert_was_tiled(report: dict[str, Any]) -> None:
    assert report["tiles"]["not_tiled"] == {}
    assert report["tiles"]["layers"] == list(range(report["layers"]))


WHOLE = [
    ("lfm2", 5, 1.0, EXACT, False),
    ("nemotron_h", 16, 0.0, FP32, True),
    ("qwen3_next", 23, 0.5, EXACT, True),
    ("falcon_h1", 16, 0.0, FP32, True),
    ("in_a_row", 16, 0.5, EXACT, False),
    ("falcon_mamba", 16, 0.5, EXACT, False),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, tile, alpha, tolerance, packed", everyday(WHOLE, [WHOLE[0], *WHOLE[2:4]]))
def test_same_as_whole(name: str, tile: int, alpha: float, tolerance: float, packed: bool) -> None:
    """A convolution alone; Mamba-2, with blocks that mix no tokens; the delta rule; Mamba-2 beside attention, and before and
    behind it; Mamba-1."""
    assert_was_tiled(check(name, tile, alpha, tolerance, packed=packed))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tile", [5, 16, 23, 64])
def test_every_family(name: str, tile: int) -> None:
    """A tile of 64 tokens holds no whole sequence: these are longer."""
    for alpha in (0.0, 1.0):
        assert_was_tiled(check(name, tile, alpha, batch=(1, 71) if tile == 64 else BATCH))
        assert_was_tiled(check(name, tile, alpha, batch=(1, 71) if tile == 64 else BATCH, packed=True))


@pytest.mark.filterwarnings("ignore")
def test_tiles_of_several_sequences_carry_nothing(monkeypatch: Patch) -> None:
    given: list[Any] = []
    put_in(monkeypatch, tile_runs, "Carrying", lambda right, *how: given.append(how[0]) or right(*how))
    assert_was_tiled(check("lfm2", 64, 0.0, batch=(5, 17)))
    assert given and not any(given)


# ---- what is kept, and what is alive


@pytest.mark.filterwarnings("ignore")
def test_tiles_are_recomputed_as_alpha_says() -> None:
    stored = []
    for alpha in (0.0, 1.0):
        report = check("lfm2", 16, alpha)
        stored.append(report["bytes_to_host"])
        assert (report["gemm_flops_recomputed_fraction"] == 0) == (alpha == 1)
    assert stored[0] < stored[1]


def peak(length: int, tile: int, alpha: float) -> int:
    """Return the most bytes alive at once in a step of one convolutional layer."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(layers_of(build("lfm2"))[:1])
    x = torch.randn(1, length, architectures.HIDDEN, requires_grad=True)
    with attached(model, layers=["layers.0"], tile=tile, alpha=alpha, quiet=True):
        model.layers[0](x).sum().backward()
        model.zero_grad()
        with LiveBytes() as count:
            model.layers[0](x).backward(torch.ones_like(x))
    return count.peak


@pytest.mark.filterwarnings("ignore")
def test_what_is_alive_is_a_tile_and_hidden_states() -> None:
    """Four times the tiles add the output, its gradient and that of the input. A whole layer adds what its replay makes, too."""
    added = {}
    for tile, alpha in ((64, 0.0), (64, 1.0), (0, 0.0)):
        few, many = (peak(64 * tiles, tile, alpha) for tiles in (4, 16))
        added[tile, alpha] = (many - few) / (12 * 64 * architectures.HIDDEN * 4)
    assert added[64, 0.0] == pytest.approx(3, abs=0.1) and added[64, 1.0] == pytest.approx(3, abs=0.1)
    assert added[0, 0.0] > 30


# ---- layers that cannot


def reasons_of(name: str, **own: Any) -> set[str]:
    model = without_random_numbers(architectures.build(name, **own))
    with attached(model, tile=16, quiet=True) as handle:
        step(model, BATCH)
        return set(handle.report()["tiles"]["not_tiled"].values())


REFUSED = {
    "minimax": "MiniMaxLightningAttention mixes tokens in code of its own",
    "bloom": "its BloomAttention multiplies queries by keys in code of its own",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", everyday(REFUSED, ["bloom"]))
def test_is_refused_with_a_reason(name: str) -> None:
    (reason,) = reasons_of(name)
    assert REFUSED[name] in reason


@pytest.mark.parametrize("argument", ["seq_idx", "cu_seqlens", "initial_state"])
def test_what_is_of_all_tokens_is_refused(argument: str) -> None:
    """Documents that kernels are told of, and the state of a cache."""
    assert calls_mixers(architectures.build("qwen3_next"))  # and has them caught
    rule = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule
    query, g = torch.randn(3, 1, 8, 2, 4), torch.randn(2, 1, 8, 2)
    with Carrying(None), pytest.raises(CannotTile, match=f"its torch_chunk_gated_delta_rule gets {argument}"):
        rule(*query, *g, **{argument: torch.zeros(1, 8)})


@pytest.mark.filterwarnings("ignore")
def test_detach_puts_hooks_and_functions_back() -> None:
    """The second of two models goes on in tiles."""
    model, other = build("lfm2"), build("lfm2")
    source = importlib.import_module(type(model).__module__)
    table = importlib.import_module("transformers.modeling_utils").AttentionInterface
    before = fingerprint(model), fingerprint(other), dict(vars(source)), dict(vars(table))
    loss, want = step(other, BATCH)
    with attached(other, quiet=True) as goes_on:
        with attached(model, quiet=True) as handle:
            step(model, BATCH)
            assert_was_tiled(handle.report())
            assert fingerprint(model) != before[0] and dict(vars(source)) != before[2]
        assert fingerprint(model) == before[0]
        found, got = step(other, BATCH)
        assert abs(found - loss) <= FP32 * abs(loss)
        assert_within(got, want)
        assert_was_tiled(goes_on.report())
    assert (fingerprint(model), fingerprint(other), dict(vars(source)), dict(vars(table))) == before


# ---- evaluation


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1"])
def test_without_gradients(name: str) -> None:
    with float64():
        model, ids = build(name).eval(), torch.randint(3, architectures.VOCAB, BATCH)
        with torch.no_grad():
            want = model(input_ids=ids).logits
            with attached(model, tile=16, quiet=True) as handle:
                with poisoned_memory():
                    got = model(input_ids=ids).logits
                report = handle.report()
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    assert_was_tiled(report)
    assert report["bytes_to_host"] == 0


# ---- controls: faults in tiles, which the check before them does not see


HALO, STATE = 0, 1
"""What a mixer leaves: its convolution comes first, then its scan."""


def altered(which: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Have tiles get something else from the tile before."""

    def other(right: Callable[..., Any], given: Any, stretch: Any = None) -> Any:
        if given is not None:
            given = [change(tensor) if number % 2 == which else tensor for number, tensor in enumerate(given)]
        return right(given, stretch)

    return other


def state_gradient_dropped(right: Callable[..., Any], *args: Any) -> Any:
    *others, d_left, d_inputs = right(*args)
    return *others, [None if number % 2 == STATE else d for number, d in enumerate(d_left)], d_inputs


no_state = altered(STATE, torch.zeros_like)
halo_short_by_one = altered(HALO, lambda tensor: torch.cat([tensor[:, :1] * 0, tensor[:, 1:]], 1))
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a state is not carried": (tile_runs, "Carrying", no_state),
    "a halo is short by one": (tile_runs, "Carrying", halo_short_by_one),
    "a state's gradient is dropped": (TiledCall, "_tile_post_backward", state_gradient_dropped),
}
FAULTS_OF: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    **{fault: ("nemotron_h", *how) for fault, how in FAULTS.items()},
    "Mamba-1's state is not carried": ("falcon_mamba", tile_runs, "Carrying", no_state),
    "its gradient by attention is dropped": ("in_a_row", TiledCall, "_tile_pre_backward", state_gradient_dropped),
    "its gradient past attention is dropped": ("in_a_row", TiledCall, "_tile_post_backward", state_gradient_dropped),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", everyday(FAULTS_OF, FAULTS))
def test_is_caught(fault: str, monkeypatch: Patch) -> None:
    name, owner, function, change = FAULTS_OF[fault]
    put_in(monkeypatch, owner, function, change)
    with pytest.raises((Different, AssertionError)):
        check(name, 16, 0.0, FP32, steps=1)


@pytest.mark.filterwarnings("ignore")
def test_the_check_sees_what_is_not_carried(monkeypatch: Patch) -> None:
    put_in(monkeypatch, Carry, "_next", lambda right, carry: None)
    model = build("nemotron_h")
    with attached(model, tile=16, quiet=True) as handle:
        step(model, BATCH)
        assert any("other outputs" in why for why in handle.report()["tiles"]["not_tiled"].values())
