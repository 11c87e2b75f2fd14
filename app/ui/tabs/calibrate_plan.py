"""Calibrate: the cache as MoEpic's configurator would divide and split it, edited, put into use and taken back."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.services.planner import Proposal, Used
from app.services.predictions import read_predictions, so_far
from app.services.replanner import AGAIN, MARGIN
from app.ui.controls import LIVE, ONCE, html
from app.ui.news import Shown
from app.ui.tabs.calibrate_plan_views import drawing, predicted, renewed
from app.ui.text import notice
from app.wording import count
from core.errors import MoestroError

ABOUT = (
    "<h4>Plan the cache</h4><p class='minor'>MoEpic's configurator divides the budget among layers, and finds which "
    "part of how many experts each should keep, by the waiting that measured times and hit curves let expect. Experts "
    "can be kept in part where the model was loaded with several blocks per expert.</p>"
)
EDIT = (
    "<p class='minor'>The plan can be edited: memory in whole experts, and the part of each cached expert that stays, "
    "such as 2/3. What the layers' sum leaves of the budget is divided among them in the same proportions.</p>"
)
Rows = list[list[object]]


class PlanPanel:
    """Builds the panel where it is created. `news`: the page's state, for its colours."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._proposal: Proposal | None = None
        self._adopted: Used | None = None  # the last one that is shown without a press of Plan
        html(ABOUT, elem_id="plan-about")
        with gr.Row(elem_classes="buttons"):
            self.plan = gr.Button("Plan", size="sm", elem_id="plan-go", min_width=80, scale=0)
            self.use = gr.Button("Use this plan", size="sm", elem_id="plan-use", min_width=110, scale=0, visible=False)
            self.undo = gr.Button("Undo", size="sm", elem_id="plan-undo", min_width=80, scale=0, visible=False)
        self.idle = gr.Checkbox(
            host.replanner.on,
            label="Plan again while idle",
            elem_id="plan-idle",
            info=f"After every {count(AGAIN)} further tokens of your answers, when none is being written, plan from "
            f"what they requested, and use the plan if its predicted waiting is more than {MARGIN:.0%} less. Off: "
            "only when you press Plan.",
        )
        self.done = html(renewed(host.replanner.last), elem_id="plan-done")
        with gr.Row(elem_classes="buttons"):
            self.target = gr.Number(
                0,
                label="Time per token (ms)",
                minimum=0,
                elem_id="plan-target",
                info="The least memory that a token is predicted to take no longer with.",
            )
            self.least = gr.Button("Find the least budget", size="sm", elem_id="plan-least", min_width=150, scale=0)
        self.found = html(elem_id="plan-found")
        self.summary = html(elem_id="plan-said")
        with gr.Column(visible=False, elem_id="plan-edit") as self.edit:
            html(EDIT)
            self.table = gr.Dataframe(
                headers=["Layer", "Memory (experts)", "Part kept"],
                datatype=["number", "number", "str"],
                type="array",
                column_count=3,
                static_columns=[0],
                interactive=True,
                max_height=260,
                show_label=False,
                buttons=[],
                elem_id="plan-table",
            )
        self.drawn = gr.Plot(show_label=False, elem_id="plan-figure", visible=False)
        self._answer: list[Any] = [self.use, self.undo, self.summary, self.drawn]
        self.outputs: list[Any] = [*self._answer, self.edit, self.table, self.idle, self.done]

    def wire(self, news: Component) -> None:
        """Attach the events."""
        self.plan.click(self._plan, news, self.outputs, **ONCE)
        self.least.click(self._least, self.target, self.found, **ONCE)
        self.use.click(self._use, [news, self.table], self.outputs, **ONCE)
        self.undo.click(self._undo, news, self.outputs, **ONCE)
        self.table.input(self._edit, [news, self.table], self._answer, **LIVE)
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

    def _least(self, tpot_ms: float | None) -> str:
        """The least budget for a time per token, in words."""
        if not tpot_ms or tpot_ms <= 0:
            return notice("Give a time per token in milliseconds, such as 40.")
        try:
            experts, total, plan = self.host.planner.least(float(tpot_ms))
        except MoestroError as error:
            return notice(str(error))
        return notice(
            f"{experts} of {total} experts ({experts / total:.0%}): {plan.tpot_ms:.3g} ms a token by MoEpic's latency "
            "model, not measured.",
            "info",
        )

    def _edit(self, now: Shown, rows: Rows) -> list[Any]:
        """The table was edited: its prediction, or why it cannot be."""
        if self._proposal is None:
            return [gr.skip()] * len(self._answer)
        try:
            self._proposal = self.host.planner.edit(self._proposal, rows)
        except MoestroError as error:
            return [gr.skip(), gr.skip(), notice(str(error)), gr.skip()]
        return self._answered(now)

    def _use(self, now: Shown, rows: Rows) -> list[Any]:
        try:
            if self._proposal is not None:
                self._proposal = self.host.planner.edit(self._proposal, rows)
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

    def _answered(self, now: Shown, problem: str = "") -> list[Any]:
        """Buttons, words and figure."""
        proposal, used = self._proposal, self.host.planner.used
        in_use = used is not None and proposal is used.proposal
        shown = proposal is not None and not problem
        summary = predicted(proposal, self.host.planner, self._earlier(proposal)) if proposal is not None else ""
        return [
            gr.update(visible=shown and not in_use),
            gr.update(visible=used is not None),
            notice(problem) if problem else summary,
            gr.update(value=drawing(proposal, bool(now["dark"])) if shown and proposal else None, visible=shown),
        ]

    def _earlier(self, proposal: Proposal) -> str:
        return so_far(read_predictions(self.host.store.folder, proposal.known.profile.model_hash))

    def _values(self, now: Shown, problem: str = "") -> list[Any]:
        proposal, replanner = self._proposal, self.host.replanner
        shown = proposal is not None and not problem
        return [
            *self._answered(now, problem),
            gr.update(visible=shown),
            proposal.rows if proposal is not None and shown else gr.skip(),
            replanner.on,
            renewed(replanner.last),
        ]
