"""Rig of the tests of lazy logits: small models, the comparison with stock, and a witness of the largest logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_memo
from ds_memo.logits.head_bytes import LEAST_ROWS
from ds_memo.runtime.handle import MemoHandle
from tests.models import assert_same_grads, gradients

VOCAB, HIDDEN = 97, 16
BATCH, LENGTH = 2, 300
TILE = LEAST_ROWS
"""Rows: 600 tokens are two tiles and a rest."""
EXACT, SINGLE = 1e-11, 1e-6
"""Largest relative difference in float64, and where Transformers computes the loss of labels in float32."""
MEMO = {"enabled": True, "alpha": 1.0, "resident_layers": 0, "device_memory_gib": 1e-3, "plan": {"enabled": False}}
"""So small a device takes the smallest tiles."""
WHOLE = {"kernels": {"cross_entropy": "whole"}}
Loss = Callable[[nn.Module], torch.Tensor]


def causal(kind: str = "Llama", dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any) -> nn.Module:
    """Build a causal language model of Transformers, with weights that make steep losses."""
    import transformers

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.3, "max_position_embeddings": 2 * LENGTH,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).train()


def tokens(seed: int = 1, batch: int = BATCH, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, of which some do not count."""
    ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :7] = labels[-1, -3:] = -100
    return ids, labels


IDS, LABELS = tokens()
UPSTREAM = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5
"""A gradient for each row."""


def logits_of(model: nn.Module, **more: Any) -> torch.Tensor:
    return model(input_ids=IDS, **more).logits


def with_labels(model: nn.Module, **more: Any) -> torch.Tensor:
    return model(input_ids=IDS, labels=LABELS, **more).loss


class Witness(TorchDispatchMode):
    """Notes the most rows of a tensor that an op makes with the vocabulary in its shape, but for the first dimension."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found, given = func(*args, **(kwargs or {})), {_storage(each) for each in tree_leaves((args, kwargs))}
        for each in tree_leaves(found):
            if (storage := _storage(each)) and storage not in given and each.is_floating_point() and VOCAB in each.shape[1:]:
                self.rows = max(self.rows, each.numel() // VOCAB)
        return found


def _storage(value: Any) -> int:
    """Return the address of a plain tensor's storage, or 0 where it takes no memory."""
    return value.untyped_storage()._cdata if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta else 0


@contextmanager
def attached(model: nn.Module, warns: str | None = None, **memo: Any) -> Iterator[MemoHandle]:
    """Attach a model with the smallest tiles, and detach it at the end.

    Args:
        warns: words of a warning that must come; empty: any may. None: a warning is an error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error" if warns is None else "ignore", ds_memo.MemoWarning)
        handle = ds_memo.attach(model, MEMO | memo)
        try:
            yield handle
            heard = " ".join(handle.report()["warnings"])
        finally:
            handle.detach()
    assert warns is None or warns in heard, heard


def lazy_calls(handle: MemoHandle) -> int:
    return sum(head.lazy_calls for head in handle._session.heads)


def step(model: nn.Module, loss: Loss) -> dict[str, torch.Tensor | None]:
    """Return the loss and all gradients of a step."""
    torch.manual_seed(7)
    value = loss(model)
    value.backward()
    return {"the loss": value.detach(), **gradients(model)}


def compare(
    model: nn.Module, loss: Loss, tolerance: float = EXACT, warns: str | None = None, whole: bool = False, **memo: Any
) -> None:
    """Compare a step with the same model's without memo, and see that no logits exist beyond a tile's.

    Args:
        warns: as in :func:`attached`.
        whole: an op makes the logits whole.
    """
    want = step(model, loss)
    with attached(model, warns, **memo) as handle, Witness() as witness:
        got = step(model, loss)
        assert lazy_calls(handle), "no call of the head was lazy"
    assert_same_grads(got, want, tolerance)
    assert whole == (witness.rows > TILE), f"{witness.rows} rows of logits were alive in one tensor"


def lora(model: nn.Module, **more: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **more)).to(torch.float64)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which hides mistakes
            nn.init.normal_(parameter, std=0.2)
    return adapted.train()
