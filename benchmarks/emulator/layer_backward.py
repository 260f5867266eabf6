"""Draw what stands on the device over one layer's backward, from PyTorch's own history of allocations.

    torch.cuda.memory._record_memory_history(); ...one training step...; torch.cuda.memory._dump_snapshot("run.pickle")
    python -m benchmarks.layer_backward run.pickle [other.pickle …] -o run.png      # one panel for each

Each allocation has the Python stack of its request. The functions of ds_memo in it say what the memory is for; kernels that
autograd runs have none. Addresses must not be planned (`"plan": {"enabled": false}`): of an arena the allocator sees one block.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_memo.errors import MemoError, quoted
from ds_memo.files import write_output
from ds_memo.plan.snapshot import read_events
from ds_memo.show.plan import saved
from ds_memo.units import GIB

_OTHERS = "gradients, kernels' workspace"
_OF_ALL_TOKENS = "q, k, v, attention's output; their gradients"
_AGAIN = "outputs that are computed again"
_PURPOSES = {
    "tiles/weight_gradients.py:_plus_product": "sums of weight gradients",
    "tiles/attention_call.py:add": _OF_ALL_TOKENS,
    "swap/": "reload buffers",
    "remat/": _AGAIN,
    "tiles/attention_call.py:run_to_attention": _AGAIN,
    "tiles/attention_call.py:run_with_attention": _AGAIN,
    "tiles/weight_gradients.py:": _OTHERS,
    "tiles/attention.py:": _OTHERS,
    "tiles/": _OF_ALL_TOKENS,
}
"""Purposes by the begin of a function of the stack, as folder/file:function. The first that is found counts."""
COLOURS = {
    "reload buffers": "#5aa469",
    _OF_ALL_TOKENS: "#4878a8",
    "sums of weight gradients": "#9c6bb0",
    _AGAIN: "#e8a33d",
    _OTHERS: "#b0483a",
}
"""By purpose, from the bottom up."""
_STAGES = {
    "remat/call.py:begin_replay": 1,
    "remat/checkpoint.py:_again": 1,
    "remat/checkpoint.py:_until_stopped": 1,
    "tiles/layer.py:_pre_again": 1,
    "tiles/layer.py:_post_backward": 1,
    "tiles/attention.py:backward": 2,
    "tiles/layer.py:_pre_backward": 3,
}
"""Functions by their order in a layer's backward."""
_AUTOGRAD = 4


@dataclass(frozen=True)
class LayerBackward:
    """Memory over one layer's backward."""

    name: str
    nbytes: dict[str, np.ndarray]
    """Bytes after each request, by purpose."""

    @property
    def peak(self) -> int:
        return int(np.sum(list(self.nbytes.values()), axis=0).max())


def read_layer_backward(path: str | Path) -> LayerBackward:
    """Return the backward of a layer in the middle of a snapshot. Memory from before the recording does not count."""
    events, source = read_events(path)
    alive: dict[int, tuple[str, int]] = {}
    now = dict.fromkeys(COLOURS, 0)
    rows: list[list[int]] = []
    begins: list[int] = []
    before = 0
    for event in events:
        if event["action"] == "alloc":
            functions = ["/".join(frame["filename"].split("/")[-2:]) + ":" + frame["name"] for frame in event["frames"]]
            stage = min((_STAGES[function] for function in functions if function in _STAGES), default=_AUTOGRAD)
            if stage == 1 < before:
                begins.append(len(rows))
            before = stage
            purpose = _purpose(functions)
            alive[event["addr"]] = purpose, event["size"]
            now[purpose] += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in alive:
            purpose, size = alive.pop(event["addr"])
            now[purpose] -= size
        else:
            continue
        rows.append(list(now.values()))
    if len(begins) < 2:
        raise MemoError(
            f"{quoted(source, 400)}: found the backward of {len(begins)} layers, expected 2 or more. Record a training step with "
            'stacks (torch.cuda.memory._record_memory_history()), and with "plan": {"enabled": false} in the "memo" section'
        )
    middle = (len(begins) - 1) // 2
    columns = np.array(rows[begins[middle] : begins[middle + 1]], np.int64).T
    return LayerBackward(Path(path).stem, dict(zip(COLOURS, columns, strict=True)))


def as_png(backwards: Sequence[LayerBackward]) -> bytes:
    """Return a picture with one panel for each snapshot, drawn by matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(backwards), 5), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(backwards), sharey=True, squeeze=False)[0]
    for axes, backward in zip(panels, backwards, strict=True):
        heights = [backward.nbytes[purpose] / GIB for purpose in COLOURS]
        steps = np.arange(len(heights[0]))
        axes.stackplot(steps, heights, labels=list(COLOURS), colors=list(COLOURS.values()), step="post")
        axes.set_title(f"{quoted(backward.name)}: peak {backward.peak / GIB:.2f} GiB", fontsize=11, loc="left", parse_math=False)
        axes.set_xlabel("time (index of the request)")
        axes.set_xlim(0, len(steps) - 1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GiB that a layer's backward holds on the device")
    panels[0].set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return saved(figure, "png")


def _purpose(functions: Sequence[str]) -> str:
    """Return what memory is for, by the stack of its request."""
    found = (purpose for begin, purpose in _PURPOSES.items() if any(function.startswith(begin) for function in functions))
    return next(found, _OTHERS)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.layer_backward", description=__doc__.splitlines()[0])
    parser.add_argument("snapshots", metavar="FILE.pickle", nargs="+")
    parser.add_argument("-o", "--output", metavar="FILE.png", required=True)
    options = parser.parse_args(words)
    write_output(options.output, as_png([read_layer_backward(file) for file in options.snapshots]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
