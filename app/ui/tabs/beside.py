"""Tab Analysis, section A beside B: one question under two settings."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.comparer import NOW, PLAIN, SidesQuestion
from app.services.host import Host
from app.ui.controls import LIVE, answered, button, download, drawn, html, number, plot, whole
from app.ui.event_data import Renewed
from app.ui.job_tab import JobTab
from app.ui.news import Shown
from app.ui.tabs import beside_views as views
from core.measure.evaluate.sides import ROUNDS, TOKENS

QUESTION = "Which sights of a city by the sea are worth a day, and why?"
CANCELLED = "Cancelled. Your settings are restored, and the last result is still shown."


class BesideTab:
    """Redrawn when a comparison ends, or settings are kept for one."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tab = tab = JobTab(
            "beside",
            "beside",
            "Comparing",
            self._build_form,
            [("Compare", "beside-go")],
            ("beside-cancel", host.comparer.cancel),
            self._build_answer,
        )
        answer = [self.a, self.b, self.empty, self.found, self.head, self.plot, self.table, *tab.starts]
        tab.on_news(self._renew, [], answer)
        tab.on_start(self._start)
        self.keep.click(host.comparer.keep, None, None, **LIVE)

    def _build_form(self) -> list[Component]:
        html(
            "<p class='minor'>A's answer is decoded again under A and under B, by turns, each time from the cache as "
            "after a load: the same tokens, so that all that differs is what the settings do. Nothing else is answered "
            "until it is done; your settings are restored then.</p>"
        )
        self.question = gr.Textbox(QUESTION, label="Question", lines=2, max_lines=6, elem_id="beside-question")
        offered = self.host.comparer.choices()
        info = "A preset is compared at the memory budget in force."
        self.a = gr.Dropdown(offered, value=NOW, label="A", filterable=False, elem_id="beside-a", info=info)
        self.b = gr.Dropdown(
            offered,
            value=PLAIN,
            label="B",
            filterable=False,
            elem_id="beside-b",
            info="Or keep the sidebar's settings, change them there, and compare the kept ones with the new ones.",
        )
        self.keep = button("Keep the sidebar's settings", "beside-keep")
        with gr.Row(elem_classes="pair"):
            self.tokens = number(TOKENS, "Tokens", "beside-tokens", "Of the answer.", min_width=110)
            self.rounds = number(ROUNDS, "Rounds", "beside-rounds", "Times are medians.", min_width=110)
        return [self.question, self.a, self.b, self.tokens, self.rounds]

    def _build_answer(self) -> None:
        self.empty = html(views.EMPTY, elem_id="beside-empty")
        with gr.Column(visible=False, elem_id="beside-found") as self.found:
            self.head = html(elem_id="beside-head")
            self.plot = plot("beside-plot")
            download("beside.csv", "beside")
            self.table = html(elem_id="beside-table")

    def _start(self, question: str, a: str, b: str, tokens: float | None, rounds: float | None) -> None:
        self.host.comparer.start(SidesQuestion(question or "", a, b, whole(tokens), whole(rounds)))

    def _renew(self, now: Shown, event: Renewed) -> list[Any]:
        """Redraw: a result, a model was loaded or unloaded, or the page's colours changed."""
        comparer = self.host.comparer
        head = self.tab.head(now, event, comparer.job, CANCELLED)
        sides = [gr.update(choices=comparer.choices())] * 2
        ready = gr.update(interactive=self.host.models.model is not None)
        parts = None
        if (answer := comparer.answer) is not None:
            parts = [views.summary(answer), drawn(views.plot(answer, event.dark)), views.listing(answer)]
        return [*head, *sides, *answered(parts, 3), ready]
