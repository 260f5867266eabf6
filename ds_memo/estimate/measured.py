"""Use a real run's profile in place of formulas: its link speeds for every method, its layers for ds_memo's own."""

from __future__ import annotations

from dataclasses import replace

from ds_memo.errors import MemoError, quoted
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import words
from ds_memo.estimate.question import Question
from ds_memo.files import read_text
from ds_memo.profile.json_file import MOST_PROFILE_BYTES, ProfileError, from_json


def with_profile(question: Question, path: str) -> Question:
    """Return the question with the measurements of `ds-memo profile`.

    Raises:
        EstimateError: the file cannot be used, or belongs to another model.
    """
    try:
        text = read_text(path, MOST_PROFILE_BYTES)
    except MemoError as error:
        raise EstimateError(f"--profile: {error}") from None
    path = quoted(path, 400)
    try:
        profile = from_json(text)
    except ProfileError as error:
        raise EstimateError(f"profile {path} cannot be used: {error}") from None
    model, layers = question.model, sum(kind is not None for kind in profile.layers)
    alike = len(profile.kinds) == 1  # one measured layer stands for any number
    if layers != model.layers and not alike:
        raise EstimateError(
            f"profile {path} is of {layers} layers of {len(profile.kinds)} kinds, {model.name} has {model.layers}: which are "
            "of which kind is not known"
        )
    described = [kind for kind in profile.key.get("kinds", ()) if isinstance(kind, dict)]
    widths = {repr(hidden[-1]) for kind in described if isinstance(hidden := kind.get("hidden"), list) and hidden}
    if widths - {repr(model.hidden)}:
        found = quoted(" and ".join(sorted(widths)))
        raise EstimateError(f"profile {path} is of hidden size {found}, {model.name} has {model.hidden}")
    if alike:
        profile = replace(profile, layers=(0,) * model.layers)
    hardware = replace(question.hardware, d2h=profile.d2h_bytes_per_s, h2d=profile.h2d_bytes_per_s)
    device, dtypes = str(profile.key.get("device")), sorted({str(kind.get("dtype")).removeprefix("torch.") for kind in described})
    notes = model.notes
    if question.hardware.name.lower() not in words(device) or dtypes != ["bfloat16"]:
        there = f"{quoted(device)} in {quoted(' and '.join(dtypes))}, method {quoted(profile.method)}"
        notes += (f"the profile was measured on {there}; asked is {question.hardware.name} in bfloat16",)
    return replace(question, hardware=hardware, profile=profile, model=replace(model, notes=notes))
