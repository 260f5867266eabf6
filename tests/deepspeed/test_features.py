"""What else DeepSpeed's JSON and engine offer that hooks, patches or wraps what memo does: trained as without memo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed import engines
from tests.deepspeed.engines import MEMO, ds_config, start
from tests.models import VOCAB, build

deepspeed = engines.deepspeed
pytestmark = engines.ON_ONE_CPU_RANK

STEPS, LENGTH = 4, 24
LAYERS_AS_LEAVES = {"classes": ["LlamaDecoderLayer"]}
RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 3, "seq_per_step": 8},
    },
}


def loss_of(engine: Any, number: int) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(number))
    return engine(input_ids=tokens, labels=tokens).loss


def train(engine: Any, backward: Callable[[Any, torch.Tensor], Any]) -> list[torch.Tensor]:
    """The losses and, before each of the optimizer's steps, every gradient."""
    torch.manual_seed(3)
    seen, numbers = [], iter(range(2 * STEPS))
    for _ in range(STEPS):
        for number in (next(numbers), next(numbers)):
            loss = loss_of(engine, number)
            backward(engine, loss)
            seen.append(loss.detach())
            last = number % 2
            if last:
                owned = [p for p in engine.module.parameters() if p.requires_grad]
                gradients = [deepspeed.utils.safe_get_full_grad(p) if engine.zero_optimization() else p.grad for p in owned]
                assert all(gradient is not None for gradient in gradients)
                seen += [gradient.clone() for gradient in gradients]
            if last or engine.managed_gradient_accumulation():
                engine.step()
    return seen


def by_engine(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)


def directly(engine: Any, loss: torch.Tensor) -> None:
    loss.backward()


def twice(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss, retain_graph=True)
    engine.backward(0.5 * loss)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "stage, section, backward",
    [
        pytest.param(0, {"flops_profiler": {"enabled": True, "profile_step": 1}}, by_engine, id="flops_profiler"),
        pytest.param(3, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, by_engine, id="torch_autocast", marks=SLOW),
        pytest.param(3, {"zero_optimization": {"leaf_module": LAYERS_AS_LEAVES}}, by_engine, id="layers are leaves", marks=SLOW),
        pytest.param(3, {}, directly, id="loss.backward()", marks=SLOW),
        pytest.param(2, {}, twice, id="two backwards"),
        pytest.param(1, {"managed_gradient_accumulation": False}, by_engine, id="unmanaged accumulation"),
        pytest.param(2, {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": RANDOM_LTD}}},
                     by_engine, id="random-LTD"),
    ],
)  # fmt: skip
def test_losses_and_gradients(
    stage: int,
    section: dict[str, Any],
    backward: Callable[[Any, torch.Tensor], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepspeed.ops.random_ltd.dropping_utils.random_ltd_module", Kernels)
    want = train(engine_of(stage, section), backward)
    engine = engine_of(stage, section, memo={**MEMO, "cache_dir": str(tmp_path)})
    got = train(engine, backward)
    for ours, stocks in zip(got, want, strict=True):
        torch.testing.assert_close(ours, stocks, rtol=0, atol=2e-6 * max(1.0, stocks.abs().max().item()))
    assert engine.memo.report()["frames"] > 0
    engine.memo.detach()


def engine_of(stage: int, section: dict[str, Any], **more: Any) -> Any:
    config = ds_config(stage, **more)
    config["zero_optimization"].update(section.get("zero_optimization", {}))
    config.update({key: value for key, value in section.items() if key != "zero_optimization"})
    random_ltd = "data_efficiency" in section
    engine = start(config, model=build("opt" if random_ltd else "llama"))
    if random_ltd:
        from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

        convert_to_random_ltd(engine, type(engine.module.model.decoder.layers[0]))
    return engine


class Kernels:
    """Those of random-LTD, which DeepSpeed has for CUDA only."""

    @staticmethod
    def token_sort_(places: torch.Tensor, length: int) -> torch.Tensor:
        return places.sort(-1).values

    @staticmethod
    def token_gather(x: torch.Tensor, places: torch.Tensor, batch_first: bool) -> torch.Tensor:
        return x.gather(1, _of_rows(places, x))

    @staticmethod
    def token_scatter_(x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, batch_first: bool) -> torch.Tensor:
        return x.scatter_(1, _of_rows(places, x), rows)


def _of_rows(places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return places.long()[..., None].expand(-1, -1, x.shape[-1])
