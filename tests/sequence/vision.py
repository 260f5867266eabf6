"""Small models that read images, with random weights, and what each is given: rows of text around an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, __version__

from ds_memo.deepspeed import sequence
from tests.models import HEADS, HIDDEN, VOCAB
from tests.sequence.whole_and_parts import SUMS, Outcome, gradients, mean_loss, part, summed_gradients, whole

IMAGE, VIDEO, START, END = range(VOCAB - 4, VOCAB)
"""Tokens in whose places an image or a video goes, and those around it."""
MOVES = 0.02
"""Share of the logits that turning the images over changes, at least."""
ROWS, LENGTH = 2, 45
"""A length that is no multiple of a number of ranks."""
AT = (9, 21)
"""First token of each row's image: it lies on one rank, or on two."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIDE, _PATCH = 56, 14
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _SIDE,
    "patch_size": _PATCH,
}
_AXES = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
_SIZES = {"image_sizes": torch.tensor([[_SIDE, _SIDE]] * ROWS)}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


class Kind(NamedTuple):
    config: dict[str, Any]
    tokens: int
    """Tokens of an image."""
    inputs: Callable[[torch.Tensor], dict[str, Any]]
    """What the model is given beside tokens, made of a mask of the image's tokens."""


def _pixels(*shape: int) -> Callable[[torch.Tensor], dict[str, Any]]:
    return lambda images: {"pixel_values": torch.randn(ROWS, *shape)}


def _patches(size: int) -> Callable[[torch.Tensor], dict[str, Any]]:
    """Patches of all images one behind the other, and how many there are of each."""
    return lambda images: {
        "pixel_values": torch.randn(ROWS * 64, 3 * 2 * size**2),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * ROWS),
        "mm_token_type_ids": images.long(),
    }


def _siglip(**text: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, **text}, "vision_config": {"model_type": "siglip_vision_model", **_TOWER}}


def _qwen(vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {**_TOKENS, "text_config": {**_TEXT, **_AXES, **text}, "vision_config": {"depth": 2, "num_heads": 2, **vision}}


_IMAGE = _pixels(3, _SIDE, _SIDE)
_QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": HIDDEN}
_QWEN3 = {**_QWEN, "num_position_embeddings": 64}
KINDS: dict[str, Kind] = {
    "qwen2_vl": Kind(_qwen({"embed_dim": 32, "hidden_size": HIDDEN}), 16, _patches(14)),
    "qwen2_5_vl": Kind(_qwen({**_QWEN, "fullatt_block_indexes": [1], "window_size": 56}), 16, _patches(14)),
    "qwen3_vl": Kind(_qwen({**_QWEN3, "deepstack_visual_indexes": [0, 1]}), 16, _patches(16)),
    "qwen3_5": Kind(
        _qwen(
            _QWEN3,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            rope_parameters={**_AXES["rope_parameters"], "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        ),
        16,
        _patches(16),
    ),
    "gemma3": Kind(
        {**_siglip(**_WINDOWS), "mm_tokens_per_image": 4, "image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END},
        4,
        lambda images: {**_IMAGE(images), "token_type_ids": images.long()},
    ),
    "paligemma": Kind(
        {**_siglip(model_type="gemma"), "projection_dim": HIDDEN, "image_token_id": IMAGE},
        16,
        lambda images: {**_IMAGE(images), "token_type_ids": (torch.arange(LENGTH) > 40).long().expand(ROWS, -1)},
    ),
    "paligemma 2": Kind(
        {**_siglip(model_type="gemma2", **_WINDOWS), "projection_dim": HIDDEN, "image_token_id": IMAGE},
        16,
        lambda images: {**_IMAGE(images), "token_type_ids": (torch.arange(LENGTH) > 40).long().expand(ROWS, -1)},
    ),
    "llava": Kind(
        {
            "image_token_id": IMAGE,
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        },
        16,
        _IMAGE,
    ),
    "llava_onevision": Kind(
        {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "image_size": 2 * _PATCH},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_grid_pinpoints": [[2 * _PATCH] * 2],
            "vision_aspect_ratio": "anyres_max_1",
        },
        10,
        lambda images: {
            **_pixels(2, 3, 2 * _PATCH, 2 * _PATCH)(images),
            "image_sizes": torch.tensor([[2 * _PATCH] * 2] * ROWS),
        },
    ),
    "internvl": Kind(
        {
            "image_token_id": IMAGE,
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {**_TOWER, "image_size": [_SIDE] * 2, "patch_size": [_PATCH] * 2},
        },
        4,
        _IMAGE,
    ),
    "mistral3": Kind(
        {
            "image_token_id": IMAGE,
            "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": 6},
            "vision_config": {"model_type": "pixtral", **_TOWER, "head_dim": 16},
        },
        4,
        lambda images: {**_IMAGE(images), **_SIZES},
    ),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        Kind(
            {
                "image_token_id": IMAGE,
                "text_config": {"model_type": "llama", **_TEXT},
                "vision_config": _TOWER,
                "scale_factor": 2,
            },
            4,
            _pixels(1, 3, _SIDE, _SIDE),
        ),
    ),
    "glm4v": Kind(
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "text_config": {**_TEXT, **_AXES},
            "vision_config": {**_QWEN, "image_size": 2 * _SIDE, "num_heads": 2},
        },
        16,
        _patches(14),
    ),
    "llama4": Kind(
        {
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "text_config": {**_TEXT, "attention_chunk_size": 12, "num_local_experts": 4, "intermediate_size_mlp": 96},
            "vision_config": {
                **_TOWER,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        4,
        _IMAGE,
    ),
}


def build(name: str) -> nn.Module:
    """Return a model in PyTorch's default dtype and in evaluation mode."""
    if name == "llama4" and __version__ == "5.24.0":
        pytest.skip("Transformers 5.24.0 ends its forward with images: 'MoeCausalLMOutputWithPast' has no 'image_outputs'")
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **KINDS[name].config)
    model = AutoModelForImageTextToText.from_config(config).to(torch.get_default_dtype()).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif not parameter.any() or not parameter.isfinite().all():  # Gemma-3 begins with a projector of zeros
                parameter.normal_(0, 0.05)
            if key.endswith("A_log"):
                parameter.sub_(4)
    return model


class Batch:
    """Rows of text around an image.

    Args:
        padding: tokens at the left of each row, if positive, or at its right.
    """

    def __init__(self, name: str, padding: tuple[int, ...] = (0,) * ROWS, seed: int = 0) -> None:
        torch.manual_seed(1 + seed)
        kind = KINDS[name]
        self.tokens = torch.randint(3, IMAGE, (ROWS, LENGTH))
        for row, at in enumerate(AT):
            at = min(at, LENGTH - kind.tokens - 2)
            self.tokens[row, at : at + kind.tokens + 2] = torch.tensor([START, *[IMAGE] * kind.tokens, END])
        self.labels = self.tokens.roll(-1, 1)
        self.labels[:, -1] = -100
        self.mask = torch.ones_like(self.tokens)
        for row, size in enumerate(padding):
            if size:
                gone = slice(size) if size > 0 else slice(size, None)
                self.mask[row, gone], self.labels[row, gone], self.tokens[row, gone] = 0, -100, 0
        self.inputs = kind.inputs(self.tokens == IMAGE)

    def logits(self, model: nn.Module, **inputs: Any) -> torch.Tensor:
        """Return those of this rank's part, if the model is sequence-parallel."""
        given = {"input_ids": self.tokens, "attention_mask": self.mask, **self.inputs, **inputs}
        return model(**given, use_cache=False).logits

    def apart(self, model: nn.Module) -> Outcome:
        logits = self.logits(model)
        with torch.no_grad():
            moved = self.logits(model, pixel_values=-self.inputs["pixel_values"]) - logits
        assert moved.norm() > MOVES * logits.norm(), "the model does not look at its images"
        mean_loss(logits, self.labels).backward()
        return Outcome(self.real(logits), gradients(model))

    def in_parts(self, model: nn.Module) -> Outcome:
        logits, labels = self.logits(model), part(self.labels)
        sequence.mean_over_ranks(mean_loss(logits, labels), labels, SUMS).backward()
        return Outcome(self.real(whole(logits)), summed_gradients(model))

    def real(self, logits: torch.Tensor) -> torch.Tensor:
        """Return those of tokens that are no padding."""
        return logits.detach()[self.mask.bool()]
