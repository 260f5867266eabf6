"""Models with convolutions, scans and attention in parts, under memo's replay: gradients of the same parts without memo."""

from __future__ import annotations

import pytest
import torch

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.remat import layer_state
from ds_memo.sequence.parts import PARTS
from tests import architectures
from tests.distributed_harness.common import DistributedTest
from tests.models import gradients
from tests.sequence.whole_and_parts import part

SAME = 1e-6
"""Distance of a gradient, of its size or of a thousandth of the largest: rounding of GEMMs that alpha splits in two."""
DOCUMENTS = ((17, 27), (44,))


def positions(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)


def loss(model: torch.nn.Module, lengths: tuple[int, ...]) -> torch.Tensor:
    tokens = torch.randint(3, architectures.VOCAB, (2, 44), generator=torch.Generator().manual_seed(1))
    return model(input_ids=part(tokens), position_ids=part(positions(lengths)), use_cache=False).logits.float().pow(2).mean()


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take two forwards of other documents, then their backwards."""
    model.zero_grad()
    first, second = (loss(model, lengths) for lengths in DOCUMENTS)
    first.backward()
    second.backward()
    return {name: gradient for name, gradient in gradients(model).items() if gradient is not None}


def made(name: str, ulysses: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a model in parts, and its gradients without memo."""
    torch.manual_seed(0)
    model = architectures.build(name).train()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.data.sub_(3)  # states that live longer than a token
    sequence.set_up(model, 2, ulysses)
    return model, trained(model)


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    largest = max(float(gradient.norm()) for gradient in want.values())
    return max(float((got[name] - w).norm()) / max(float(w.norm()), 1e-3 * largest) for name, w in want.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestUnderMemo(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ulysses", [2, 1])
    @pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "lfm2_moe", "jamba", "falcon_h1"])
    def test_replays_are_the_forward(self, name: str, ulysses: int) -> None:
        model, want = made(name, ulysses)
        for alpha in (0.0, 0.5, 1.0):
            handle = ds_memo.attach(model, {"enabled": True, "alpha": alpha, "resident_layers": 0})
            for _ in range(2):
                assert distance(trained(model), want) < SAME
            report = handle.report()
            assert report["sequence"] == {"ranks": 2, "ulysses": ulysses, "ring": 2 // ulysses}
            assert report["bytes_to_host"]
            handle.detach()

    def test_control(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replays on the parts of the latest forward."""
        model, want = made("qwen3_next", 2)
        ds_memo.attach(model, {"enabled": True, "alpha": 0.5, "resident_layers": 0})
        put_in = layer_state.Part.put_in

        def forgetting(self, settings):  # the control: a replay on the parts of the latest forward
            names = [index for index, known in enumerate(settings.names) if known == PARTS]
            values = list(settings.values)
            for index in names:
                values[index] = self.table[PARTS]
            put_in(self, settings._replace(values=tuple(values)))

        monkeypatch.setattr(layer_state.Part, "put_in", forgetting)
        with pytest.raises((ds_memo.MemoError, RuntimeError, AssertionError)):  # other work, or other values
            assert distance(trained(model), want) < 1e-3
