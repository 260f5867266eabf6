"""Phases: the parts of a training pass that memory requests belong to, and their names in files and messages."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple, TypeAlias

PHASE_WORDS = "a phase: L<i>.f, L<i>.b, embed, head (with or without .f .b), reduce, step or end"
_LAYER_PASS = re.compile(r"L(\d+)\.([fb])")


class LayerPass(NamedTuple):
    """A layer's forward, or its replay and backward."""

    layer: int
    """Its index in the model."""
    backward: bool

    def __str__(self) -> str:
        return f"L{self.layer}.{'b' if self.backward else 'f'}"


class PassPart(enum.Enum):
    """A phase outside the layers."""

    EMBED = "embed"
    EMBED_FORWARD = "embed.f"
    EMBED_BACKWARD = "embed.b"
    HEAD = "head"
    HEAD_FORWARD = "head.f"
    HEAD_BACKWARD = "head.b"
    REDUCE = "reduce"
    STEP = "step"
    END = "end"

    def __str__(self) -> str:
        return self.value


PhaseName: TypeAlias = LayerPass | PassPart


def parse_phase(text: str) -> PhaseName:
    """Read a name that ``str`` wrote. Raises ValueError."""
    layer_pass = _LAYER_PASS.fullmatch(text)
    return LayerPass(int(layer_pass[1]), layer_pass[2] == "b") if layer_pass else PassPart(text)
