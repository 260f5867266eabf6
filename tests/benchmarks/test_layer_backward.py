"""One layer's backward is found in a history of allocations, and each block counts for what its stack says.

tests/benchmarks/test_emulator.py reads real ones.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ds_memo
from benchmarks import layer_backward
from benchmarks.layer_backward import COLOURS, read_layer_backward

REPLAY = ("remat/replay.py:__torch_dispatch__", "remat/recorded.py:_until_stopped")
RELOAD = ("swap/frame.py:new_buffer", "remat/call.py:begin_replay")
TAILS, HEADS = ((f"tiles/layer.py:_{part}_backward", "tiles/layer.py:_backward") for part in ("post", "pre"))
Q_K_V = ("remat/replay.py:__torch_dispatch__", "tiles/attention_call.py:add", *TAILS)
SUMS = ("tiles/weight_gradients.py:_plus_product", "tiles/weight_gradients.py:backward", *TAILS)
OPERANDS = "q, k, v, attention's output; their gradients"
GRADIENTS = "gradients, kernels' workspace"


class History:
    """Events as torch.cuda.memory._snapshot() has them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def alloc(self, size: int, stack: tuple[str, ...] = ()) -> int:
        frames = [dict(zip(("filename", "name"), (f"/any/ds_memo/{entry}").split(":"), strict=True), line=1) for entry in stack]
        self.events.append({"action": "alloc", "addr": 1 + len(self.events), "size": size, "frames": frames})
        return len(self.events)

    def free(self, address: int) -> None:
        for action in ("free_requested", "free_completed"):
            self.events.append({"action": action, "addr": address, "size": 0, "frames": []})

    def save(self, path: Path) -> str:
        path.write_bytes(pickle.dumps({"device_traces": [self.events], "segments": []}))
        return str(path)


def whole(layers: int) -> History:
    history = History()
    history.alloc(7)  # head and loss
    for layer in range(layers):
        buffer, replayed = history.alloc(100, RELOAD), history.alloc(30 + layer, REPLAY)
        gradient = history.alloc(5)
        for address in (buffer, replayed, gradient):
            history.free(address)
    return history


def in_tiles(layers: int, tiles: int) -> History:
    history = History()
    for _ in range(layers):
        q_k_v, sums = history.alloc(60, Q_K_V), history.alloc(8, SUMS)
        for stack in (TAILS, HEADS):
            for _ in range(tiles):
                history.free(history.alloc(3, (*REPLAY[:1], *stack)))
        history.free(q_k_v)
        history.free(sums)
    return history


def most(history: History, folder: Path) -> dict[str, int]:
    drawn = read_layer_backward(history.save(folder / "run.pickle"))
    return {purpose: int(nbytes.max()) for purpose, nbytes in drawn.nbytes.items()}


def test_a_whole_layer(tmp_path: Path) -> None:
    """The second of four; what stood before it, of another purpose, stays below."""
    assert most(whole(4), tmp_path) == dict.fromkeys(COLOURS, 0) | {
        "reload buffers": 100, "outputs that are computed again": 31, GRADIENTS: 12,
    }  # fmt: skip
    assert read_layer_backward(str(tmp_path / "run.pickle")).peak == 143


def test_a_layer_in_tiles_is_one_backward(tmp_path: Path) -> None:
    assert most(in_tiles(3, tiles=5), tmp_path) == dict.fromkeys(COLOURS, 0) | {
        OPERANDS: 60, "sums of weight gradients": 8, "outputs that are computed again": 3,
    }  # fmt: skip
    assert len(read_layer_backward(str(tmp_path / "run.pickle")).nbytes[OPERANDS]) == 2 + 2 * 2 * 5 + 2


def test_ours_are_the_stacks_of_real_functions() -> None:
    """A function that gets another name would go unseen."""
    root = Path(ds_memo.__file__).parent
    for entry in (*layer_backward._STAGES, *layer_backward._PURPOSES):
        file, _, function = entry.partition(":")
        assert (root / file).exists() and (not function or f"def {function}(" in (root / file).read_text()), entry
