"""Tab Analysis, section Quality: measures the loaded model under lossy modes."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.analysis.best import of_quality
from app.services.analysis.quality import MODES, QUESTIONS, RESIDENCIES, TOKENS, QualityForm
from app.services.host import Host
from app.ui.best import BestLine
from app.ui.controls import ONCE, answered, button, download, drawn, html, number, plot, sortable, whole
from app.ui.event_data import Renewed
from app.ui.job_tab import JobTab
from app.ui.news import Shown
from app.ui.tabs import quality_views as views
from core.measure.evaluate.modes import modes_of


class QualityTab:
    """Redrawn when the rows change."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tab = tab = JobTab(
            "evaluation",
            "quality",
            "Evaluating",
            self._build_form,
            [("Evaluate", "evaluation-go")],
            ("evaluation-cancel", host.evaluator.cancel),
            self._build_answer,
        )
        self.alert = tab.alert
        answer = [self.empty, self.found, self.head, self.best.line, self.plot, self.table, *tab.starts]
        self.outputs = [tab.news, tab.alert, *answer]
        tab.on_news(self._renew, [], answer)
        tab.on_start(self._start)
        self.every.click(lambda: [mode.name for mode in modes_of()], None, self.modes, **ONCE)

    def _build_form(self) -> list[Component]:
        html(
            "<p class='minor'>The model answers questions and reads a text in every mode at every residency, "
            "each from the same fresh cache. Nothing else is answered until it is done; your "
            "settings are restored then.</p>"
        )
        known = modes_of()
        self.modes = gr.Dropdown(
            [(mode.title, mode.name) for mode in known],
            value=list(MODES),
            multiselect=True,
            label="Modes",
            elem_id="evaluation-modes",
            info="Lists of settings; all others are as in the sidebar. Exact is the reference for the others.",
        )
        self.every = button("All modes", "evaluation-all")
        self.residencies = gr.Textbox(
            RESIDENCIES,
            label="Residencies",
            max_lines=1,
            elem_id="evaluation-residencies",
            info="Shares of the experts in slots: .75, .5 or 75%, 50%.",
        )
        with gr.Row(elem_classes="pair"):
            self.questions = number(
                QUESTIONS, "Questions", "evaluation-questions", "From the demo model's own set.", min_width=110
            )
            self.tokens = number(TOKENS, "Text (tokens)", "evaluation-tokens", "For perplexity.", min_width=110)
        return [self.modes, self.residencies, self.questions, self.tokens]

    def _build_answer(self) -> None:
        self.empty = html(views.EMPTY, elem_id="evaluation-empty")
        with gr.Column(visible=False, elem_id="evaluation-found") as self.found:
            self.head = html(elem_id="evaluation-head")
            evaluator = self.host.evaluator
            self.best = BestLine(
                self.host, "evaluation-best", lambda: of_quality(evaluator.answer) if evaluator.answer else None
            )
            self.plot = plot("evaluation-plot")
            download("quality.csv", "evaluation")
            self.table = sortable("evaluation-table")

    def _start(self, modes: list[str], residencies: str, questions: float | None, tokens: float | None) -> None:
        self.host.evaluator.start(QualityForm(tuple(modes), residencies or "", whole(questions), whole(tokens)))

    def _renew(self, now: Shown, event: Renewed) -> list[Any]:
        """Redraw: the rows changed, a model was loaded or unloaded, or the page's colours changed."""
        answer = self.host.evaluator.answer
        cancelled = "Cancelled. Your settings are restored, and the results so far are shown."
        head = self.tab.head(now, event, self.host.evaluator.job, cancelled)
        ready = gr.update(interactive=self.host.models.model is not None)
        parts = None
        if answer is not None:
            plot = drawn(views.plot(answer, event.dark))
            parts = [views.summary(answer), self.best.value(), plot, views.listing(answer)]
        return [*head, *answered(parts, 4), ready]
