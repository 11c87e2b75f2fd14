"""The common look of every Plotly figure of the dashboard: the page's colours in dark and light, no frame of
its own.
"""

from __future__ import annotations

from typing import Any

PALETTE = (
    "#4c9be8",
    "#e69f00",
    "#2fb58c",
    "#d06fb2",
    "#9d8cf0",
    "#c9a227",
    "#56c5d8",
    "#e8705f",
    "#8aa84f",
    "#b08968",
    "#7f93b2",
    "#c77dff",
)  # distinguishable on both backgrounds
RAMPS = {
    True: [[0.0, "#101a2e"], [0.4, "#1f4e8c"], [0.75, "#2a9d9d"], [1.0, "#f5dc5a"]],
    False: [[0.0, "#eef2f8"], [0.4, "#9cc4e6"], [0.75, "#3a7dbf"], [1.0, "#0b2a66"]],
}  # the live deck's
PLACES = ("top center", "bottom center", "middle right", "middle left")  # label positions of neighbouring points


def text_colour(dark: bool) -> str:
    return "#e2e8f0" if dark else "#1e293b"


def quiet(dark: bool) -> str:
    """The colour of secondary lines and text."""
    return "#94a3b8" if dark else "#5b6778"


def accent(dark: bool) -> str:
    return "#818cf8" if dark else "#4f46e5"


def legend(dark: bool, y: float = -0.2, **more: Any) -> dict[str, Any]:
    """The layout of a legend below a figure; `y`: how far, as a share of its height."""
    small = dict(size=11, color=quiet(dark))
    return dict(showlegend=True, legend=dict(orientation="h", y=y, yanchor="top", x=0, font=small, **more))


def figure(
    traces: list[Any], dark: bool, title: str, x: str = "", y: str = "", height: int = 340, **layout: Any
) -> Any:
    """A plotly figure with one title line and named axes."""
    import plotly.graph_objects as go  # imported here: it takes as long as the rest of the page

    grid = "rgba(148, 163, 184, .18)" if dark else "rgba(100, 116, 139, .2)"
    axis = dict(gridcolor=grid, zerolinecolor=grid, linecolor=grid, automargin=True, tickfont=dict(size=11))

    def named(text: str) -> dict[str, Any]:
        return dict(text=text, standoff=8, font=dict(size=11, color=quiet(dark)))

    common = dict(
        template="plotly_dark" if dark else "plotly_white",
        height=height,
        autosize=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font=dict(family="system-ui, sans-serif", size=12, color=text_colour(dark)),
        title=dict(
            text=title,
            x=0,
            xref="container",
            y=1,
            yref="container",
            yanchor="top",
            pad=dict(t=10, l=8),
            font=dict(size=13),
        ),
        margin=dict(l=8, r=12, t=42, b=8),
        hoverlabel=dict(font=dict(size=12)),
        dragmode=False,
        xaxis={**axis, "title": named(x)},
        yaxis={**axis, "title": named(y)},
        showlegend=False,
    )
    return go.Figure(data=traces, layout=common).update_layout(**layout)  # faster than updating a layout twice


def heatmap(values: Any, dark: bool, **more: Any) -> Any:
    """A heatmap trace in the deck's colours."""
    import plotly.graph_objects as go

    return go.Heatmap(
        z=values,
        colorscale=RAMPS[dark],
        xgap=1 if len(values) <= 64 else 0,
        ygap=1 if len(values) <= 64 else 0,
        colorbar=dict(thickness=10, outlinewidth=0, tickfont=dict(size=10)),
        **more,
    )
