"""Shared by tests of races: play a random schedule, or tell a story, over given streams, in one of three ways.

"whole": whole layers over the host; "tiles": layers in tiles; "files": whole layers over files behind a host of a few frames.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_memo.nvme.file_home import FileHome
from ds_memo.runtime.handle import MemoHandle
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import ThreadStreams
from tests.nvme.rig import FRAMES, Watched, attached_with_files
from tests.swap import scenarios
from tests.swap.mutants import engine_without
from tests.swap.ordered import OrderedStreams, OrderError
from tests.swap.rig import attached
from tests.swap.schedules import Setup, play

Results = dict[str, torch.Tensor]
ACTIONS = 6
STORY_FRAMES = 3
"""The host holds so many of a story's largest frames."""
IN_TILES = "tiles", "groups"
"""Ways that run layers in tiles. In groups some layers compute their inputs."""
SHOWS_IN_GRADIENTS = {
    "about_to_change: self.streams.wait(COMPUTE, frame.copied.get(index) or self.streams.mark(D2H))": scenarios.change_in_place,
    "bring_back: self.streams.wait(COMPUTE, frame.back)": scenarios.train,
    "_let_go: self.streams.wait(COMPUTE, frame.sent)": scenarios.train,
}
"""Waits whose absence shows in a story's numbers. On a CPU compute is over when a call returns, so a missing wait for compute
does not. Some others only guard memory that the stories never reuse."""

LIKELY = [
    ("pending.back", scenarios.drop_on_the_way_back),
    ("pending.sent", scenarios.drop_on_the_way_out),
    ("_close: self.streams.wait(COMPUTE, self.streams.mark(H2D))", scenarios.detach_with_a_reload_under_way),
    ("_close: self.streams.wait(COMPUTE, self.streams.mark(D2H))", scenarios.detach_with_copies_under_way),
    ("_send_away", scenarios.abandon_reloads),
    ("about_to_change", scenarios.change_in_place),
    ("abort", scenarios.raise_in_a_layer),
    ("_late", scenarios.train),
    ("_late", scenarios.raise_while_inputs_are_computed),
]
"""Words of a wait, and the story that shows its absence soonest."""


@contextmanager
def over(
    way: str,
    model: nn.Module,
    streams: Any,
    config: dict[str, Any],
    path: Path | None,
    host: int,
    home: type[FileHome],
    **more: Any,
) -> Iterator[Any]:
    """Attach a model over `streams`.

    Args:
        path, host, home: in files: their folder, the host's bytes, and the class of the home.
        more: classes of the engine and of the slab.
    """
    watching = streams if isinstance(streams, OrderedStreams) else nullcontext()
    files = way == "files"
    attach = attached_with_files(model, streams, config, path, host, home) if files else attached(model, streams, config, **more)
    with watching, attach as memo:
        yield memo


# ---- random schedules


def tiles_of(seed: int) -> dict[str, Any]:
    """Draw tiles for a schedule. Its lengths are 5, 16 and 24, its batches 1 and 2."""
    draw = random.Random(seed + 10_000)
    return {"tile_tokens": draw.choice([5, 7, 9, 15, 24]), "head_groups": draw.choice([1, 2, 4])}


def run(
    way: str, seed: int, streams: Any, path: Path | None = None, home: type[FileHome] = FileHome, **more: Any
) -> tuple[Results, int]:
    """Return a schedule's results, and how much it did of what its way is for: layers in tiles, or bytes read from files."""
    setup, largest = Setup(seed), by_host(seed)[1] if way == "files" else 0
    config = setup.config | (tiles_of(seed) if way in IN_TILES else {})
    config |= {"input_every": 2 + seed % 4} if way == "groups" else {}
    with over(way, setup.model, streams, config, path, FRAMES * (largest or PAGE), home, **more) as memo:
        results, done = play(setup.model, seed, ACTIONS), 1
        if way == "files":
            done = MemoHandle(memo).report()["nvme"]["bytes_read"]
        elif way in IN_TILES:
            tiles = MemoHandle(memo).report()["tiles"] or {
                "layers": [],
                "not_tiled": {},
            }  # a schedule may have no training forward
            assert all("a hook of its" in reason for reason in tiles["not_tiled"].values())  # the action "raise" sets one
            done = len(tiles["layers"])
        return results, done


@functools.cache
def by_host(seed: int) -> tuple[Results, int]:
    """Return a schedule's results in whole layers over the host, and the bytes of its largest frame."""
    Watched.largest = 0
    return run("whole", seed, ThreadStreams(), slab=Watched)[0], Watched.largest


# ---- stories


def tell(
    story: Any, streams: Any, way: str = "whole", path: Path | None = None, home: type[FileHome] = FileHome, **more: Any
) -> Results:
    """Train as a story says; return its results."""
    model = scenarios.stack(story)
    config = {"alpha": 0.5, "resident_layers": scenarios.RESIDENTS.get(story, 0)}
    config |= {"tile_tokens": 16, "head_groups": 2} if way in IN_TILES else {}
    config |= {"input_every": 4} if way == "groups" else {}
    host = STORY_FRAMES * told(story)[1] if way == "files" else 0
    with over(way, model, streams, config, path, host, home, **more) as memo:
        return story(memo, model, scenarios.batches())


@functools.cache
def told(story: Any) -> tuple[Results, int]:
    """Return a story's results in whole layers over the host, and the bytes of its largest frame."""
    Watched.largest = 0
    return tell(story, ThreadStreams(), slab=Watched), Watched.largest


def noticed(way: str, wait: str | None = None, path: Path | None = None, home: type[FileHome] = FileHome) -> bool:
    """Return True if the checker objects to an engine without this wait, or to this home."""
    more = {"engine": engine_without(wait)} if wait else {}
    first = [story for words, story in LIKELY if words in (wait or "")]
    for story in [*first, *scenarios.STORIES]:
        checker = OrderedStreams()
        try:
            tell(story, checker, way, path, home, **more)
            checker.verify()
        except (OrderError, AssertionError):
            assert checker.violations
        if checker.violations:
            return True
    return False
