"""The model configurations in ds_configs/models and how models are built from them."""

import json
from pathlib import Path

import pytest
import torch
from model import ModelError, build, load_config, max_positions
from transformers import AutoConfig, AutoModelForCausalLM

from ds_memo.hf.model_flops import attention_width, matmul_parameters
from tests.estimate.gpt import gpt_parameters

MODELS = Path(__file__).parents[2] / "ds_configs" / "models"
PAPER = {  # layers, hidden, ffn, heads
    "gpt-7b": (32, 4096, 16384, 32),
    "gpt-13b": (40, 5120, 20480, 40),
    "gpt-30b": (48, 7168, 28672, 56),
    "gpt-65b": (80, 8192, 32768, 64),
}


def on_meta(name: str):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(MODELS / f"{name}.json"))


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models(name):
    layers, hidden, ffn, heads = PAPER[name]
    model = on_meta(name)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, hidden, ffn)
    assert config.num_attention_heads == heads and config.vocab_size == 50257
    assert config.hidden_act == "gelu_pytorch_tanh" and not config.use_parallel_residual and config.attention_bias
    assert config.rope_parameters["partial_rotary_factor"] == 1.0
    assert max_positions(config) >= 8 * 2**20  # the paper's longest
    # 12·n·h² + V·h leaves out biases and norms: 13 h a layer and 2 h at the end
    count = gpt_parameters(layers, hidden, 50257)
    assert matmul_parameters(model) == count + 13 * hidden * layers + 2 * hidden
    assert matmul_parameters(model) == pytest.approx(count, rel=1e-3)
    assert attention_width(config) == hidden


def test_llama3_8b():
    model = on_meta("llama3-8b")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248  # as Meta's checkpoint
    assert matmul_parameters(model) == 8_030_261_248 - 128256 * 4096
    assert attention_width(model.config) == 4096


def test_parameters_that_multiply():
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    untied = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **small))
    body = 16 * (24 + 12 + 12) + 24 * 16 + 3 * 16 * 24 + 3 * 16
    assert matmul_parameters(untied) == body + 50 * 16
    tied = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", tie_word_embeddings=True, **small))
    assert matmul_parameters(tied) == body + 50 * 16
    assert attention_width(tied.config) == 24
    experts = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", num_local_experts=2, **small))
    assert matmul_parameters(experts) is None


def test_a_checkpoint_directory(tmp_path):
    config = AutoConfig.for_model("gpt2", vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    saved = AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert max_positions(config) == 32
    loaded = build(tmp_path, config, {}, torch.bfloat16, "sdpa")
    assert loaded.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(saved.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name


def test_errors_name_what_is_wrong(tmp_path):
    for text in ("{}", "not json", json.dumps({"model_type": "no-such-model"})):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ModelError, match=r"odd.json is not a model configuration"):
            load_config(tmp_path / "odd.json")
    path = MODELS / "tiny.json"
    with pytest.raises(ModelError, match="cannot build"):
        build(path, load_config(path), {}, torch.float32, "no-such-attention")
