"""Which architectures of Transformers run in tiles: docs/tiles_models.md is true, and all gradients are stock's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tile_models import RUNS, Verdict, group, groups_of, verdict
from ds_memo.tiles.layer import TiledCall
from tests import architectures
from tests.faults import put_in

PAGE = groups_of((Path(__file__).parents[2] / "docs" / "tiles_models.md").read_text())
MODELS = [name for name in architectures.NAMES if name not in architectures.NOT_COMPARED]
DAILY = ("llama", "gpt2", "gemma4_text", "bloom")
"""A plain one; positions as parameters; a second input with a gradient; attention that makes its scores."""
ALWAYS_TILED = {
    *("llama", "gpt_neox", "gemma3_text", "qwen3", "phi", "phi3", "olmo2", "mixtral", "qwen3_moe", "gpt2", "granite", "cohere"),
    *("stablelm", "glm4", "starcoder2"),
}


@pytest.mark.skipif(not architectures.IS_PINNED, reason="the page is of the pinned Transformers")
def test_the_page_has_every_architecture() -> None:
    assert set(PAGE) == set(MODELS)


def test_the_best_known_are_tiled() -> None:
    assert {PAGE[name] for name in ALWAYS_TILED} == {"all in tiles"}


@pytest.mark.filterwarnings("ignore")  # kernels that are not installed, layers that run whole
@pytest.mark.parametrize("name", DAILY)
def test_a_run_of_a_few(name: str) -> None:
    check(verdict(name, RUNS[:1]))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_an_architecture(name: str) -> None:
    check(verdict(name))


def check(found: Verdict) -> None:
    assert group(found) == PAGE[found.name] or not architectures.IS_PINNED
    assert found.right, f"{found.difference:.1e} and {found.loss_difference:.1e}, bar {found.bar:.1e}: {found.worst}"


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that leaves out the part of d(hidden) that comes through attention."""
    put_in(monkeypatch, TiledCall, "_tile_pre_backward", lambda right, *args: (None, *right(*args)[1:]))
    with pytest.raises(AssertionError, match="bar"):
        check(verdict("llama", RUNS[:1]))
