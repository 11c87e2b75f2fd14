"""The figures of tab Analysis, from a table of `app.services.analysis.whatif`; their titles mark them as simulated."""

from __future__ import annotations

from typing import Any

from app.services.analysis.whatif import BOUNDS, Table, lru_cliff, times, title
from app.ui.tabs.figures import PALETTE, accent, figure, heatmap, quiet
from core.simulate import BELADY, BELADY_BYPASS

Points = tuple[list[float], list[float]]
CLIFF = "#e8705f"


def curves(table: Table, metric: str) -> dict[str, Points]:
    """Policy -> (percent of experts, hit rate in percent or TPOT in ms), without a prefetcher. `metric`: "hit_rate" or
    "tpot_ms"; points with unknown values are left out.
    """
    scale = 100.0 if metric == "hit_rate" else 1.0
    found: dict[str, Points] = {}
    for policy in dict.fromkeys(row.policy for row in table.rows):
        points = [
            (100.0 * row.slots / table.total, scale * value)
            for row in table.curve(policy)
            if (value := getattr(row, metric)) is not None
        ]
        if points:
            found[policy] = ([x for x, _ in points], [y for _, y in points])
    return found


def bound_curve(table: Table, metric: str) -> Points:
    """The same for a bound: "hit_rate" or "tpot_ms" of Belady, "bypass_" and one of these, or "perfect_ms"."""
    scale = 100.0 if metric.endswith("hit_rate") else 1.0
    points = [
        (100.0 * bound.slots / table.total, scale * value)
        for bound in table.bounds
        if (value := getattr(bound, metric)) is not None
    ]
    return [x for x, _ in points], [y for _, y in points]


def budget_curve(table: Table, metric: str, dark: bool) -> Any:
    """Hit rate or TPOT over budgets: the policy in use is highlighted, bounds are dashed, LRU's cliff is marked."""
    import plotly.graph_objects as go

    unit, name = ("%", "Hit rate") if metric == "hit_rate" else ("ms", "Time per token")
    chosen = table.about.chosen[0]
    traces, colour = [], colours(table, dark)
    # policy in use: on top
    for policy, (x, y) in sorted(curves(table, metric).items(), key=lambda one: one[0] == chosen):
        mine = policy == chosen
        traces.append(
            go.Scatter(
                x=x,
                y=y,
                name=title("eviction", policy),
                mode="lines+markers",
                line=dict(color=colour[policy], width=4 if mine else 1.6),
                marker=dict(size=7 if mine else 4),
                opacity=1.0 if mine else 0.85,
                hovertemplate=f"%{{x:.3g}} % of experts: %{{y:.4g}} {unit}",
            )
        )
    limits = [(BOUNDS[BELADY], metric, "dash")]
    if any(bound.bypass_hit_rate is not None for bound in table.bounds):
        limits.append((BOUNDS[BELADY_BYPASS], f"bypass_{metric}", "dashdot"))
    if metric == "tpot_ms":
        limits.append(("Perfect prefetch, same link", "perfect_ms", "dot"))
    for label, key, dash in limits:
        x, y = bound_curve(table, key)
        traces.append(
            go.Scatter(
                x=x,
                y=y,
                name=label,
                mode="lines",
                line=dict(color=quiet(dark), width=2, dash=dash),
                hovertemplate=f"%{{x:.3g}} % of experts: %{{y:.4g}} {unit}",
            )
        )
    made = figure(traces, dark, f"{name} over budgets (simulated)", "experts resident", f"{name} ({unit})")
    _mark(made, table, metric, dark)
    made.update_xaxes(ticksuffix=" %", range=[0, 102])
    if metric == "tpot_ms":
        made.update_yaxes(rangemode="tozero")
    return made


def _mark(made: Any, table: Table, metric: str, dark: bool) -> None:
    """Add what everything resident takes, the budget in use, and LRU's cliff to a figure over budgets."""
    if metric == "tpot_ms" and table.resident_ms is not None:
        made.add_hline(
            y=table.resident_ms,
            line=dict(color=quiet(dark), width=1, dash="longdash"),
            annotation=annotation("everything resident", quiet(dark)),
            annotation_position="bottom left",
        )
    now = table.about.chosen[2]
    if now:
        made.add_vline(
            x=100 * now / table.total,
            line=dict(color=accent(dark), width=1, dash="dot"),
            annotation=annotation("now", accent(dark)),
            annotation_position="top right",
        )
    if (edge := lru_cliff(table)) is not None:
        share = 100 * edge.slots / table.total
        made.add_vrect(x0=0, x1=share, fillcolor=CLIFF, opacity=0.08, line_width=0, layer="below")
        made.add_vline(
            x=share,
            line=dict(color=CLIFF, width=1.5),
            annotation=annotation("LRU cliff", CLIFF),
            annotation_position="top left",
        )


def colours(table: Table, dark: bool) -> dict[str, str]:
    """Policy -> its colour in every figure; the one in use has the page's accent colour."""
    policies = sorted({row.policy for row in table.rows})
    return {
        policy: accent(dark) if policy == table.about.chosen[0] else PALETTE[at % len(PALETTE)]
        for at, policy in enumerate(policies)
    }


def grid(table: Table, slots: int) -> tuple[list[str], list[str], list[list[float | None]], bool]:
    """At one budget: policies, predictors, and [policy][predictor] TPOT in ms, or hit rate in % where no times are
    known (the last value: whether it is TPOT). Best policy first.
    """
    timed = table.resident_ms is not None
    rows = {(row.policy, row.predictor): row for row in table.rows if row.slots == slots}
    predictors = list(dict.fromkeys(predictor for _, predictor in rows))

    def value(policy: str, predictor: str) -> float | None:
        row = rows.get((policy, predictor))
        if row is None:
            return None
        return row.tpot_ms if timed else None if row.hit_rate is None else 100 * row.hit_rate

    def best(policy: str) -> float:
        known = [v for predictor in predictors if (v := value(policy, predictor)) is not None]
        return (min(known) if timed else -max(known)) if known else 0.0

    policies = sorted(dict.fromkeys(policy for policy, _ in rows), key=best)
    return policies, predictors, [[value(policy, predictor) for predictor in predictors] for policy in policies], timed


def compared(table: Table, slots: int, dark: bool) -> Any:
    """Policies x predictors at one budget: bars for a single predictor, else a heatmap; bounds are marked."""
    import plotly.graph_objects as go

    policies, predictors, values, timed = grid(table, slots)
    unit, what = ("ms", "Time per token") if timed else ("%", "Hit rate")
    names = [title("eviction", policy) for policy in policies]
    heading = f"{what} at {100 * slots / table.total:.3g} % of experts (simulated)"
    height = 120 + 26 * len(policies)
    if len(predictors) > 1:
        rows = values[::-1]
        return figure(
            [
                heatmap(
                    rows,
                    dark,
                    x=[title("predictor", name) for name in predictors],
                    y=names[::-1],
                    reversescale=timed,
                    texttemplate="%{z:.3g}",
                    hovertemplate=f"%{{y}}, %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
                )
            ],
            dark,
            heading,
            height=height + 60,
        )
    first = [row[0] for row in values]
    colour = colours(table, dark)
    bars = go.Bar(
        x=first[::-1],
        y=names[::-1],
        orientation="h",
        width=0.62,
        cliponaxis=False,
        marker=dict(color=[colour[policy] for policy in policies[::-1]]),
        textposition="outside",
        text=["" if v is None else f"{v:.4g} {unit}" for v in first[::-1]],
        hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}<extra></extra>",
    )
    most = max((v for v in first if v is not None), default=1.0)
    made = figure([bars], dark, heading, f"{what} ({unit})", height=height, margin=dict(l=8, r=12, t=58, b=8))
    made.update_xaxes(range=[0, 1.3 * most])
    bound = table.bound(slots)
    limits = [(BOUNDS[BELADY], bound.tpot_ms if timed else times(bound.hit_rate, 100), "dash")]
    if table.about.bypass and bound.bypass_hit_rate is not None:  # the other's label would lie on this one
        limits = [(BOUNDS[BELADY_BYPASS], bound.bypass_tpot_ms if timed else times(bound.bypass_hit_rate, 100), "dash")]
    limits += [("perfect prefetch", bound.perfect_ms, "dot")] if timed else []
    for at, (label, value, dash) in enumerate(limits):
        if value is not None:
            made.add_vline(
                x=value,
                line=dict(color=quiet(dark), width=1.5, dash=dash),
                annotation={**annotation(label, quiet(dark)), "yanchor": "bottom", "y": 1.0},
                annotation_position="top left" if at else "top right",
            )
    return made


def annotation(text: str, colour: str) -> dict[str, Any]:
    """A line's label."""
    return dict(text=text, font=dict(size=10, color=colour))
