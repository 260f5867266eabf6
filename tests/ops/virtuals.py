"""The virtual methods of torch's CUDA allocator, read from the headers in wheels, and those that ours overrides.

    pip download torch==2.14.1 --no-deps --only-binary=:all: --python-version 3.12 --platform macosx_14_0_arm64
    python -m tests.ops.virtuals torch-*.whl        # writes tests/data/cuda_allocator_virtuals.json

Wheels of any platform have the same headers; those for macOS are the smallest.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

LISTED = Path(__file__).parents[1] / "data" / "cuda_allocator_virtuals.json"
BACKEND = Path(__file__).parents[2] / "ops" / "csrc" / "ops_cuda.cpp"
CLASSES = {
    "c10/core/Allocator.h": "Allocator",
    "c10/core/CachingDeviceAllocator.h": "DeviceAllocator",
    "c10/cuda/CUDACachingAllocator.h": "CUDAAllocator",
}
"""The class and its bases, by header."""

Virtuals = dict[str, list[str]]
"""Names of methods: "pure" ones, and those with a "default"."""


def virtuals(read: Callable[[str], str]) -> Virtuals:
    """Return the virtual methods that a subclass of CUDAAllocator inherits.

    Args:
        read: returns the text of a header, given its path.
    """
    found: Virtuals = {"pure": [], "default": []}
    for header, name in CLASSES.items():
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", read(header), flags=re.DOTALL)
        body = re.search(rf"\n(?:class|struct) (?:\w+_API )?{name}\b[^;]*?{{(.*?)\n}};", text, re.DOTALL)
        assert body is not None, f"{header} has no class {name}"
        for begin in (match.end() for match in re.finditer(r"\bvirtual ", body[1])):
            called = re.match(r"[^(]*?(~?\w+)\(", body[1][begin:])
            assert called is not None, body[1][begin : begin + 80]
            behind = re.match(r"[^;{]*", body[1][_behind_parenthesis(body[1], begin + called.end()) :])
            if behind and not called[1].startswith("~"):
                found["pure" if behind[0].endswith("= 0") else "default"].append(called[1])
    return {kind: sorted(set(names)) for kind, names in found.items()}


def _behind_parenthesis(text: str, at: int) -> int:
    """Return the place behind the parenthesis that was opened just before `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def overridden(version: tuple[int, int], source: str) -> list[str]:
    """Return the methods that the backend overrides when it is compiled against a torch of this version."""
    number = version[0] * 100 + version[1]

    def conditional(block: re.Match[str]) -> str:
        return block[2] if number >= int(block[1]) else ""

    source = re.sub(r"#if DS_MEMO_TORCH >= (\d+)\n(.*?)#endif", conditional, source, flags=re.DOTALL)
    return sorted(set(re.findall(r"\b(\w+)\((?:[^(){};]|\{[^{}]*\}|\([^()]*\))*\) (?:const )?override\b", source)))


def main(wheels: list[str]) -> None:
    listed = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            listed[Path(wheel).name.split("-")[1]] = virtuals(lambda path: archive.read(f"torch/include/{path}").decode())
    ordered = sorted(listed, key=lambda version: [*map(int, version.split("."))])
    lines = (f"{json.dumps(version)}: {json.dumps(listed[version])}" for version in ordered)
    LISTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
