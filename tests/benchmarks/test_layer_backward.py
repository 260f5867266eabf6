"""The stacks by which blocks of a layer's backward are told apart; tests/benchmarks/test_emulator.py reads real histories."""

from __future__ import annotations

from pathlib import Path

import ds_memo
from benchmarks import layer_backward


def test_ours_are_the_stacks_of_real_functions() -> None:
    """A function that gets another name would go unseen."""
    root = Path(ds_memo.__file__).parent
    for entry in (*layer_backward._STAGES, *layer_backward._PURPOSES):
        file, _, function = entry.partition(":")
        assert (root / file).exists() and (not function or f"def {function}(" in (root / file).read_text()), entry
