"""Random training schedules: a user's operations on graphs, in any order."""

from __future__ import annotations

import gc
import random
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.models import Stack
from tests.swap.rig import gpt_neox, llama, tokens

LENGTHS = (5, 16, 24)
WEIGHTS = {"forward": 5, "backward": 4, "partial": 2, "drop": 1, "eval": 1, "raise": 1, "collect": 1, "zero": 1}


class Halt(Exception):
    pass


@dataclass
class Setup:
    """One model with one memo configuration, drawn from a seed."""

    seed: int
    config: dict = field(init=False)
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        layers = draw.randint(4, 6)
        self.model = _model(draw.choice(["llama", "gpt_neox", "stack", "stack"]), layers)
        self.config = {
            "alpha": draw.choice([0.0, 0.125, 0.25, 0.5, 0.875, 1.0, draw.random()]),
            "resident_layers": draw.choice([0, 0, 1, 2, 3, layers]),
        }


_MODELS: dict[tuple[str, int], nn.Module] = {}


def _model(kind: str, layers: int) -> nn.Module:
    if (kind, layers) not in _MODELS:
        _MODELS[kind, layers] = {"llama": llama, "gpt_neox": gpt_neox, "stack": Stack}[kind](layers)
    return _MODELS[kind, layers]


def layers_of(model: nn.Module) -> nn.ModuleList:
    return max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)


def play(model: nn.Module, seed: int, actions: int) -> dict[str, torch.Tensor]:
    """Run the schedule of a seed. Return every result by the step that made it."""
    draw = random.Random(seed)
    results: dict[str, torch.Tensor] = {}
    graphs: list[torch.Tensor] = []
    parameters = dict(model.named_parameters())

    def forward() -> torch.Tensor:
        batch, length = draw.choice([1, 1, 2]), draw.choice(LENGTHS)
        if isinstance(model, Stack):
            made = torch.Generator().manual_seed(draw.randrange(1000))
            return model(torch.randn(batch, length, 16, generator=made))
        return model(**tokens(draw.randrange(1000), batch, length)).loss

    def note_gradients(when: str) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                results[f"{when}: gradient of {name}"] = parameter.grad.clone()

    model.zero_grad(set_to_none=True)
    for turn in range(actions):
        action = draw.choices(list(WEIGHTS), WEIGHTS.values())[0]
        pick = draw.randrange(len(graphs)) if graphs else None
        if action == "forward" and len(graphs) < 3:
            graphs.append(forward())
            results[f"{turn}: loss"] = graphs[-1].detach().clone()
        elif action == "backward" and pick is not None:
            retain = draw.random() < 0.3
            graphs[pick].backward(retain_graph=retain)
            if not retain:
                del graphs[pick]
        elif action == "partial" and pick is not None:
            # Shorter than a full backward: some reloads issued ahead are never used.
            last = draw.choice(list(layers_of(model))[1:])
            wanted = [draw.choice(list(last.parameters())), *last.parameters()][:2]
            for index, grad in enumerate(torch.autograd.grad(graphs[pick], wanted, retain_graph=True, allow_unused=True)):
                if grad is not None:
                    results[f"{turn}: partial gradient {index}"] = grad
        elif action == "drop" and pick is not None:
            del graphs[pick]
        elif action == "eval":
            with torch.no_grad():
                results[f"{turn}: eval loss"] = forward().clone()
        elif action == "raise":
            layer = draw.choice(layers_of(model))
            inner = draw.choice([part for part in layer.modules() if isinstance(part, nn.Linear)])
            hook = inner.register_forward_hook(_halt)
            with suppress(Halt):
                forward()
            hook.remove()
        elif action == "collect":
            gc.collect()
        elif action == "zero":
            note_gradients(str(turn))
            model.zero_grad(set_to_none=True)
    while graphs:
        graphs.pop(draw.randrange(len(graphs))).backward()
    note_gradients("end")
    return results


def _halt(*_: object) -> None:
    raise Halt


def differing(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of results that are not equal to the last bit."""
    assert ours.keys() == reference.keys()
    return [name for name, value in reference.items() if not torch.equal(ours[name], value)]
