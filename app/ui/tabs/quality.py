"""Tab Analysis, section Quality: measures the loaded model under lossy modes."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.services.analysis.quality import MODES, QUESTIONS, RESIDENCIES, TOKENS, Asked
from app.services.host import Host
from app.ui.carried import Renewed
from app.ui.controls import LIVE, ONCE, html, progress, whole
from app.ui.sidebar.text import notice
from app.ui.tabs import quality_views as views
from app.ui.tabs.analysis_answers import SORTED
from core.errors import MoestroError
from core.evaluate.modes import modes_of

Shown = dict[str, Any]


class QualityTab:
    """The form on the left, the results on the right. `news` redraws it when the rows change."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Row(elem_id="quality", elem_classes="job-tab", equal_height=False):
            with gr.Column(scale=3, min_width=290, elem_classes="job-form"):
                self._build_form()
            with gr.Column(scale=9, min_width=320, elem_classes="job-answer"):
                self._build_answer()
        self.news = gr.HTML(
            {"stamp": "", "dark": True},
            html_template="",
            elem_classes="job-news",
            apply_default_css=False,
            js_on_load='import("/ui/jobs.js").then((m) => m.start(element, props, trigger, "evaluation"));',
        )
        self.outputs = [self.news, self.alert, self.empty, self.found, self.head, self.plot, self.table, self.start]
        self._wire()

    def _build_form(self) -> None:
        html(
            "<p class='minor'>The model answers questions and reads a text in every mode, at every residency, from "
            "the same fresh cache. Chats have to wait meanwhile; your settings come back afterwards.</p>"
        )
        known = modes_of()
        self.modes = gr.Dropdown(
            [(mode.title, mode.name) for mode in known],
            value=list(MODES),
            multiselect=True,
            label="Modes",
            elem_id="evaluation-modes",
            info="Lists of settings; what they do not "
            "set is as in the sidebar. Exact is what the others are held against.",
        )
        self.every = gr.Button("All modes", size="sm", elem_id="evaluation-all", min_width=80)
        self.residencies = gr.Textbox(
            RESIDENCIES,
            label="Residencies",
            max_lines=1,
            elem_id="evaluation-residencies",
            info="Shares of the experts in slots: .75, .5 or 75%, 50%.",
        )
        with gr.Row(elem_classes="pair"):
            self.questions = gr.Number(
                QUESTIONS,
                label="Questions",
                precision=0,
                elem_id="evaluation-questions",
                info="Of the demo model's own.",
                min_width=110,
            )
            self.tokens = gr.Number(
                TOKENS,
                label="Text (tokens)",
                precision=0,
                elem_id="evaluation-tokens",
                info="For perplexity.",
                min_width=110,
            )
        self.alert = html(elem_id="evaluation-alert")
        progress("Evaluating", elem_id="evaluation-progress")
        with gr.Row(elem_classes="buttons"):
            self.start = gr.Button("Evaluate", variant="primary", size="sm", elem_id="evaluation-go", min_width=80)
            self.cancel = gr.Button("Cancel", size="sm", elem_id="evaluation-cancel", min_width=80)
        self.form = [self.modes, self.residencies, self.questions, self.tokens]

    def _build_answer(self) -> None:
        self.empty = html(views.EMPTY, elem_id="evaluation-empty")
        with gr.Column(visible=False, elem_id="evaluation-found") as self.found:
            self.head = html(elem_id="evaluation-head")
            self.plot = gr.Plot(show_label=False, elem_id="evaluation-plot")
            html(
                "<a href='/export/quality.csv' download id='evaluation-csv'>Download the table (CSV)</a>",
                elem_id="evaluation-link",
            )
            self.table = gr.HTML(elem_id="evaluation-table", apply_default_css=False, js_on_load=SORTED)

    def _wire(self) -> None:
        self.news.tick(self._renew, self.news, self.outputs, **LIVE)
        self.every.click(lambda: [mode.name for mode in modes_of()], None, self.modes, **ONCE)
        self.start.click(self._start, self.form, self.alert, **ONCE)
        self.cancel.click(self.host.evaluator.cancel, None, None, **ONCE)

    def _start(self, modes: list[str], residencies: str, questions: float | None, tokens: float | None) -> str:
        try:
            self.host.evaluate(Asked(tuple(modes), residencies or "", whole(questions), whole(tokens)))
        except MoestroError as error:
            return notice(str(error))
        return ""

    def _renew(self, now: Shown, event: Renewed) -> list[Any]:
        """Redraw: the rows changed, a model was loaded or unloaded, or the page's colours changed."""
        shown = {**now, "stamp": event.stamp, "dark": event.dark}
        job, answer = self.host.evaluator.job, self.host.evaluator.answer
        said: Any = gr.skip()  # what is said of the form since then stays: `_start` takes it away
        if job is not None and job.state == "error":
            said = notice(job.error)
        elif job is not None and job.state == "cancelled":
            said = notice("Cancelled. Your settings are as they were, and what was found is shown.", "info")
        ready = gr.update(interactive=self.host.model is not None)
        if answer is None:
            return [shown, said, gr.update(visible=True), gr.update(visible=False), *[gr.skip()] * 3, ready]
        plot = views.plot(answer, shown["dark"])
        return [
            shown,
            said,
            gr.update(visible=False),
            gr.update(visible=True),
            views.summary(answer),
            gr.update(value=plot, visible=plot is not None),
            views.listing(answer),
            ready,
        ]
