"""The streams of an estimated step over time: Chrome-trace JSON, or an interactive page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_memo.show.plan import MissingPackage
from ds_memo.solve.timeline import READ, WRITE, TimelineSpan
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D

STREAMS = (COMPUTE, D2H, H2D, WRITE, READ)
COLOURS = {
    "forward": "#4878a8",
    "backward": "#2b4a6b",
    "replay": "#e8a33d",
    "head": "#7a7a7a",
    "offload": "#5aa469",
    "reload": "#9c6bb0",
    "write": "#7fb8a4",
    "read": "#c4a3d1",
    "stall": "#d04a4a",
    "nvme stall": "#8f2f2f",
}


def chrome_trace(spans: Sequence[TimelineSpan]) -> dict[str, Any]:
    """Return JSON for chrome://tracing and ui.perfetto.dev: complete events, in microseconds, one thread per stream."""
    used = [stream for stream in STREAMS if any(span.stream == stream for span in spans)]
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}} for i, name in enumerate(used)]
    events = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": 0,
            "tid": used.index(span.stream),
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "args": {"layer": span.layer},
        }
        for span in spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def as_html(spans: Sequence[TimelineSpan], title: str) -> str:
    """Return a self-contained page by plotly. Raises MissingPackage."""
    try:
        import plotly.graph_objects as go
    except ImportError as e:
        raise MissingPackage("an HTML timeline needs plotly: pip install 'ds_memo[plot]'; a .json one needs nothing") from e
    figure = go.Figure()
    for kind, colour in COLOURS.items():
        of_kind = [span for span in spans if span.kind == kind]
        if not of_kind:
            continue
        figure.add_bar(
            orientation="h",
            x=[span.end - span.begin for span in of_kind],
            base=[span.begin for span in of_kind],
            y=[span.stream for span in of_kind],
            name=f"{kind}, {sum(span.end - span.begin for span in of_kind):,.2f} s in all",
            marker={"color": colour, "line": {"color": "white", "width": 0.5}},
            customdata=[[span.name, span.begin, span.end] for span in of_kind],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]:.4f} s to %{customdata[2]:.4f} s<extra></extra>",
        )
    figure.update_layout(
        title=title,
        barmode="overlay",
        plot_bgcolor="white",
        xaxis={"title": "seconds"},
        yaxis={"categoryorder": "array", "categoryarray": STREAMS[::-1], "fixedrange": True},
        legend={"orientation": "h", "y": -0.1, "yanchor": "top"},
        autosize=True,
    )
    return figure.to_html(include_plotlyjs=True, default_height="100vh")
