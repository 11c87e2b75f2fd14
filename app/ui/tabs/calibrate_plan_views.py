"""What the panel of plans shows: predictions in a table, what was done while idle, memory and part of each layer."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from app.services.planner import Planner, Proposal
from app.services.replanner import Renewal
from app.ui.tabs.figures import PALETTE, figure
from core.policy.allocation.cache_plan import CachePlan


def predicted(proposal: Proposal, planner: Planner, earlier: str) -> str:
    """What is expected of the plan and of others, and what was measured since it is in use. `earlier`: how well
    predictions did."""
    known, in_use = proposal.known, planner.used is not None
    named = "Your plan" if proposal.by_hand else "The plan"
    rows = {"Before" if in_use else "In use": proposal.now, named: proposal.plan} | dict(proposal.others)
    table = "".join(
        f"<tr><td>{escape(name)}</td><td>{sum(one.exposed_ms):.3g} ms</td><td>{one.tpot_ms:.3g} ms</td></tr>"
        for name, one in rows.items()
    )
    aside = f", {known.buffer} of them the prefetch buffer" if known.buffer else ""
    blocks = f", each in {known.blocks} blocks" if known.blocks > 1 else ""
    parts = [
        f"<p class='minor'>Room for {known.experts} experts{aside}{blocks}. Hit curves "
        f"{escape(known.basis)}, times from calibration. Predicted by MoEpic's latency model, not measured:</p>",
        f"<table class='plan'><tr><th></th><th>Waiting a token</th><th>Time a token</th></tr>{table}</table>",
    ]
    if earlier:
        parts.append(f"<p class='minor'>{escape(earlier)}</p>")
    if in_use:
        before, after = (("–" if ms is None else f"{ms:.3g} ms") for ms in planner.waited_ms())
        parts.append(
            f"<p class='minor'>In use. Measured waiting a token: {before} before, {after} since. Press Plan again "
            "for later tokens.</p>"
        )
    return "".join(parts)


def renewed(last: Renewal | None) -> str:
    """What was done while idle, and when."""
    if last is None:
        return ""
    return f"<p class='minor'>{time.strftime('%H:%M', time.localtime(last.at_s))}: {escape(last.text)}</p>"


def drawing(proposal: Proposal, dark: bool) -> Any:
    """Budget and resident part of each layer, now and by the plan."""
    import plotly.graph_objects as go  # imported here: it takes as long as the rest of the page

    def bars(name: str, plan: CachePlan, colour: str) -> list[Any]:
        layers = list(range(len(plan.slots)))
        part = [f"{theta:.0%} of {cached} experts" for theta, cached in zip(plan.theta, plan.cached, strict=True)]
        hover = "layer %{x}: %{y:.1f} experts' memory, %{customdata}<extra></extra>"
        theta = "layer %{x}: theta %{y:.2f}<extra></extra>"
        return [
            go.Bar(x=layers, y=plan.slots, name=name, marker_color=colour, customdata=part, hovertemplate=hover),
            go.Scatter(
                x=layers,
                y=plan.theta,
                name=f"{name}: theta",
                yaxis="y2",
                mode="lines+markers",
                line=dict(color=colour, dash="dot"),
                hovertemplate=theta,
            ),
        ]

    traces = [*bars("now", proposal.now, PALETTE[0]), *bars("plan", proposal.plan, PALETTE[1])]
    return figure(
        traces,
        dark,
        "Memory of each layer (experts) and the part of an expert that stays (theta, right)",
        "layer",
        "experts",
        barmode="group",
        showlegend=True,
        legend=dict(orientation="h", y=-0.25),
        yaxis2=dict(overlaying="y", side="right", range=[0, 1.05], showgrid=False),
    )
