"""Calibrate: the cache as MoEpic's configurator would divide and split it, put into use and taken back."""

from __future__ import annotations

import time
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.services.planner import Planner, Proposal, Used
from app.services.replanner import AGAIN, MARGIN, Renewal
from app.ui.controls import LIVE, ONCE, button, html, plot
from app.ui.news import Shown
from app.ui.tabs.figures import PALETTE, figure
from app.ui.text import notice
from app.wording import count
from core.errors import MoestroError
from core.policy.allocation.cache_plan import CachePlan

ABOUT = (
    "<h4>Plan the cache</h4><p class='minor'>MoEpic's configurator divides the budget among layers, and finds which "
    "part of how many experts each should keep, by the waiting that measured times and hit curves let expect. Experts "
    "can be kept in part where the model was loaded with several blocks per expert.</p>"
)


class PlanPanel:
    """Builds the panel where it is created. `news`: the page's state, for its colours."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._proposal: Proposal | None = None
        self._adopted: Used | None = None  # the last one that is shown without a press of Plan
        html(ABOUT, elem_id="plan-about")
        with gr.Row(elem_classes="buttons"):
            self.plan = button("Plan", "plan-go", scale=0)
            self.use = button("Use this plan", "plan-use", min_width=110, scale=0, visible=False)
            self.undo = button("Undo", "plan-undo", scale=0, visible=False)
        self.idle = gr.Checkbox(
            host.replanner.on,
            label="Plan again while idle",
            elem_id="plan-idle",
            info=f"After every {count(AGAIN)} further tokens of your answers, when none is being written, plan from "
            f"what they requested, and use the plan if its predicted waiting is more than {MARGIN:.0%} less. Off: "
            "only when you press Plan.",
        )
        self.done = html(renewed(host.replanner.last), elem_id="plan-done")
        self.summary = html(elem_id="plan-said")
        self.drawn = plot("plan-figure", visible=False)
        self.outputs: list[Any] = [self.use, self.undo, self.summary, self.drawn, self.idle, self.done]

    def wire(self, news: Component) -> None:
        """Attach the events."""
        self.plan.click(self._plan, news, self.outputs, **ONCE)
        self.use.click(self._use, news, self.outputs, **ONCE)
        self.undo.click(self._undo, news, self.outputs, **ONCE)
        self.idle.input(self.host.replanner.switch, self.idle, None, **LIVE)

    def values(self, now: Shown) -> list[Any]:
        """The panel as it is now, with what was done while idle."""
        used, proposal = self.host.planner.used, self._proposal
        if used is not None and used.idle and used is not self._adopted:
            self._adopted, self._proposal = used, used.proposal
        elif proposal is not None and proposal.known.load != self.host.models.load_id:
            self._proposal = None
        return self._values(now)

    def _plan(self, now: Shown) -> list[Any]:
        try:
            self._proposal = self.host.planner.propose()
        except MoestroError as error:
            return self._values(now, str(error))
        return self._values(now)

    def _use(self, now: Shown) -> list[Any]:
        try:
            if self._proposal is not None:
                self.host.planner.use(self._proposal)
        except MoestroError as error:
            skipped = [gr.skip()] * (len(self.outputs) - 3)
            return [gr.skip(), gr.skip(), notice(str(error)), *skipped]
        return self._values(now)

    def _undo(self, now: Shown) -> list[Any]:
        try:
            self.host.planner.undo()
        except MoestroError as error:
            return self._values(now, str(error))
        return self._values(now)

    def _values(self, now: Shown, problem: str = "") -> list[Any]:
        proposal, used, replanner = self._proposal, self.host.planner.used, self.host.replanner
        in_use = used is not None and proposal is used.proposal
        shown = proposal is not None and not problem
        summary = predicted(proposal, self.host.planner) if proposal is not None else ""
        return [
            gr.update(visible=shown and not in_use),
            gr.update(visible=used is not None),
            notice(problem) if problem else summary,
            gr.update(value=drawing(proposal, bool(now["dark"])) if shown and proposal else None, visible=shown),
            replanner.on,
            renewed(replanner.last),
        ]


def predicted(proposal: Proposal, planner: Planner) -> str:
    """What is expected of the plan and of others, and what was measured since it is in use."""
    known, in_use = proposal.known, planner.used is not None
    rows = {"Before" if in_use else "In use": proposal.now, "The plan": proposal.plan} | dict(proposal.others)
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
