"""A real run's profile in place of formulas: its link speeds for every method, its layers for ds_memo's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.estimate import Question
from ds_memo.profile.sample import ProfileError, from_json


def with_profile(question: Question, path: str) -> Question:
    """The same question, asked with what `ds-memo profile` measured.

    Raises:
        EstimateError: the file cannot be used, or is of another model.
    """
    try:
        profile = from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError, ProfileError) as error:
        raise EstimateError(f"profile {path} cannot be used: {error}") from None
    layers = sum(kind is not None for kind in profile.layers)
    if layers != question.model.layers:
        raise EstimateError(f"profile {path} is of {layers} layers, {question.model.name} has {question.model.layers}")
    hardware = replace(question.hardware, d2h=profile.d2h_bytes_per_s, h2d=profile.h2d_bytes_per_s)
    return replace(question, hardware=hardware, profile=profile)
