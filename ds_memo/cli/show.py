"""`ds-memo show`: draw a plan, or what a layer's backward holds on the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ds_memo.errors import quoted
from ds_memo.files import write_output
from ds_memo.plan import Plan
from ds_memo.plan.errors import PlanError
from ds_memo.plan.formats import read_plan
from ds_memo.plan.snapshot import SUFFIXES
from ds_memo.show import layer_backward
from ds_memo.show.plan import as_html, as_png

DRAW: dict[str, Callable[[Plan], str | bytes]] = {".png": as_png, ".html": as_html}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a plan by ds-memo plan; or memory snapshots (.pickle), of which one layer's backward is drawn, side by side",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="a .png, for a plan also an interactive .html (default: FILE's name with .png)"
    )


def run(args: argparse.Namespace) -> int:
    output = Path(args.output) if args.output else Path(args.files[0]).with_suffix(".png")
    snapshots = [file for file in args.files if file.endswith(SUFFIXES)]
    if not snapshots and len(args.files) > 1:
        raise PlanError(f"got {len(args.files)} files, expected one plan or several memory snapshots ({' or '.join(SUFFIXES)})")
    if snapshots and snapshots != args.files:
        raise PlanError("got memory snapshots and other files, expected one or the other")
    suffixes = [".png"] if snapshots else list(DRAW)
    if output.suffix not in suffixes:
        raise PlanError(f"{quoted(str(output), 400)}: expected a name that ends in {' or '.join(suffixes)}")
    drawn: str | bytes
    if snapshots:
        drawn = layer_backward.as_png([layer_backward.read_layer_backward(file) for file in snapshots])
    else:
        drawn = DRAW[output.suffix](read_plan(args.files[0]))
    write_output(output, drawn)
    print(quoted(str(output), 400))
    return 0
