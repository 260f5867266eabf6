"""Plot estimates over lengths: MFU and device memory, one line per method, up to where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_memo.show.plan import MissingPackage, saved
from ds_memo.units import GIB

if TYPE_CHECKING:
    from ds_memo.estimate.question import Estimate

COLOURS = ("#4878a8", "#e8a33d", "#5aa469", "#9c6bb0", "#7a7a7a", "#b5544d")


def draw_sweep(found: Sequence[Estimate], form: str) -> bytes:
    """Return the plot as "png" or "svg", drawn by matplotlib. Raises MissingPackage."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as e:
        raise MissingPackage("a plot needs matplotlib: pip install 'ds_memo[plot]'; a .csv needs nothing") from e
    figure = Figure(figsize=(12, 5), dpi=110, layout="constrained")
    speed, memory = figure.subplots(1, 2)
    question = found[0].question
    for colour, method in zip(COLOURS, dict.fromkeys(answer.question.method for answer in found), strict=False):
        of_method = [answer for answer in found if answer.question.method == method]
        fits = [answer for answer in of_method if answer.status == "ok"]
        lengths = [answer.question.seq_length for answer in of_method]
        speed.plot([a.question.seq_length for a in fits], [100 * (a.mfu or 0) for a in fits], "o-", color=colour, label=method)
        memory.plot(lengths, [a.device_total / GIB for a in of_method], "o-", color=colour)
        ends = next((answer for answer in of_method if answer.status != "ok"), None)
        if ends is not None and fits:
            speed.plot(fits[-1].question.seq_length, 100 * (fits[-1].mfu or 0), "x", color=colour, markersize=12)
    memory.axhline(question.hardware.device_memory / GIB, color="crimson", linewidth=1.2, label="device memory")
    for axes, label in ((speed, "MFU in %"), (memory, "device memory in GiB")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 2**20:g} Mi" if x >= 2**20 else f"{x / 2**10:g} Ki"))
        axes.set_xlabel("tokens of a sequence")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(color="0.92")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    memory.set_ylim(top=2 * question.hardware.device_memory / GIB)
    figure.suptitle(
        f"{question.model.name} on {question.gpus} × {question.hardware.name}; a cross: the next length runs out of memory",
        parse_math=False,
    )
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    return saved(figure, form)
