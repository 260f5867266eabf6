"""The tiled loss against the untiled stock loss: value and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from loss import HeadError, tiled_cross_entropy, use_tiled_loss
from transformers import AutoConfig, AutoModelForCausalLM

from ds_memo.profile.live import LiveBytes

V, H = 37, 32
SMALL = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": {"model_type": "llama", "intermediate_size": 32, "num_key_value_heads": 2},
    "llama-tied": {"model_type": "llama", "intermediate_size": 32, "tie_word_embeddings": True},
    "gemma2-softcap": {
        "model_type": "gemma2", "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8,
        "final_logit_softcapping": 0.5,  # far below the usual 30, so that it bends these small logits
    },
    "gpt2-tied": {"model_type": "gpt2"},
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 32},
    "opt": {"model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": 16},
    "phi-head-bias": {"model_type": "phi", "intermediate_size": 32},
}  # fmt: skip


def build(**fields):
    fields = SMALL | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | fields
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for p in model.parameters():  # far from zero, so that the loss is not flat and biases count
        torch.nn.init.normal_(p, std=0.3)
    return model.eval()  # no dropout


def batch(b=2, s=33):
    torch.manual_seed(1)
    tokens = torch.randint(0, V, (b, s))
    labels = tokens.clone()
    labels[0, 3:7] = labels[-1, -2:] = -100
    aligned = F.pad(labels[:, 1:], (0, 1), value=-100)
    return tokens, labels, aligned


def gradients(model, loss):
    model.zero_grad()
    (loss * 0.37).backward()  # as a loss scale or an accumulation would
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tile_rows", [1, 7, 64, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_stock_loss(name, tile_rows):
    tokens, labels, aligned = batch()
    model = build(**MODELS[name])
    stock = model(input_ids=tokens, labels=labels).loss
    expected = gradients(model, stock)
    use_tiled_loss(model, tile_rows)
    tiled = model(input_ids=tokens, labels=aligned)
    assert tiled.dtype == torch.float32 and tiled.shape == ()
    assert abs(tiled - stock) <= 2e-6 * abs(stock)
    actual = gradients(model, tiled)
    assert actual.keys() == expected.keys()
    for key, want in expected.items():
        error = (actual[key] - want).norm()
        assert error <= max(2e-6 * want.norm(), 1e-7), f"{key}: {error / want.norm()}"


def test_a_frozen_head_and_a_frozen_body():
    tokens, _, aligned = batch()
    model = build(**MODELS["llama"])
    use_tiled_loss(model, 8)
    everything = gradients(model, model(input_ids=tokens, labels=aligned))
    model.lm_head.requires_grad_(False)
    without_head = gradients(model, model(input_ids=tokens, labels=aligned))
    assert everything.keys() - without_head.keys() == {"lm_head.weight"}
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    only_head = gradients(model, model(input_ids=tokens, labels=aligned))
    assert only_head.keys() == {"lm_head.weight"}
    for key, value in (without_head | only_head).items():
        torch.testing.assert_close(value, everything[key])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_loses_nothing_to_many_tiles(dtype):
    """Many positions make each gradient tiny: fp16 must not flush it, bf16 must not drop it while adding up."""
    n = 20_000
    torch.manual_seed(0)
    hidden, weight = torch.randn(n, H).to(dtype), (torch.randn(V, H) * 0.3).to(dtype)
    labels = torch.randint(0, V, (n,))

    def run(hidden, weight, loss):
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (loss(hidden, weight) * 1024).backward()
        return hidden.grad.double(), weight.grad.double()

    want = run(hidden.double(), weight.double(), lambda h, w: F.cross_entropy(h @ w.T, labels))
    got = run(hidden, weight, lambda h, w: tiled_cross_entropy(h, w, labels, tile_rows=16))
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() <= 8 * torch.finfo(dtype).eps * w.norm()


def test_no_label_counts():
    hidden, weight = torch.randn(5, H, requires_grad=True), torch.randn(V, H)
    loss = tiled_cross_entropy(hidden, weight, torch.full((5,), -100))
    loss.backward()
    assert loss == 0 and hidden.grad.abs().max() == 0


def test_the_graph_can_be_used_twice():
    hidden, weight = torch.randn(9, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    loss = tiled_cross_entropy(hidden, weight, torch.arange(9), tile_rows=4)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * once)


@pytest.mark.parametrize("train", [True, False])
def test_full_logits_never_exist(train):
    n, vocab, tile = 4096, 2048, 64
    hidden = torch.randn(n, 8, requires_grad=train)
    weight = torch.randn(vocab, 8, requires_grad=train)
    labels = torch.randint(0, vocab, (n,))
    with LiveBytes() as count:
        loss = tiled_cross_entropy(hidden, weight, labels, tile_rows=tile)
        if train:
            loss.backward()
    assert count.peak < 8 * tile * vocab * 4 + 4 * (hidden.nbytes + weight.nbytes)
    assert count.peak < n * vocab * 4 / 4


def test_without_gradients_none_is_computed():
    weight = torch.randn(4096, 64, requires_grad=True)
    with torch.no_grad(), LiveBytes() as count:
        tiled_cross_entropy(torch.randn(4, 64), weight, torch.zeros(4, dtype=torch.long), torch.randn(4096, requires_grad=True))
    assert count.peak < weight.nbytes / 2


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model_type": "granite", "intermediate_size": 32, "logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"model_type": "cohere", "intermediate_size": 32, "logit_scale": 0.0625}, "logit_scale = 0.0625"),
        (
            {"model_type": "mixtral", "intermediate_size": 32, "num_local_experts": 2, "output_router_logits": True},
            "output_router_logits",
        ),
    ],
)
def test_a_head_that_does_more_is_refused(fields, word):
    with pytest.raises(HeadError, match=word):
        use_tiled_loss(build(num_key_value_heads=2, **fields))


def test_a_head_that_is_not_linear_is_refused():
    model = build(**MODELS["llama"])
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(HeadError, match="Sequential"):
        use_tiled_loss(model)
