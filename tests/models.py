"""Tiny models with random weights, one step of each, and the comparison that every gradient test rests on."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ds_memo

HIDDEN, LAYERS, HEADS, VOCAB = 64, 4, 4, 96
FP32, BF16 = 2e-6, 1e-2
"""Largest relative difference of a gradient from stock's."""


# ---- models


class Block(nn.Module):
    """A pre-norm transformer block in plain PyTorch."""

    def __init__(self, hidden: int = HIDDEN, attention_dropout: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values: (b, heads, s, d)."""
        b, s, _ = x.shape
        return self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind()

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = self.attention_dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)

    def join(self, out: torch.Tensor) -> torch.Tensor:
        return self.o(out.transpose(1, 2).flatten(2))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.join(self.sdpa(*self.heads(x))))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(x)
        return x + self.feed(x)


class Toy(nn.Module):
    """Blocks and a head. It takes embeddings and returns a loss, like Hugging Face models."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def run_blocks(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **kwargs)
        return x

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        logits = self.head(self.run_blocks(inputs_embeds, **kwargs))
        return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits=logits)


class Stack(nn.Module):
    """Blocks alone, narrower than the others. The loss is the mean square."""

    def __init__(self, layers: int, hidden: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Mlp(nn.Module):
    """Layers whose ops can all be differentiated twice."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh()) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _decoder(name: str, **more: Any) -> Callable[[], nn.Module]:
    def build(**most: Any) -> nn.Module:
        import transformers

        sizes = {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
        }
        config = getattr(transformers, f"{name}Config")(**{**sizes, **more, **most})
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


def _gpt2(**more: Any) -> nn.Module:
    import transformers

    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128, "vocab_size": VOCAB}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**{**sizes, **no_dropout, **more}))


def _opt(**more: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "ffn_dim": 2 * HIDDEN, "num_hidden_layers": LAYERS}
    rest = {"num_attention_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": 128, "dropout": 0.0}
    return transformers.AutoModelForCausalLM.from_config(transformers.OPTConfig(**{**sizes, **rest, **more}))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": _decoder("Llama"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=16),
    "mistral": _decoder("Mistral", sliding_window=8),
    "phi3": _decoder("Phi3"),
    "gemma2": _decoder("Gemma2", head_dim=16, sliding_window=8, attn_implementation="eager"),  # sdpa has no soft cap
    "gemma3": _decoder("Gemma3Text", head_dim=16, sliding_window=8),
    "gpt2": _gpt2,
    "opt": _opt,
    "neox": _decoder("GPTNeoX"),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen3_moe": _decoder("Qwen3Moe", head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
    "plain": Toy,
}

ZERO_GRADIENTS = {"opt": ("k_proj.bias",)}
"""Names of gradients that are zero in exact arithmetic. One vector added to every key shifts all scores of a query equally, which
softmax ignores. (Rotary embeddings turn it differently at each position, so there the gradient is not zero.)"""


def build(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name](**more).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are all 0 or all 1 hide mistakes
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


# ---- one step


@dataclass
class Batch:
    embeds: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def random(cls, batch: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        embeds = torch.randn(batch, length, HIDDEN, generator=generator).to(dtype)
        return cls(embeds, torch.randint(0, VOCAB, (batch, length), generator=generator))

    def to(self, device: torch.device) -> Batch:
        return Batch(self.embeds.to(device), self.labels.to(device))


@dataclass
class Outcome:
    """Results of a step, to compare."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    generator: torch.Tensor = field(default_factory=lambda: generators())
    """The generators' states after the step."""


def generators() -> torch.Tensor:
    """Return the states of the CPU's generator and, where CUDA is in use, of the device's."""
    on_device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return torch.cat([torch.get_rng_state(), *on_device])


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of the parameters' gradients, and clear these."""
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def step(model: nn.Module, batch: Batch, seed: int = 7, **kwargs: Any) -> Outcome:
    """Run one forward and backward from a known generator state."""
    torch.manual_seed(seed)
    embeds = batch.embeds.clone().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=batch.labels, **kwargs).loss
    loss.backward()
    return Outcome(loss.detach(), {**gradients(model), "the input": embeds.grad})


# ---- comparing


class Different(AssertionError):
    """A step's results differ from stock's."""


def assert_same(got: Outcome, want: Outcome, tolerance: float = FP32, zero: Iterable[str] = ()) -> None:
    """Compare loss and generator to the bit, and each gradient by the norm of its difference over its norm.

    Args:
        zero: endings of names of biases whose gradient is zero in exact arithmetic. Stock has rounding noise there, from terms
            that cancel. The difference is compared with the weight's gradient of the same Linear, which sums the same terms,
            each times an input of size 1 (a norm comes before).

    Raises:
        Different: names every gradient that is off.
    """
    if not torch.equal(got.loss, want.loss):
        raise Different(f"loss {got.loss.item()!r}, stock has {want.loss.item()!r}")
    if not torch.equal(got.generator, want.generator):
        raise Different("the random generator is not where stock leaves it")
    assert_same_grads(got.grads, want.grads, tolerance, zero)


def assert_same_grads(
    got: dict[str, torch.Tensor | None], want: dict[str, torch.Tensor | None], tolerance: float = FP32, zero: Iterable[str] = ()
) -> None:
    """Compare gradients as :func:`assert_same` does."""

    def scale(name: str) -> float:
        if any(name.endswith(ending) for ending in zero):
            name = name.removesuffix("bias") + "weight"
        return float(want[name].double().norm())

    assert_close(got, want, tolerance, scale)


def assert_close(
    got: dict[str, torch.Tensor | None],
    want: dict[str, torch.Tensor | None],
    tolerance: float,
    scale: Callable[[str], float],
) -> None:
    """Compare the norm of each gradient's difference with `tolerance` of ``scale(name)``.

    Raises:
        Different: names the gradients that are off.
    """
    if got.keys() != want.keys():
        raise Different(f"gradients of other things: {got.keys() ^ want.keys()}")
    wrong = []
    for name, reference in want.items():
        value = got[name]
        if value is None or reference is None:
            if value is not reference:
                wrong.append(f"{name}: {'none' if value is None else 'one'}, stock has {'none' if reference is None else 'one'}")
            continue
        distance, allowed = float((value.double() - reference.double()).norm()), tolerance * scale(name)
        if not distance <= allowed:  # a NaN is wrong too
            wrong.append(f"{name}: off by {distance:.1e}, of which {allowed:.1e} is allowed")
    if wrong:
        raise Different(f"{len(wrong)} of {len(want)} gradients: " + "; ".join(wrong[:8]))


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that a value that is used but never computed shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on by default and needs this
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


CONFIGS = ({"alpha": 0.5, "resident_layers": 1}, {"alpha": 0.0, "resident_layers": 0}, {"alpha": 1.0, "resident_layers": LAYERS})
"""A mixture of stored rows, recomputed rows and a resident layer; every row recomputed; every layer resident."""


def compare_with_stock(
    model: nn.Module,
    drive: Callable[[nn.Module, int], Outcome],
    config: dict[str, Any],
    steps: int = 3,
    tolerance: float = FP32,
    layers: Any = None,
    same: Callable[[Outcome, Outcome, float], None] = assert_same,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> dict[str, Any]:
    """Drive a stock copy and an attached copy of `model` through the same steps and compare each.

    Args:
        drive: runs a step of a model, given the step's number.
        layers: as in ``ds_memo.attach``, by name.
        same: the comparison.
        prepare: what is done to both copies first.

    Returns:
        The report after the last step.
    """
    stock, attached = copy.deepcopy(model), copy.deepcopy(model)
    prepare(stock), prepare(attached)
    handle = ds_memo.attach(attached, config, layers=layers)
    try:
        for number in range(steps):
            want = drive(stock, number)
            with poisoned_memory():
                got = drive(attached, number)
            try:
                same(got, want, tolerance)
            except Different as different:
                raise Different(f"step {number} with {config}: {different}") from None
        return handle.report()
    finally:
        handle.detach()


def every_config(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the first two of CONFIGS, as argument `config`."""
    import pytest  # the benchmarks use this module too, and need no pytest

    names = lambda config: f"alpha={config['alpha']}-resident={config['resident_layers']}"  # noqa: E731
    return pytest.mark.parametrize("config", CONFIGS[:2], ids=names)(test)
