"""The picture of `bench systems`: time per token over budgets, one line a system, with the bounds dashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.store.results import BOUNDS
from app.ui.tabs.figures import PALETTE, figure, quiet

DASHES = {
    "belady": "dash",
    "belady_bypass": "dashdot",
    "belady_global": "longdash",
    "perfect_prefetch": "dot",
    "resident": "longdashdot",
}
LOSSY = " (changes answers)"
NAME = 212  # pixels of the longest name, so that names stand in columns
SYMBOLS = ("circle", "square", "triangle-up")  # of the first, second and third time that a colour is used


def lines(result: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float], bool]]:
    """System -> (percent of the experts, TPOT in ms, whether it was exact everywhere); budgets at which it could not
    run are left out, and so is a system that never ran."""
    found = {}
    shares = {budget: 100.0 * about["share"] for budget, about in result["budgets"].items()}
    for name, row in result["systems"].items():
        ran = sorted((shares[budget], one) for budget, one in row.items() if one.get("tpot_ms") is not None)
        if ran:
            exact = all(one["exact"] for _, one in ran)
            found[name] = ([share for share, _ in ran], [one["tpot_ms"] for _, one in ran], exact)
    return found


def bound_lines(result: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Bound -> (percent of the experts, TPOT in ms), where it is known."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for budget, about in sorted(result["budgets"].items(), key=lambda one: one[1]["share"]):
        for name, bound in result["bounds"][budget].items():
            if bound["tpot_ms"] is not None:
                x, y = found.setdefault(name, ([], []))
                x.append(100.0 * about["share"])
                y.append(bound["tpot_ms"])
    return found


def tpot_over_budgets(result: Mapping[str, Any], dark: bool, height: int = 560) -> Any:
    """The picture."""
    import plotly.graph_objects as go

    hover = "%{x:.3g} % of experts: %{y:.4g} ms"
    traces = [
        go.Scatter(
            x=x,
            y=y,
            name=result["titles"][name] + ("" if exact else LOSSY),
            mode="lines+markers",
            line=dict(color=PALETTE[at % len(PALETTE)], width=1.8, dash="solid" if exact else "dot"),
            marker=dict(size=7, symbol=SYMBOLS[at // len(PALETTE) % len(SYMBOLS)] if exact else "diamond"),
            hovertemplate=hover,
        )
        for at, (name, (x, y, exact)) in enumerate(lines(result).items())
    ] + [
        go.Scatter(
            x=x,
            y=y,
            name=BOUNDS[name],
            mode="lines",
            line=dict(color=quiet(dark), width=1.6, dash=DASHES[name]),
            hovertemplate=hover,
        )
        for name, (x, y) in bound_lines(result).items()
    ]
    link = "emulated link" if result["link"] == "emulated" else "the machine's own link"
    made = figure(
        traces,
        dark,
        f"Time per token over budgets: {result['model']}, measured, {link}",
        "experts resident",
        "time per token (ms)",
        height=height,
        showlegend=True,
        legend=dict(font=dict(size=10), orientation="h", y=-0.16, yanchor="top", entrywidth=NAME),
    )
    made.update_xaxes(ticksuffix=" %", range=[0, 102])
    made.update_yaxes(rangemode="tozero")
    return made
