"""Tab Batch: answers a file of prompts with the loaded model, many at a time."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.server.v1.batch import ByEngine
from app.services.batcher import MOST, BatchForm
from app.services.host import Host
from app.ui.controls import answered, drawn, html, number, plot, whole
from app.ui.event_data import Renewed
from app.ui.job_tab import JobTab
from app.ui.news import Shown
from app.ui.tabs import batch_views as views
from core.engine.batch_request import BATCH
from core.settings.registry import variants


class BatchTab:
    """Redrawn while a batch runs, every second."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tab = tab = JobTab(
            "batch",
            "batch",
            "Answering",
            self._build_form,
            [("Run batch", "batch-go")],
            ("batch-cancel", host.batcher.stop),
            self._build_answer,
            cancel_label="Stop",
        )
        answer = [self.empty, self.found, self.cards, self.plot, self.latest, self.about, *tab.starts]
        self.outputs = [tab.news, tab.alert, *answer]
        tab.on_news(self._renew, [], answer)
        tab.on_start(self._start)

    def _build_form(self) -> list[Component]:
        html(
            "<p class='minor'>The model answers nothing else until the batch ends; settings can be changed. Missing "
            "options use the sidebar's values.</p>"
        )
        html(
            "<p class='minor'>A file of at most 64 MB, one JSON object per line: OpenAI's batch lines, "
            '<code>{"messages": [...]}</code> or <code>{"prompt": "..."}</code>. The same file continues where '
            "its last run ended.</p>"
        )
        self.upload = gr.File(
            label="A file of prompts", show_label=False, file_types=[".jsonl"], height=118, elem_id="batch-upload"
        )
        self.retry = gr.Checkbox(False, label="Retry failed lines", elem_id="batch-retry", container=False)
        with gr.Accordion("How many at a time", open=False, elem_id="batch-how"):
            self.at_once = number(
                BATCH,
                "At a time",
                "batch-at-once",
                "Prompts that are answered together, as far as the KV memory has room: more of it with a longer "
                "context or more parallel requests when the model is loaded.",
                minimum=1,
                maximum=MOST,
            )
            known = variants("scheduler")
            self.scheduler = gr.Dropdown(
                [(one.title, one.name) for one in known],
                value="none",
                label="Scheduler",
                filterable=False,
                elem_id="batch-scheduler",
                info="Twice as many prompts are at work, in two batches that are divided anew for every token, so that "
                "those that need the same experts are computed together. None: one batch.",
            )
            self.pipelined = gr.Checkbox(
                False,
                label="Divide during the computation",
                elem_id="batch-pipelined",
                info="With a scheduler: four batches are at work, and two are divided while the others are computed.",
            )
        return [self.upload, self.at_once, self.scheduler, self.pipelined, self.retry]

    def _build_answer(self) -> None:
        self.empty = html(views.EMPTY, elem_id="batch-empty")
        with gr.Column(visible=False, elem_id="batch-found") as self.found:
            self.cards = html(elem_id="batch-cards")
            self.about = html(elem_id="batch-about")
            html(
                "<a href='/export/batch.jsonl' download id='batch-answers'>Download the answers</a>",
                elem_id="batch-link",
            )
            self.plot = plot("batch-plot")
            self.latest = html(elem_id="batch-latest")

    def _start(self, upload: str | None, at_once: float | None, scheduler: str, pipelined: bool, retry: bool) -> None:
        form = BatchForm(upload or "", whole(at_once), scheduler, pipelined, retry)
        self.host.batcher.start(form, ByEngine)

    def _renew(self, now: Shown, event: Renewed) -> list[Any]:
        """Redraw: answers came, a model was loaded or unloaded, or the page's colours changed."""
        job = self.host.batcher.job
        head = self.tab.head(now, event, job, "Stopped. Press Run batch again to go on.")
        ready = gr.update(interactive=self.host.models.model is not None)
        parts = None
        if job is not None and job.answered is not None:
            parts = [views.cards(job), drawn(views.plot(job, event.dark)), views.latest(job), views.about(job)]
        return [*head, *answered(parts, 4), ready]
