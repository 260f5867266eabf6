"""Models that train with files behind a host that holds little of what they store: to the bit as with all of it on the host."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch

from ds_memo.nvme import direct_files
from ds_memo.runtime.attach import attach
from ds_memo.runtime.handle import MemoHandle
from ds_memo.swap.streams import ThreadStreams
from tests import architectures
from tests.everyday import everyday
from tests.inside import inside
from tests.models import Batch, build
from tests.nvme.rig import FILES_GIB, FRAMES, Watched, attached_with_files, host_of, late_files
from tests.sequence.float64 import float64
from tests.swap.delayed import DelayedStreams
from tests.swap.rig import HOST, attached, gradients
from tests.tiles import test_chain as hybrids
from tests.tiles.rig import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
LAYERS = 6
BATCHES = [Batch.random(2, 33, seed=seed) for seed in range(4)]
CASES = [("llama", 0.5, 0, None, 1), ("llama", 1.0, 2, 8, 1), ("neox", 0.0, 2, 8, 1), ("neox", 1.0, 2, None, 1)]
CASES += [("mixtral", 0.0, 2, None, 1), ("mixtral", 1.0, 2, 8, 1), ("llama", 0.0, 0, 8, 3), ("mixtral", 1.0, 0, None, 6)]
"""Model, alpha, layers on the device, length of tiles, and of how many layers at most one stores its input."""


def model_of(name: str, layers: int = LAYERS) -> torch.nn.Module:
    return build(name, num_hidden_layers=layers)


def loss_of(model, batch: Batch) -> torch.Tensor:
    return model(inputs_embeds=batch.embeds, labels=batch.labels).loss


def accumulate(model) -> None:
    for batch in BATCHES[:3]:
        loss_of(model, batch).backward()


def by_host(name: str, config: dict, layers: int = LAYERS) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return gradients of the host home, the most bytes that it held, and those of the largest frame."""
    model, Watched.largest = model_of(name, layers), 0
    with attached(model, ThreadStreams(), config, slab=Watched) as memo:
        accumulate(model)
        return gradients(model), memo.slab.peak_used, Watched.largest


def assert_equal(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(ours[name], wanted[name])]
    assert not different


def settings(alpha: float, residents: int, tile: int | None, every: int = 1) -> dict:
    config = {"alpha": alpha, "resident_layers": residents, "plan": {"enabled": False}}
    return config | ({"tile_tokens": tile} if tile else {}) | ({"input_every": every} if every > 1 else {})


def test_a_drive_that_fails_is_what_is_blamed(tmp_path, monkeypatch):
    config = settings(0.5, 0, None)
    wanted, _, largest = by_host("llama", config)
    model = model_of("llama")

    def full(*_) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with attached_with_files(model, ThreadStreams(), config, tmp_path, FRAMES * largest) as memo:
        monkeypatch.setattr(direct_files.os, "pwritev", full)
        accumulate(model)
        assert_equal(gradients(model), wanted)
        written, why = (MemoHandle(memo).report()["nvme"]["bytes_written"], memo.warnings)
        monkeypatch.undo()
    assert written == 0
    assert any("could not be written and stays in host memory: rank 0 could not write" in warning for warning in why)
    assert any("the files take no more of it" in warning for warning in why) and not any("other models" in w for w in why)


@pytest.mark.parametrize(("name", "alpha", "residents", "tile", "every"), everyday(CASES, CASES[:1]))
def test_gradients_are_the_host_homes(name, alpha, residents, tile, every, tmp_path):
    config = settings(alpha, residents, tile, every)
    wanted, peak, largest = by_host(name, config)
    model, host = model_of(name), max(3 * largest, peak // 2)  # a layer in tiles asks for its room at once
    with late_files(0), attached_with_files(model, DelayedStreams(0), config, tmp_path, host) as memo:
        accumulate(model)
        assert memo.slab.peak_used <= memo.slab.budget.nbytes
        written, read = (MemoHandle(memo).report()["nvme"][f"bytes_{which}"] for which in ("written", "read"))
        assert read > 0 and (every > 1 or written >= read)  # what inputs are computed from may be read twice
    assert_equal(gradients(model), wanted)


FOUR = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
"""Two layers would stay in the host's smallest share."""
HYBRIDS = [("qwen3_next", 0.0), ("falcon_h1", 0.0), ("nemotron_h", 0.0), ("lfm2", 1.0)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "alpha"), everyday(HYBRIDS, []))
def test_what_tiles_of_hybrids_leave_each_other_comes_back(name, alpha, tmp_path):
    """A tile's frame also has its halo and its state, whose gradients are stock's."""
    with float64():
        model = hybrids.build(name, **(FOUR if name == "qwen3_next" else {}))
        ids = torch.randint(3, architectures.VOCAB, hybrids.BATCH)
        loss, config = lambda: model(input_ids=ids, labels=ids).loss.backward(), settings(alpha, 0, 8)
        loss()
        wanted, Watched.largest = gradients(model), 0
        model.zero_grad()
        with attached(model, ThreadStreams(), config, slab=Watched) as memo:
            loss()
            host = max(3 * Watched.largest, memo.slab.peak_used // 2)
        with late_files(0), attached_with_files(model, DelayedStreams(0), config, tmp_path, host) as memo:
            for _ in range(2):
                model.zero_grad()
                loss()
                assert_within(gradients(model), wanted, hybrids.EXACT)
            report = MemoHandle(memo).report()
    hybrids.assert_was_tiled(report)
    assert report["nvme"]["bytes_written"] >= report["nvme"]["bytes_read"] > 0


@pytest.mark.slow
def test_a_model_that_is_dropped_in_the_middle_leaves_its_host_to_others(tmp_path):
    """Its reads are under way into blocks that the next model gets."""
    config = settings(0.5, 0, None)
    wanted, _, largest = by_host("llama", config)
    other = model_of("llama")
    with attached_with_files(other, ThreadStreams(), config, tmp_path, 4 * largest) as memo:
        section = HOST | config | {"nvme": {"path": str(tmp_path), "gib": FILES_GIB}, "host_memory_gib": host_of(4 * largest)}
        for turn in range(4):
            other.zero_grad()
            model = model_of("llama")
            with late_files(turn, delays_s=(5e-3,)):
                assert inside(attach(model, section)).slab.pool is memo.slab.pool
                loss = loss_of(model, BATCHES[0])
                torch.autograd.grad(loss, [next(model.model.layers[-1].parameters())], retain_graph=True)
                del loss, model
                gc.collect()
                accumulate(other)
            assert_equal(gradients(other), wanted)
