"""Plot a plan: time along x (index of the request), address along y, one rectangle per slot."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, NamedTuple

from ds_memo.errors import MemoError, quoted
from ds_memo.plan import Plan, Slot
from ds_memo.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKELETAL, TRANSIENT = "#4878a8", "#e8a33d"  # they differ in lightness too, for colour-blind readers


class MissingPackage(MemoError):
    """A plotting package is not installed."""


class _Scale(NamedTuple):
    unit: int
    name: str

    def text(self, size: int) -> str:
        return f"{size / self.unit:,.2f} {self.name}"


def _scale(plan: Plan) -> _Scale:
    return _Scale(GIB, "GiB") if plan.peak >= GIB else _Scale(MIB, "MiB")


def _title(plan: Plan, scale: _Scale) -> str:
    if plan.proven:
        bound = "equal to the lower bound: proven optimal" if plan.peak == plan.lower_bound else "proven optimal"
    else:
        bound = f"{plan.peak / plan.lower_bound:.4f} × the lower bound" if plan.lower_bound else "no lower bound"
    return f"{quoted(plan.kind)} plan, {len(plan.slots):,} slots, peak {scale.text(plan.peak)}, {bound}"


def _split(plan: Plan) -> dict[str, list[Slot]]:
    return {
        "skeletal (outlives its phase)": [s for s in plan.slots if not s.transient],
        "transient (born and dead inside one phase)": [s for s in plan.slots if s.transient],
    }


def _labelled(plan: Plan, end: int) -> set[int]:
    """Return the phases whose labels do not overlap."""
    labelled, last = set(), -float(end)
    for number, phase in enumerate(plan.phases):
        middle = (phase.first + phase.end) / 2
        if phase.end > phase.first and middle - last > end / 75:
            labelled.add(number)
            last = middle
    return labelled


def as_png(plan: Plan) -> bytes:
    """Return the plot as PNG, drawn by matplotlib. Raises MissingPackage."""
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingPackage("PNG needs matplotlib: pip install 'ds_memo[plot]'") from e
    scale = _scale(plan)
    figure = Figure(figsize=(14, 7), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    end = max((p.end for p in plan.phases), default=1)
    top = max(plan.peak, 1) / scale.unit
    labelled = _labelled(plan, end)
    for number, phase in enumerate(plan.phases):
        if number % 2:
            axes.axvspan(phase.first, phase.end, color="0.93", zorder=0)
        if number in labelled:
            axes.text((phase.first + phase.end) / 2, top * 1.015, quoted(phase.name), ha="center", va="bottom", fontsize=7,
                      rotation=90 if phase.end - phase.first < end / 25 else 0, parse_math=False)  # fmt: skip
    for (label, slots), colour in zip(_split(plan).items(), (SKELETAL, TRANSIENT), strict=True):
        spans = [(s.birth, s.death, s.offset / scale.unit, (s.offset + s.size) / scale.unit) for s in slots]
        boxes = [[(left, low), (left, high), (right, high), (right, low)] for left, right, low, high in spans]
        axes.add_collection(
            PolyCollection(
                boxes,
                facecolor=colour,
                edgecolor="white",
                linewidth=0.4 if len(plan.slots) < 2000 else 0.1,
                label=label,
            )
        )
    axes.axhline(plan.peak / scale.unit, color="black", linewidth=1.2, label=f"peak {scale.text(plan.peak)}")
    axes.axhline(plan.lower_bound / scale.unit, color="crimson", linewidth=1.2, linestyle=(0, (6, 4)),
                 label=f"lower bound {scale.text(plan.lower_bound)}")  # fmt: skip
    axes.set_xlim(0, end)
    axes.set_ylim(0, top * 1.1)
    axes.set_xlabel("time (index of the request)")
    axes.set_ylabel(f"address in the arena ({scale.name})")
    axes.set_title(_title(plan, scale), fontsize=11, loc="left", parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return saved(figure, "png")


def saved(figure: Figure, form: str) -> bytes:
    """Return a figure of matplotlib as a file of this format."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a letter that the font lacks is drawn as a box
        figure.savefig(file, format=form)
    return file.getvalue()


def as_html(plan: Plan) -> str:
    """Return a self-contained page by plotly, with zoom and a tooltip for each slot. Raises MissingPackage."""
    try:
        import plotly.graph_objects as go
    except ImportError as e:
        raise MissingPackage("HTML needs plotly: pip install 'ds_memo[plot]'") from e
    scale = _scale(plan)
    figure = go.Figure()
    for (label, slots), colour in zip(_split(plan).items(), (SKELETAL, TRANSIENT), strict=True):
        figure.add_bar(
            x=[s.death - s.birth for s in slots], base=[s.birth for s in slots], orientation="h",
            y=[(s.offset + s.size / 2) / scale.unit for s in slots], width=[s.size / scale.unit for s in slots],
            name=label, marker={"color": colour, "line": {"color": "white", "width": 0.5}},
            customdata=[
                [quoted(s.id), quoted(plan.phases[s.phase].name), s.k, quoted(plan.phases[s.death_phase].name),
                 f"{s.requested:,}", f"{s.offset:,}", s.birth, s.death]
                for s in slots
            ],
            hovertemplate="tensor %{customdata[0]}: malloc %{customdata[2]} of %{customdata[1]}, freed in "
            "%{customdata[3]}<br>%{customdata[4]} bytes at %{customdata[5]}<br>requests %{customdata[6]} to "
            "%{customdata[7]}<extra></extra>",
        )  # fmt: skip
    end = max((p.end for p in plan.phases), default=1)
    labelled = _labelled(plan, end)
    for number, phase in enumerate(plan.phases):
        figure.add_vrect(
            x0=phase.first, x1=phase.end, fillcolor="black", opacity=0.06 if number % 2 else 0, line_width=0,
            layer="below",
        )  # fmt: skip
        if number in labelled:
            figure.add_annotation(
                x=(phase.first + phase.end) / 2, y=1, yref="paper", yanchor="bottom", text=quoted(phase.name), showarrow=False,
                font={"size": 9}, textangle=-90 if phase.end - phase.first < end / 25 else 0,
            )  # fmt: skip
    for size, name, colour, dash in (
        (plan.peak, "peak", "black", "solid"),
        (plan.lower_bound, "lower bound", "crimson", "dash"),
    ):
        figure.add_scatter(
            x=[0, end], y=[size / scale.unit] * 2, mode="lines", line={"color": colour, "dash": dash},
            name=f"{name} {scale.text(size)}", hoverinfo="name",
        )  # fmt: skip
    figure.update_layout(
        title={"text": _title(plan, scale), "y": 0.98}, barmode="overlay", bargap=0, plot_bgcolor="white",
        xaxis={"title": "time (index of the request)", "range": [0, end]}, margin={"t": 110},
        yaxis={"title": f"address in the arena ({scale.name})", "rangemode": "tozero"},
        legend={"orientation": "h", "y": -0.12},
    )  # fmt: skip
    return figure.to_html(include_plotlyjs=True)
