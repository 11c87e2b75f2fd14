"""Tab Calibrate: measure the loaded model, show the profile, delete it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.services.calibrator import Reading
from app.services.host import Host
from app.ui.carried import Renewed
from app.ui.controls import LIVE, ONCE, html, progress, whole
from app.ui.sidebar.text import notice
from app.ui.tabs import calibrate_figures as figures
from app.ui.tabs.calibrate_views import EMPTY, NO_MODEL, kind_choices, part_choices, question, rough, summary
from core.errors import MoestroError
from core.profile import PARTS, profile_path

TOKENS = 20_000  # default limit of tokens read

Shown = dict[str, Any]


class CalibrateTab:
    """The form on the left, the profile on the right. `news` redraws it when a job began or ended or a model was
    loaded.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Row(elem_id="calibrate", elem_classes="job-tab", equal_height=False):
            with gr.Column(scale=3, min_width=290, elem_classes="job-form"):
                self._build_form()
            with gr.Column(scale=9, min_width=320, elem_classes="job-answer"):
                self._build_answer()
        self.news = gr.HTML(
            {"stamp": "", "dark": True},
            html_template="",
            elem_classes="job-news",
            apply_default_css=False,
            js_on_load='import("/ui/jobs.js").then((m) => m.start(element, props, trigger, "calibration"));',
        )
        self.outputs = [
            self.news,
            self.alert,
            self.empty,
            self.found,
            self.head,
            self.confirm,
            self.question,
            self.counts,
            self.layer,
            self.pairs,
            self.entropy,
            self.recall,
            self.start,
            self.kinds,
        ]
        self._wire()

    def _build_form(self) -> None:
        html(
            "<p class='minor'>The model reads texts, exactly as it would in a chat, and what its routers do is "
            "written down. Chats have to wait meanwhile. Nothing leaves this machine.</p>"
        )
        self.kinds = gr.CheckboxGroup(kind_choices(0, 0), value=["bundled"], label="Read", elem_id="calibration-kinds")
        self.text = gr.Textbox("", label="Text", lines=4, max_lines=8, visible=False, elem_id="calibration-text")
        self.path = gr.Textbox(
            "",
            label="File or folder",
            max_lines=1,
            visible=False,
            elem_id="calibration-path",
            info="A text file, a .jsonl of texts or chats, a folder that is searched for them, or a trace.",
        )
        self.limit = gr.Number(
            TOKENS,
            label="At most (tokens)",
            precision=0,
            elem_id="calibration-limit",
            info="0 = everything. More tokens make steadier figures and take longer.",
        )
        self.parts = gr.CheckboxGroup(
            part_choices(),
            value=list(PARTS),
            label="Measure",
            elem_id="calibration-parts",
            info="What is not ticked stays as it was measured before.",
        )
        self.rough = html(elem_id="calibration-rough")
        self.alert = html(elem_id="calibration-alert")
        progress("Calibrating", elem_id="calibration-progress")
        with gr.Row(elem_classes="buttons"):
            self.start = gr.Button("Calibrate", variant="primary", size="sm", elem_id="calibration-go", min_width=80)
            self.cancel = gr.Button("Cancel", size="sm", elem_id="calibration-cancel", min_width=80)
        self.form = [self.kinds, self.parts, self.text, self.path, self.limit]

    def _build_answer(self) -> None:
        self.empty = html(EMPTY, elem_id="calibration-empty")
        with gr.Column(visible=False, elem_id="calibration-found") as self.found:
            self.head = html(elem_id="calibration-head")
            with gr.Row(elem_classes="buttons"):
                self.delete = gr.Button("Delete…", size="sm", elem_id="profile-delete", min_width=80, scale=0)
            with gr.Row(visible=False, elem_classes="confirm", elem_id="profile-confirm") as self.confirm:
                self.question = html()
                self.yes = gr.Button(
                    "Delete", variant="stop", size="sm", elem_id="profile-delete-yes", min_width=80, scale=0
                )
                self.no = gr.Button("Keep", size="sm", elem_id="profile-delete-no", min_width=80, scale=0)
            self.counts = gr.Plot(show_label=False, elem_id="profile-counts")
            with gr.Row(elem_classes="plots"):
                with gr.Column(min_width=320, elem_classes="with-slider"):
                    self.layer = gr.Slider(0, 1, value=0, step=1, label="Layer", elem_id="profile-layer", buttons=[])
                    self.pairs = gr.Plot(show_label=False, elem_id="profile-pairs")
                with gr.Column(min_width=320):
                    self.recall = gr.Plot(show_label=False, elem_id="profile-recall")
                    self.entropy = gr.Plot(show_label=False, elem_id="profile-entropy")

    def _wire(self) -> None:
        self.news.tick(self._renew, [self.news, self.layer], self.outputs, **LIVE)
        gr.on(
            [one.change if one in (self.kinds, self.parts) else one.blur for one in self.form],
            self._fields,
            self.form,
            [self.text, self.path, self.rough],
            **LIVE,
        )
        self.layer.release(self._layer, [self.news, self.layer], self.pairs, **LIVE)
        self.start.click(self._start, self.form, self.alert, **ONCE)
        self.cancel.click(self.host.calibrator.cancel, None, None, **ONCE)
        self.delete.click(self._ask, None, [self.confirm, self.question], **ONCE)
        self.no.click(lambda: gr.update(visible=False), None, self.confirm, **ONCE)
        self.yes.click(self._delete, None, [self.confirm, self.alert], **ONCE)

    def _fields(self, kinds: list[str], parts: list[str], text: str, path: str, limit: float | None) -> list[Any]:
        """The fields that the chosen kinds need, and the estimated duration."""
        reading, host = self._reading(kinds, parts, text, path, limit), self.host
        said = rough(host.calibrator.characters(reading), reading.limit, host.calibrator.speed(host.load_id), parts)
        return [
            gr.update(visible="text" in kinds),
            gr.update(visible="path" in kinds),
            f"<p class='minor'>{said}</p>" if kinds and parts else "",
        ]

    def _start(self, kinds: list[str], parts: list[str], text: str, path: str, limit: float | None) -> str:
        try:
            self.host.calibrate(self._reading(kinds, parts, text, path, limit))
        except MoestroError as error:
            return notice(str(error))
        return ""

    @staticmethod
    def _reading(kinds: list[str], parts: list[str], text: str, path: str, limit: float | None) -> Reading:
        return Reading(tuple(kinds), tuple(parts), text or "", path or "", whole(limit))

    def _ask(self) -> list[Any]:
        profile = self.host.profile
        return [gr.update(visible=profile is not None), question(profile) if profile is not None else ""]

    def _delete(self) -> list[Any]:
        try:
            self.host.delete_profile()
        except MoestroError as error:
            return [gr.update(visible=False), notice(str(error))]
        return [gr.update(visible=False), notice("The profile is deleted.", "info")]

    def _renew(self, now: Shown, layer: float, event: Renewed) -> list[Any]:
        """Redraw: a calibration began or ended, a model was loaded or unloaded, or the page's colours changed."""
        shown = {**now, "stamp": event.stamp, "dark": event.dark}
        host, job, profile = self.host, self.host.calibrator.job, self.host.profile
        said = ""
        if job is not None and job.finished and job.model == host.model:
            said = {
                "error": notice(job.error),
                "cancelled": notice(
                    "Cancelled. " + ("The profile is as it was." if profile else "Nothing was kept."), "info"
                ),
            }.get(job.state, "")
            said = said or notice(job.said, "info")
        said = said or notice(host.calibrator.problem)
        empty = NO_MODEL if host.model is None else EMPTY
        ready = gr.update(interactive=host.model is not None)
        kinds = gr.update(choices=kind_choices(*self._counts()))
        if profile is None:
            return [
                shown,
                said,
                gr.update(value=empty, visible=True),
                gr.update(visible=False),
                *[gr.skip()] * 8,
                ready,
                kinds,
            ]
        dark, at = shown["dark"], min(int(layer or 0), profile.layers - 1)
        path = profile_path(host.store.folder, profile.model_hash)
        plots = [
            figures.counts(profile, dark),
            figures.pairs(profile, at, dark),
            figures.entropy(profile, dark),
            figures.recall(profile, dark),
        ]
        drawn = [gr.update(value=plot, visible=plot is not None) for plot in plots]
        return [
            shown,
            said,
            gr.update(visible=False),
            gr.update(visible=True),
            summary(profile, path.stat().st_size if path.exists() else 0),
            gr.update(visible=False),
            "",
            drawn[0],
            gr.update(maximum=max(1, profile.layers - 1), value=at, visible=profile.pairs is not None),
            *drawn[1:],
            ready,
            kinds,
        ]

    def _layer(self, now: Shown, layer: float) -> Any:
        profile = self.host.profile
        return gr.skip() if profile is None else figures.pairs(profile, int(layer), bool(now["dark"]))

    def _counts(self) -> tuple[int, int]:
        """Numbers of chats and recorded tokens available for reading."""
        recorded = self.host.calibrator.traces(self.host.model_hash)
        return len(self.host.store.chats.all()), sum(trace.tokens for trace in recorded)
