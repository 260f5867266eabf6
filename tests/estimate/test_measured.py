"""Estimates with a real run's profile in place of formulas."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds_memo.cli import main as cli
from ds_memo.estimate.hardware import load
from ds_memo.profile.json_file import to_json
from ds_memo.profile.run_profile import LayerProfile, RunProfile
from tests.command import complaint
from tests.profile.samples import make_sample

GPT = str(Path(__file__).parents[2] / "ds_configs" / "models" / "gpt-7b.json")


def by_kind(*kinds: dict, device: str = "NVIDIA A800-SXM4-80GB") -> dict:
    return {
        "device": device,
        "kinds": [{"hidden": [4096], "dtype": "torch.bfloat16", "layer": "in words"} | kind for kind in kinds],
    }


def profile(
    layers: int, slower: float = 1.0, link: float = 20e9, ranks_per_sequence: int = 8, key: dict | None = None
) -> RunProfile:
    samples = tuple(make_sample(length, slower=slower, hidden=2 * 4096) for length in (1024, 2048))
    return RunProfile(
        key or by_kind({}), "fit", (LayerProfile("layer 0", samples),), (0,) * layers, link, link, 8, ranks_per_sequence
    )


def ask(capsys, tmp_path: Path, of: RunProfile, *words: str) -> dict:
    (path := tmp_path / "profile.json").write_text(to_json(of))
    base = ["estimate", "--model", GPT, "--hardware", "a800", "--gpus", "8", "--seq-length", "512K", "--json"]
    assert cli.main([*base, "--profile", str(path), *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_kind_of_layer_stands_for_any_number(capsys, tmp_path):
    assert ask(capsys, tmp_path, profile(4)) == ask(capsys, tmp_path, profile(32))


def test_its_times_and_link_are_used(capsys, tmp_path):
    once, twice = (ask(capsys, tmp_path, profile(32, slower=slower)) for slower in (1.0, 2.0))
    layers = {name: twice["parts"]["step_s"][name] / once["parts"]["step_s"][name] for name in ("forward", "backward")}
    assert layers == pytest.approx({"forward": 2.0, "backward": 2.0})
    assert once["parts"]["step_s"]["forward"] == pytest.approx(32 * (1.2e-6 * 65536 + 1e-10 * 65536**2), rel=0.02)
    assert ask(capsys, tmp_path, profile(32, link=2e9))["mfu"] < once["mfu"]


def test_one_ranks_profile_stands_for_ranks_that_share_a_sequence(capsys, tmp_path):
    """Attention covers the full sequence, and the formula adds the exchange between ranks."""
    there = ask(capsys, tmp_path, profile(32, slower=0.1, ranks_per_sequence=1), "--sp", "8")["parts"]["step_s"]["forward"]
    computed = 0.1 * 32 * (1.2e-6 * 65536 + 8 * 1e-10 * 65536**2)
    sent = 32 * (4 * 2 * 65536 * 4096 / 8) * 7 / load("a800").intra_node
    assert there == pytest.approx(computed + sent, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "format"),
        (to_json(replace(profile(4), kinds=2 * profile(4).kinds, layers=(0, 1, 0, 1))), "4 layers of 2 kinds, gpt-7b has 32"),
        ("\0", "JSON"),
        (100_000 * "[", "nested too deeply"),
        (to_json(profile(32, key=by_kind({"hidden": [2048]}))), "hidden size 2048, gpt-7b has 4096"),
        (to_json(profile(32, key=by_kind({}, {"hidden": [2048]}))), "hidden size 2048 and 4096, gpt-7b has 4096"),
    ],
)
def test_another_profile_is_refused(capsys, tmp_path, text, says):
    path = tmp_path / "profile.json"
    path.write_text(text)
    words = ["estimate", "--model", GPT, "--hardware", "a800", "--gpus", "8", "--seq-length", "512K", "--profile", str(path)]
    assert says in complaint(capsys, *words, after_progress=True)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (by_kind({}, {}), None),
        (by_kind({}, device="cpu, 8 threads"), "on cpu, 8 threads in bfloat16, method fit; asked is a800"),
        (by_kind({}, {}, device="NVIDIA H200"), "on NVIDIA H200 in bfloat16, method fit; asked is a800"),
        (by_kind({}, {"dtype": "torch.float32"}), "in bfloat16 and float32, method fit; asked is a800 in bfloat16"),
        (by_kind({"dtype": "torch.float32"}), "in float32"),
    ],
)
def test_a_profile_of_another_machine_or_dtype_is_noted(capsys, tmp_path, key, says):
    notes = [note for note in ask(capsys, tmp_path, profile(32, key=key))["notes"] if "profile" in note]
    assert len(notes) == (says is not None) and all(says in note for note in notes)
