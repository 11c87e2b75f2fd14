"""Tab Analysis: replays recorded routing through every policy, prefetcher and budget (What-if), the predictor lab,
and the systems that a bench measured.
"""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.analysis import sources, whatif
from app.services.analysis.question import TIMES, Question, numbers
from app.services.analysis.sources import FILE, RoutingSource
from app.services.host import Host
from app.ui.controls import LIVE, ONCE, html, number, whole
from app.ui.event_data import Renewed
from app.ui.job_tab import JobTab
from app.ui.news import Shown
from app.ui.tabs.analysis_answers import LabAnswer, SystemsAnswer, WhatIfAnswer
from app.ui.text import notice
from core.errors import MoestroError
from core.settings.registry import variants

KINDS = [".trace", ".npz", ".csv", ".json", ".jsonl"]
TOKENS = 2000  # default number of tokens; prefetchers are simulated copy by copy


class AnalysisTab:
    """Redrawn when the server has newer results."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tab = tab = JobTab(
            "analysis",
            "analysis",
            "Simulating",
            self._build_form,
            [("Compare", "whatif-go"), ("Test prefetchers", "lab-go")],
            ("whatif-cancel", host.analyst.cancel),
            self._build_answer,
        )
        self.alert = tab.alert
        answer = [*self.whatif.outputs, *self.lab.outputs, *self.systems.outputs]
        self.outputs = [tab.news, tab.alert, *answer]
        tab.on_news(self._renew, [self.whatif.budget], answer)
        self._wire()

    def _build_answer(self) -> None:
        with gr.Tabs(elem_id="answers") as self.tabs:
            with gr.Tab("What-if", id="whatif"):
                self.whatif = WhatIfAnswer(self.host)
            with gr.Tab("Predictor lab", id="lab"):
                self.lab = LabAnswer(self.host)
            with gr.Tab("Systems", id="systems"):
                self.systems = SystemsAnswer()

    def _build_form(self) -> list[Component]:
        self._build_source()
        policies = [(v.title, v.name) for v in variants("eviction")]
        self.policies = gr.CheckboxGroup(
            policies,
            value=[name for _, name in policies],
            label="Cache policies",
            elem_id="whatif-policies",
            info="With their parameters from the sidebar. LRU and the policy in use are always included.",
        )
        self.predictors = gr.Dropdown(
            [(v.title, v.name) for v in variants("predictor")],
            value=[whatif.NONE],
            multiselect=True,
            label="Prefetchers",
            elem_id="whatif-predictors",
            info="Each is combined with every policy at every budget. The predictor lab tests all of them.",
        )
        self.budgets = gr.Textbox(
            whatif.AUTO,
            label="Budgets",
            max_lines=1,
            elem_id="whatif-budgets",
            info="Shares of all experts (25%, 50%) or numbers of them. auto = every tenth; "
            "in the lab the budget in use.",
        )
        with gr.Accordion("Caches, link and times", open=False, elem_id="whatif-clock"):
            times = self._build_times()
        return [
            *(self.source, self.path, self.upload, self.experts, self.limit),
            *(self.policies, self.predictors, self.budgets, self.scope, self.begin, self.most, self.size),
            *times,
        ]

    def _build_source(self) -> None:
        """What is replayed, and how much of it."""
        self.source = gr.Dropdown(
            [], label="Routing of", filterable=False, elem_id="whatif-source", info="The recorded tokens to replay."
        )
        with gr.Column(visible=False, elem_id="whatif-file") as self.file_group:
            self.path = gr.Textbox(
                "",
                label="Path",
                max_lines=1,
                elem_id="whatif-path",
                info="A recorded trace, an .npz with `experts` [layers, tokens, k], or a CSV or JSON list of token, "
                "layer, ids.",
            )
            html("<p class='minor'>Or a file of this browser's machine, at most 64 MB:</p>")
            self.upload = gr.File(
                label="A trace file", show_label=False, file_types=KINDS, height=118, elem_id="whatif-upload"
            )
            self.experts = number(
                0, "Experts in a layer", "whatif-experts", "For files that do not say. 0 = the largest id plus one."
            )
        self.limit = number(
            TOKENS,
            "At most (tokens)",
            "whatif-limit",
            "Only the last ones; 0 = all. A prefetcher takes a second per few thousand tokens.",
        )

    def _build_times(self) -> list[Component]:
        """The caches and the clock; returns the fields of `TIMES`."""
        self.scope = gr.Radio(
            [("One per layer", "layer"), ("One for all layers", "global")],
            value="layer",
            label="Slots",
            elem_id="whatif-scope",
        )
        self.begin = gr.Radio(
            [("Filled, as after a load", "filled"), ("Empty", "empty")],
            value="filled",
            label="Caches start",
            elem_id="whatif-start",
        )
        self.most = number(0, "m of recall@m", "whatif-most", "For the predictor lab, besides recall@k. 0 = 2 k.")
        html(
            "<p class='minor'>Times per token. 0 = as measured with the routing; for a file without times, "
            "those of this session if the model has the same shape.</p>"
        )
        with gr.Row(elem_classes="pair"):
            compute = fraction("Computing (ms)", "whatif-compute", "With everything resident.")
            load = fraction("One copy (ms)", "whatif-load", "One expert over the link.")
        with gr.Row(elem_classes="pair"):
            product = fraction("One expert (ms)", "whatif-product", "Its compute time.")
            miss = fraction("A miss (ms)", "whatif-miss", "What a miss costs besides the copy.")
        self.size = fraction("Size of one expert (MB)", "whatif-size", "For the bytes over the link.")
        return [compute, load, product, miss]

    def look(self, chosen: str | None) -> list[Any]:
        """Refresh the routing sources when the tab is opened. Outputs: `looked`."""
        found = sources.choices(self.host.store, self.host.models.load_id)
        values = [value for _, value in found]
        now = chosen if chosen in values else values[0]
        return [
            gr.update(choices=found, value=now),
            gr.update(visible=now == FILE),
            self.host.models.settings.cache.scope,
        ]

    @property
    def looked(self) -> list[Any]:
        """The components that `look` updates."""
        return [self.source, self.file_group, self.scope]

    def _wire(self) -> None:
        self.whatif.wire(self.tab.news)
        self.source.input(lambda choice: gr.update(visible=choice == FILE), self.source, self.file_group, **LIVE)
        self.upload.upload(lambda: "", None, self.path, **LIVE)
        for button, kind in zip(self.tab.starts, ("whatif", "lab"), strict=True):
            noted = [self.tab.news, self.alert, self.tabs]
            button.click(self._starter(kind), [self.tab.news, *self.tab.form], noted, **ONCE)

    def _starter(self, kind: Any) -> Any:
        def start(
            now: Shown,
            choice: str,
            path: str,
            upload: str | None,
            experts: float | None,
            limit: float | None,
            policies: list[str],
            predictors: list[str],
            budgets: str,
            scope: str,
            begin: str,
            most: float | None,
            size: float | None,
            *times: float | None,
        ) -> list[Any]:
            host = self.host
            memory, shape = host.models.memory(), host.models.shape
            if kind == "lab":
                predictors = [v.name for v in variants("predictor") if v.name != whatif.NONE]
            try:
                source = RoutingSource.parse(choice, path or upload or "", whole(experts), host.models.load_id)
                host.analyst.start(
                    Question(
                        source,
                        tuple(policies),
                        tuple(predictors),
                        budgets or whatif.AUTO,
                        kind,
                        whole(most),
                        whole(limit),
                        scope,
                        begin,
                        expert_bytes=whole((size or 0) * 1e6),
                        settings=host.models.settings,
                        load=host.models.load_id,
                        shape=shape,
                        profile=host.models.profile,
                        slots=memory.experts // shape.expert_bytes if memory is not None and shape is not None else 0,
                        **numbers(dict(zip(TIMES, times, strict=True))),
                    )
                )
            except MoestroError as error:
                return [now, notice(str(error)), gr.skip()]
            return [now, "", gr.Tabs(selected=kind)]

        return start

    def _renew(self, now: Shown, budget: int | None, event: Renewed) -> list[Any]:
        """Redraw: newer results, an analysis began or ended, or the page's colours changed."""
        head = self.tab.head(now, event, self.host.analyst.job, "Cancelled. The previous result is still shown.")
        return [
            *head,
            *self.whatif.values(budget, event.dark),
            *self.lab.values(event.dark),
            *self.systems.values(event.dark),
        ]


def fraction(label: str, elem_id: str, info: str) -> gr.Number:
    """A number field that may have a fraction, and may stay 0."""
    return number(0, label, elem_id, info, precision=None, min_width=110)
