"""Tab Analysis: replays recorded routing through every policy, prefetcher and budget (What-if), and the
predictor lab.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.services.analysis import sources, whatif
from app.services.analysis.question import TIMES, Question, numbers
from app.services.analysis.sources import FILE, Source
from app.services.host import Host
from app.ui.carried import Renewed
from app.ui.controls import LIVE, ONCE, html, progress, whole
from app.ui.sidebar.text import notice
from app.ui.tabs.analysis_answers import LabAnswer, WhatIfAnswer
from core.errors import MoestroError
from core.settings.registry import variants

KINDS = [".trace", ".npz", ".csv", ".json", ".jsonl"]
TOKENS = 2000  # default number of tokens; prefetchers are simulated copy by copy

# State of a page: the "stamp" of the shown results and whether the page is "dark".
Shown = dict[str, Any]


class AnalysisTab:
    """The form on the left, the results on the right. `news` redraws them when the server has newer ones."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Row(elem_id="analysis", elem_classes="job-tab", equal_height=False):
            with gr.Column(scale=3, min_width=290, elem_classes="job-form"):
                self._build_form()
            with gr.Column(scale=9, min_width=320, elem_classes="job-answer"), gr.Tabs(elem_id="answers") as self.tabs:
                with gr.Tab("What-if", id="whatif"):
                    self.whatif = WhatIfAnswer(host.analyst)
                with gr.Tab("Predictor lab", id="lab"):
                    self.lab = LabAnswer(host.analyst)
        self.news = gr.HTML(
            {"stamp": "", "dark": True},
            html_template="",
            elem_classes="job-news",
            apply_default_css=False,
            js_on_load='import("/ui/jobs.js").then((m) => m.start(element, props, trigger, "analysis"));',
        )
        self.outputs = [self.news, self.alert, *self.whatif.outputs, *self.lab.outputs]
        self._wire()

    def _build_form(self) -> None:
        self.source = gr.Dropdown(
            [],
            label="Routing of",
            filterable=False,
            elem_id="whatif-source",
            info="The tokens whose experts are asked for again, in the same order.",
        )
        with gr.Column(visible=False, elem_id="whatif-file") as self.file_group:
            self.path = gr.Textbox(
                "",
                label="Path",
                max_lines=1,
                elem_id="whatif-path",
                info="A recorded trace, an "
                ".npz with `experts` [layers, tokens, k], or a CSV or JSON list of token, layer, "
                "ids.",
            )
            self.upload = gr.File(
                label="Or drop a file here (at most 64 MB)", file_types=KINDS, height=96, elem_id="whatif-upload"
            )
            self.experts = gr.Number(
                0,
                label="Experts in a layer",
                precision=0,
                elem_id="whatif-experts",
                info="Where the file does not say. 0 = its largest id, plus one.",
            )
        self.limit = gr.Number(
            TOKENS,
            label="At most (tokens)",
            precision=0,
            elem_id="whatif-limit",
            info="The last ones; 0 = all. Prefetchers take a second for a few thousand.",
        )
        policies = [(v.title, v.name) for v in variants("eviction")]
        predictors = [(v.title, v.name) for v in variants("predictor")]
        self.policies = gr.CheckboxGroup(
            policies,
            value=[name for _, name in policies],
            label="Cache policies",
            elem_id="whatif-policies",
            info="Each with its parameters as they are set in "
            "the sidebar. LRU and the one in use are always among them.",
        )
        self.predictors = gr.Dropdown(
            predictors,
            value=[whatif.NONE],
            multiselect=True,
            label="Prefetchers",
            elem_id="whatif-predictors",
            info="Each beside every policy at every budget. The lab tests all of them.",
        )
        self.budgets = gr.Textbox(
            whatif.AUTO,
            label="Budgets",
            max_lines=1,
            elem_id="whatif-budgets",
            info="Shares of all experts (25%, 50%) or numbers of them. auto = every tenth; "
            "in the lab the budget in use.",
        )
        with gr.Accordion("Caches, link and clock", open=False, elem_id="whatif-clock"):
            self.scope = gr.Radio(
                [("Each layer its own", "layer"), ("One pool for all", "global")],
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
            self.most = gr.Number(
                0,
                label="m of recall@m",
                precision=0,
                elem_id="whatif-most",
                info="In the lab, beside recall@k. 0 = 2 k.",
            )
            html(
                "<p class='minor'>Times of one token. 0 = as measured with the routing; a file from elsewhere "
                "takes those of this session if the model has the same shape.</p>"
            )
            with gr.Row(elem_classes="pair"):
                self.compute = number("Computing (ms)", "whatif-compute", "With everything resident.")
                self.load = number("One copy (ms)", "whatif-load", "One expert over the link.")
            with gr.Row(elem_classes="pair"):
                self.product = number("One expert (ms)", "whatif-product", "Its share of the computing.")
                self.miss = number("A miss (ms)", "whatif-miss", "What it costs beside its copy.")
            self.size = number("Size of one expert (MB)", "whatif-size", "For the bytes over the link.")
        self.alert = html(elem_id="analysis-alert")
        progress("Simulating", elem_id="analysis-progress")
        with gr.Row(elem_classes="buttons"):
            self.compare = gr.Button("Compare", variant="primary", size="sm", elem_id="whatif-go", min_width=80)
            self.test = gr.Button("Test prefetchers", size="sm", elem_id="lab-go", min_width=80)
            self.cancel = gr.Button("Cancel", size="sm", elem_id="whatif-cancel", min_width=80)
        self.form = [
            self.source,
            self.path,
            self.upload,
            self.experts,
            self.limit,
            self.policies,
            self.predictors,
            self.budgets,
            self.scope,
            self.begin,
            self.most,
            self.size,
            self.compute,
            self.load,
            self.product,
            self.miss,
        ]

    def look(self, chosen: str | None) -> list[Any]:
        """Refresh the routing sources when the tab is opened. Outputs: `looked`."""
        found = sources.choices(self.host.store, self.host.load_id)
        values = [value for _, value in found]
        now = chosen if chosen in values else values[0]
        return [gr.update(choices=found, value=now), gr.update(visible=now == FILE), str(self.host.settings["scope"])]

    @property
    def looked(self) -> list[Any]:
        """The components that `look` updates."""
        return [self.source, self.file_group, self.scope]

    def _wire(self) -> None:
        self.news.tick(self._renew, [self.news, self.whatif.budget], self.outputs, **LIVE)
        self.whatif.wire(self.news)
        self.source.input(lambda choice: gr.update(visible=choice == FILE), self.source, self.file_group, **LIVE)
        self.upload.upload(lambda: "", None, self.path, **LIVE)
        for button, kind in ((self.compare, "whatif"), (self.test, "lab")):
            button.click(self._starter(kind), self.form, [self.alert, self.tabs], **ONCE)
        self.cancel.click(self.host.analyst.cancel, None, None, **ONCE)

    def _starter(self, kind: Any) -> Any:
        def start(
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
            memory, shape = host.memory(), host.shape
            if kind == "lab":
                predictors = [v.name for v in variants("predictor") if v.name != whatif.NONE]
            try:
                source = Source.parse(choice, path or upload or "", whole(experts))
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
                        settings=host.settings,
                        load=host.load_id,
                        shape=shape,
                        profile=host.profile,
                        slots=memory.experts // shape.expert_bytes if memory is not None and shape is not None else 0,
                        **numbers(dict(zip(TIMES, times, strict=True))),
                    )
                )
            except MoestroError as error:
                return [notice(str(error)), gr.skip()]
            return ["", gr.Tabs(selected=kind)]

        return start

    def _renew(self, now: Shown, budget: int | None, event: Renewed) -> list[Any]:
        """Redraw: newer results, an analysis began or ended, or the page's colours changed."""
        shown = {**now, "stamp": event.stamp, "dark": event.dark}
        job = self.host.analyst.job
        said: Any = gr.skip()  # what is said of the form since then stays: a start takes it away
        if job is not None and job.state == "error":
            said = notice(job.error)
        elif job is not None and job.state == "cancelled":
            said = notice("Cancelled. What was found before is still shown.", "info")
        return [shown, said, *self.whatif.values(budget, shown["dark"]), *self.lab.values(shown["dark"])]


def number(label: str, element: str, info: str) -> gr.Number:
    """A number field that may stay 0."""
    return gr.Number(0, label=label, info=info, elem_id=element, min_width=110)
