"""`ds-memo show`: draw a plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ds_memo.errors import quoted
from ds_memo.files import write_output
from ds_memo.plan import Plan
from ds_memo.plan.errors import PlanError
from ds_memo.plan.formats import read_plan
from ds_memo.show.plan import as_html, as_png

DRAW: dict[str, Callable[[Plan], str | bytes]] = {".png": as_png, ".html": as_html}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json", help="a plan by ds-memo plan")
    parser.add_argument("-o", "--output", metavar="FILE", help="a .png, or an interactive .html (default: PLAN's name with .png)")


def run(args: argparse.Namespace) -> int:
    output = Path(args.output) if args.output else Path(args.plan).with_suffix(".png")
    if output.suffix not in DRAW:
        raise PlanError(f"{quoted(str(output), 400)}: expected a name that ends in {' or '.join(DRAW)}")
    write_output(output, DRAW[output.suffix](read_plan(args.plan)))
    print(quoted(str(output), 400))
    return 0
