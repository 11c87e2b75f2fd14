"""What the tabs of long jobs share: the form with its start, progress, cancel and notice, and the result next to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.jobs import Job
from app.ui.controls import LIVE, ONCE, button, html, progress
from app.ui.event_data import Renewed
from app.ui.news import Shown, news, noticed
from app.ui.text import notice


class JobTab:
    """The form on the left, the result on the right. `news` triggers a redraw when the server has something newer."""

    def __init__(
        self,
        name: str,
        elem_id: str,
        doing: str,
        form: Callable[[], list[Component]],
        starts: Sequence[tuple[str, str]],
        cancel: tuple[str, Callable[[], None]],
        result: Callable[[], None],
        cancel_label: str = "Cancel",
    ) -> None:
        """`name` = of the job in the server's state, and the beginning of its elements' ids. `form` and `result` build
        the fields and the right side. `starts` = (label, element id) of the start buttons, the main one first;
        `cancel` = (element id, what it does).
        """
        with gr.Row(elem_id=elem_id, elem_classes="job-tab", equal_height=False):
            with gr.Column(scale=3, min_width=290, elem_classes="job-form"):
                self.form = form()
                self.alert = html(elem_id=f"{name}-alert")
                progress(doing, elem_id=f"{name}-progress")
                with gr.Row(elem_classes="buttons"):
                    self.starts = [
                        button(label, element, variant="secondary" if at else "primary")
                        for at, (label, element) in enumerate(starts)
                    ]
                    stop = button(cancel_label, cancel[0])
            with gr.Column(scale=9, min_width=320, elem_classes="job-answer"):
                result()
        self.news = gr.HTML(
            {"stamp": "", "dark": True, "notice": ""},
            html_template="",
            elem_classes="job-news",
            apply_default_css=False,
            js_on_load=f'import("/ui/jobs.js").then((m) => m.start(element, props, trigger, "{name}"));',
        )
        stop.click(cancel[1], None, None, **ONCE)

    def on_start(self, start: Callable[..., object]) -> None:
        """Call `start` with the form's values when the main button is pressed; its error is shown by the form."""
        self.starts[0].click(noticed(start), [self.news, *self.form], [self.news, self.alert], **ONCE)

    def on_news(self, renew: Callable[..., list[Any]], inputs: list[Component], outputs: list[Any]) -> None:
        """Call `renew(shown, *inputs, event)` for a redraw; it returns `head` and the values of `outputs`."""
        self.news.tick(renew, [self.news, *inputs], [self.news, self.alert, *outputs], **LIVE)

    def head(self, now: Shown, event: Renewed, job: Job | None, cancelled: str, otherwise: str = "") -> list[Any]:
        """The first values of a redraw: the page's state, and the notice on the end of `job`. `cancelled` = the
        notice on a cancelled one, `otherwise` = the notice when it was neither cancelled nor failed.
        """
        text = otherwise
        if job is not None and job.state == "error":
            text = notice(job.error)
        elif job is not None and job.state == "cancelled":
            text = notice(cancelled, "info")
        mark, update = news(now.get("notice", ""), job, text)
        return [{"stamp": event.stamp, "dark": event.dark, "notice": mark}, update]
