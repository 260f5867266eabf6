"""Use a real run's profile in place of formulas: its link speeds for every method, its layers for ds_memo's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ds_memo.errors import MemoError, brief, quoted
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.hardware import words
from ds_memo.estimate.question import Question
from ds_memo.files import read_text
from ds_memo.profile.json_file import MOST_PROFILE_BYTES, ProfileError, from_json
from ds_memo.profile.sample import Profile


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
    widths = {kind["hidden"][-1] for kind in _kinds(profile.key) if _is_shape(kind.get("hidden"))}
    if widths - {model.hidden}:
        found = quoted(" and ".join(map(brief, sorted(widths))))
        raise EstimateError(f"profile {path} is of hidden size {found}, {model.name} has {model.hidden}")
    if alike:
        profile = replace(profile, layers=(0,) * model.layers)
    hardware = replace(question.hardware, d2h=profile.d2h_bytes_per_s, h2d=profile.h2d_bytes_per_s)
    notes = (*model.notes, *_notes(question, profile))
    return replace(question, hardware=hardware, profile=profile, model=replace(model, notes=notes))


def _notes(question: Question, profile: Profile) -> Iterator[str]:
    """Yield a note on the profile's device and dtype if they are not this hardware and bf16."""
    device = profile.key.get("device")
    dtypes = sorted({dtype.removeprefix("torch.") for kind in _kinds(profile.key) if isinstance(dtype := kind.get("dtype"), str)})
    elsewhere = isinstance(device, str) and question.hardware.name.lower() not in words(device)
    if elsewhere or any(dtype != "bfloat16" for dtype in dtypes):
        where = device if isinstance(device, str) else "an unnamed device"
        of = f" in {' and '.join(dtypes)}" if dtypes else ""
        there = f"{quoted(where)}{quoted(of)}, method {quoted(profile.method)}"
        yield f"the profile was measured on {there}; asked is {question.hardware.name} in bfloat16"


def _kinds(key: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the key's entry for each kind of layer; older profiles have one entry for all."""
    kinds = key.get("kinds")
    found: list[Mapping[str, Any]] = [kind for kind in kinds if isinstance(kind, dict)] if isinstance(kinds, list) else []
    return found or [key]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and type(shape[-1]) is int
