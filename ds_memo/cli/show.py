"""`ds-memo show`: draws a plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_memo.plan.errors import PlanError
from ds_memo.plan.formats import read_plan
from ds_memo.show.plan import MissingPackage, draw_html, draw_png

INPUT_ERRORS = (PlanError, MissingPackage)
DRAW = {".png": draw_png, ".html": draw_html}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json", help="a plan by ds-memo plan")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="a .png or an interactive .html (default: the plan's name with .png)"
    )


def run(args: argparse.Namespace) -> int:
    output = Path(args.output) if args.output else Path(args.plan).with_suffix(".png")
    draw = DRAW.get(output.suffix)
    if draw is None:
        raise PlanError(f"{output}: expected a name that ends in {' or '.join(DRAW)}")
    plan = read_plan(args.plan)
    try:
        draw(plan, output)
    except OSError as e:
        raise PlanError(f"cannot write {output}: {e.strerror}") from None
    print(output)
    return 0
