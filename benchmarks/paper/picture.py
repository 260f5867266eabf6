"""The picture in the README, from committed results: python -m benchmarks.picture [-o docs/longest.svg]

The longest length that each way trains in 16 GiB of device and 64 GiB of host memory: measured on an H200, else emulated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
PICTURE = RESULTS.parents[1] / "docs" / "longest.svg"
NAMES = {
    "async_offload": "checkpointing, layer inputs on the host",
    "alst, axolotl": "ALST, attention once (Axolotl's copies)",
    "alst": "ALST: the same with tiled MLP and loss",
    "upipe": "UPipe: the same with groups of heads",
    "ds_memo, planned": "ds_memo, nothing set",
}
TITLE = "Longest sequence: Llama-3-8B's width, six layers, 16 GiB of device and 64 GiB of host memory"
WIDTH, LEFT, ROW, SCALE = 900, 320, 44, 430


def lengths() -> dict[str, tuple[int, float, bool]]:
    """Return, by way, the longest length, seconds of its step, and if that was measured."""
    row = json.loads((RESULTS / "lengths-emulated.json").read_text())["rows"]["llama8b 16/64"]
    found = {way: (rival["longest"], rival["step_s"], False) for way, rival in row["rivals"].items() if way in NAMES}
    for rival in json.loads((RESULTS / "capacity-alst-cuda.json").read_text())["rivals"]:
        found[rival["rival"]] = (rival["longest"], rival["step_s"], True)
    return found


def picture() -> str:
    """Return the picture as SVG: a bar for each way, filled where it was measured."""
    found = lengths()
    most = max(tokens for tokens, *_ in found.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(NAMES) + 70}" font-family="sans-serif"',
        ' font-size="15">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24">{TITLE}</text>',
    ]
    for at, (way, name) in enumerate(NAMES.items()):
        tokens, seconds, measured = found[way]
        y, long = 44 + at * ROW, SCALE * tokens / most
        fill = "#3b6fb6" if measured else "#dbe6f5"
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 19}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{long:.0f}" height="28" fill="{fill}" stroke="#3b6fb6"/>',
            f'<text x="{LEFT + long + 8:.0f}" y="{y + 19}">{tokens:,}, {seconds:.1f} s</text>',
        ]
    note = "Filled: measured on one H200. Light: emulated. The step's time stands beside its length."
    return "\n".join([*lines, f'<text x="10" y="{44 + len(NAMES) * ROW + 12}" font-size="13">{note}</text>', "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.picture", description=__doc__)
    parser.add_argument("-o", type=Path, default=PICTURE, metavar="FILE")
    parser.parse_args().o.write_text(picture())


if __name__ == "__main__":
    main()
