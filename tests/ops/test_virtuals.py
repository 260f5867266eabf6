"""The CUDA backend overrides every virtual method of torch's allocator, in each version of torch that it is built against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ops.virtuals import BACKEND, CLASSES, LISTED, Virtuals, overridden, virtuals

OF_VERSIONS: dict[str, Virtuals] = json.loads(LISTED.read_text())
SOURCE = BACKEND.read_text()


def minor(version: str) -> tuple[int, int]:
    major, number = version.split(".")[:2]
    return int(major), int(number)


def assert_all_overridden(found: Virtuals, version: str, source: str = SOURCE) -> None:
    """Those with a default, too: that would answer in place of the native allocator."""
    assert overridden(minor(version), source) == sorted(found["pure"] + found["default"])


def test_every_version_is_listed() -> None:
    assert sorted({minor(version) for version in OF_VERSIONS}) == [(2, number) for number in range(11, 16)]


@pytest.mark.parametrize("version", OF_VERSIONS)
def test_each_is_overridden(version: str) -> None:
    assert_all_overridden(OF_VERSIONS[version], version)


def test_each_of_the_installed_torch_is_overridden() -> None:
    headers, version = Path(torch.__file__).parent / "include", torch.__version__.split("+")[0]
    if not all((headers / header).is_file() for header in CLASSES):
        pytest.skip(f"torch {torch.__version__} comes without c10/cuda headers")
    found = virtuals(lambda path: (headers / path).read_text())
    assert_all_overridden(found, version)
    assert found == OF_VERSIONS.get(version, found), f"{LISTED.name} is not what the headers say"


@pytest.mark.parametrize(
    "version, method", [("2.11.0", "raw_delete"), ("2.12.1", "getContextForPointer"), ("2.15.0", "annotateMemory")]
)
def test_one_that_is_missing_is_named(version: str, method: str) -> None:
    """The negative control."""
    lines = [line for line in SOURCE.splitlines(keepends=True) if f" {method}(" not in line or "override" not in line]
    with pytest.raises(AssertionError, match=method):
        assert_all_overridden(OF_VERSIONS[version], version, "".join(lines))
