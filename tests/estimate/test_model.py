"""Shapes from config files, against known counts."""

import json
from pathlib import Path

import pytest

from ds_memo.estimate import hardware
from ds_memo.estimate.answers import longest
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import from_config, load
from ds_memo.estimate.question import Question
from tests.estimate.gpt import gpt_parameters

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "ds_configs" / "models"
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize("size", ["7b", "13b", "30b", "65b"])
def test_the_papers_models(size):
    model = load(str(MODELS / f"gpt-{size}.json"))
    assert model.active_parameters == gpt_parameters(model.layers, model.hidden, model.vocab)


def test_known_parameter_counts():
    assert load(str(MODELS / "llama3-8b.json")).parameters == pytest.approx(8.03e9, rel=0.001)
    assert from_config(MIXTRAL, "mixtral").parameters == pytest.approx(46.7e9, rel=0.001)
    assert from_config(MIXTRAL, "mixtral").active_parameters == pytest.approx(12.9e9 - 32000 * 4096, rel=0.01)
    assert from_config(QWEN3_MOE, "qwen3").parameters == pytest.approx(30.5e9, rel=0.005)
    assert from_config(GPT2, "gpt2").parameters == pytest.approx(124e6, rel=0.01)


def test_a_folder_and_a_nested_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": MIXTRAL}))
    assert load(str(tmp_path)).experts == 8


@pytest.mark.parametrize(("model", "stored"), [("gpt-7b", (2, 8)), ("llama3-8b", (2, 9.5))])
def test_what_a_layer_stores_is_the_designs(model, stored):
    """2 + 8 alpha of a GPT, 2 + 9.5 alpha of Llama-3, in units of the hidden states; and the log-sum-exp."""
    costs = Costs(load(str(MODELS / f"{model}.json")), hardware.load("a800"), Layout(8, sp=8), 1 << 17)
    layer, unit = costs.memo_layer(), costs.hidden_bytes
    assert layer.whole_bytes / unit == pytest.approx(stored[0], rel=0.01)
    assert layer.split_bytes / unit == pytest.approx(stored[1])


def test_the_longest_length_counts_what_a_replay_makes_at_alpha_0():
    """A replay makes GEMM and attention outputs that are not kept, and all are alive at once."""
    shape = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16}
    sizes = {"num_key_value_heads": 4, "num_hidden_layers": 32, "vocab_size": 32000}
    question = Question(from_config({**shape, **sizes}, "llama"), hardware.load("h200"), gpus=8, seq_length=1024, tile_tokens=0)
    fits, _ = longest(question)
    assert fits.alpha == 0 and fits.placed["attention_recomputed"]
    per_token = (2 * 3584 * 5 + 2 * 1024 * 6) * fits.question.seq_length / 8  # gate, up, act and two gradients; norms
    assert fits.device_bytes["transients"] > per_token


@pytest.mark.parametrize(("model", "units"), [("gpt-7b", 16), ("llama3-8b", 24.6)])
def test_what_autograd_saves_is_the_papers(model, units):
    costs = Costs(load(str(MODELS / f"{model}.json")), hardware.load("a800"), Layout(8, sp=8), 1 << 17)
    assert costs.skeletal_bytes / costs.hidden_bytes == pytest.approx(units, rel=0.01)


@pytest.mark.parametrize("name", ["a100", "a800", "b200", "h100", "h200"])
def test_every_number_of_a_machine_has_a_source(name):
    assert name in hardware.names()
    data = json.loads((Path(hardware.__file__).parent / "hardware_data" / f"{name}.json").read_text())
    assert all(entry["source"].strip() for key, entry in data.items() if key != "name")


def test_ulysses_counts_key_value_copies():
    """More ranks than key/value heads: each head goes to several."""
    model = load(str(MODELS / "llama3-8b.json"))
    few, many = (Costs(model, hardware.load("h200"), Layout(32, sp=sp), sp << 14).layer.exchange for sp in (8, 32))
    assert many > few
