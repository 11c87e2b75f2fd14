"""Tab Calibrate: measure the loaded model, show the profile, delete it."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from itertools import chain
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.analysis.best import of_profile
from app.services.calibrator import Reading
from app.services.host import Host
from app.ui.best import BestLine
from app.ui.controls import LIVE, ONCE, button, change_events, control, drawn, html, number, plot, whole
from app.ui.event_data import Renewed
from app.ui.job_tab import JobTab
from app.ui.news import Shown
from app.ui.tabs import calibrate_figures as figures
from app.ui.tabs.calibrate_plan import PlanPanel
from app.ui.tabs.calibrate_views import EMPTY, NO_MODEL, kind_choices, part_choices, question, rough, summary
from app.ui.text import notice
from core.errors import MoestroError
from core.policy.substitute.list_lengths import ListRule
from core.profile import PARTS, profile_path
from core.settings.calibration import CalibrationSettings
from core.settings.param import declared

TOKENS = 20_000  # default limit of tokens read


class CalibrateTab:
    """Redrawn when a calibration began or ended, or a model was loaded."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tab = tab = JobTab(
            "calibration",
            "calibrate",
            "Calibrating",
            self._build_form,
            [("Calibrate", "calibration-go")],
            ("calibration-cancel", host.calibrator.cancel),
            self._build_answer,
        )
        self.alert = tab.alert
        answer = [
            self.empty,
            self.found,
            self.head,
            self.best.line,
            self.confirm,
            self.question,
            self.counts,
            self.layer,
            self.pairs,
            self.entropy,
            self.recall,
            self.measure,
            self.similarity,
            *self.plan.outputs,
            *tab.starts,
            self.kinds,
        ]
        self.outputs = [tab.news, tab.alert, *answer]
        tab.on_news(self._renew, [self.layer, self.measure], answer)
        tab.on_start(self._start)
        self._wire()

    def _build_form(self) -> list[Component]:
        html(
            "<p class='minor'>The model reads texts as it would in a chat, and its routing is measured. "
            "Nothing else is answered until it is done. Nothing leaves this machine.</p>"
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
        self.limit = number(
            TOKENS,
            "At most (tokens)",
            "calibration-limit",
            "0 = everything. More tokens give more reliable figures and take longer.",
        )
        self.parts = gr.CheckboxGroup(
            part_choices(),
            value=list(PARTS),
            label="Measure",
            elem_id="calibration-parts",
            info="Parts that are not ticked keep their earlier measurements.",
        )
        with gr.Accordion("How predictors are trained", open=False, elem_id="calibration-training") as self.training:
            self.settings = [
                control(replace(param, name=f"calibration.{name}"), param.default, simple=True)
                for name, param in declared(CalibrationSettings).items()
            ]
        self.rough = html(elem_id="calibration-rough")
        return [self.kinds, self.parts, self.text, self.path, self.limit, *self.settings]

    def _build_answer(self) -> None:
        self.empty = html(EMPTY, elem_id="calibration-empty")
        with gr.Column(visible=False, elem_id="calibration-found") as self.found:
            self.head = html(elem_id="calibration-head")
            models = self.host.models
            self.best = BestLine(
                self.host, "calibration-best", lambda: of_profile(models.profile) if models.profile else None
            )
            with gr.Row(elem_classes="buttons"):
                self.delete = button("Delete…", "profile-delete", scale=0)
            with gr.Row(visible=False, elem_classes="confirm", elem_id="profile-confirm") as self.confirm:
                self.question = html()
                self.yes = button("Delete", "profile-delete-yes", variant="stop", scale=0)
                self.no = button("Keep", "profile-delete-no", scale=0)
            self.plan = PlanPanel(self.host)
            self.counts = plot("profile-counts")
            with gr.Row(elem_classes="plots"):
                with gr.Column(min_width=320, elem_classes="with-slider"):
                    self.layer = gr.Slider(0, 1, value=0, step=1, label="Layer", elem_id="profile-layer", buttons=[])
                    self.pairs = plot("profile-pairs")
                with gr.Column(min_width=320):
                    self.measure = gr.Dropdown(
                        [(title, name) for name, title in figures.MEASURES.items()],
                        value="cosine",
                        label="Similarity",
                        filterable=False,
                        elem_id="profile-measure",
                    )
                    self.similarity = plot("profile-similarity")
            with gr.Row(elem_classes="plots"):
                self.recall = plot("profile-recall", min_width=320)
                self.entropy = plot("profile-entropy", min_width=320)

    def _wire(self) -> None:
        ticked = (self.kinds.change, self.parts.change)
        gr.on(
            [
                self.tab.news.tick,
                *ticked,
                self.text.blur,
                self.path.blur,
                self.limit.blur,
                *chain.from_iterable(map(change_events, self.settings)),
            ],
            self._fields,
            self.tab.form,
            [self.text, self.path, self.training, self.rough],
            **LIVE,
        )
        shown = [self.tab.news, self.layer, self.measure]
        self.layer.release(self._layer, shown, [self.pairs, self.similarity], **LIVE)
        self.measure.input(self._similarity, shown, self.similarity, **LIVE)
        self.plan.wire(self.tab.news)
        self.delete.click(self._ask, None, [self.confirm, self.question], **ONCE)
        self.no.click(lambda: gr.update(visible=False), None, self.confirm, **ONCE)
        self.yes.click(self._delete, None, [self.confirm, self.alert], **ONCE)

    def _fields(self, kinds: list[str], parts: list[str], *values: Any) -> list[Any]:
        """The fields that the chosen kinds and parts need, and the estimated duration and room on disk."""
        return [
            gr.update(visible="text" in kinds),
            gr.update(visible="path" in kinds),
            gr.update(visible=bool({"estimator", "path"} & set(parts))),
            f"<p class='minor'>{self._rough(kinds, parts, *values)}</p>" if kinds and parts else "",
        ]

    def _rough(self, kinds: list[str], parts: list[str], *values: Any) -> str:
        host = self.host
        try:
            reading = self._reading(kinds, parts, *values)
            characters = host.calibrator.characters(reading)
        except MoestroError as error:
            return escape(str(error))
        speed, shape = host.calibrator.speed(host.models.load_id), host.models.shape
        training = reading.settings if "estimator" in parts else None
        writing = reading.writing if "path" in parts else 0
        return rough(characters, reading.limit, speed, parts, training, shape, writing)

    def _start(self, *values: Any) -> None:
        self.host.calibrator.start(self._reading(*values))

    @staticmethod
    def _reading(
        kinds: list[str], parts: list[str], text: str, path: str, limit: float | None, *settings: Any
    ) -> Reading:
        """Raises SettingError for a value out of its bounds."""
        training = CalibrationSettings.checked(**dict(zip(declared(CalibrationSettings), settings, strict=True)))
        return Reading(tuple(kinds), tuple(parts), text or "", path or "", whole(limit), training)

    def _ask(self) -> list[Any]:
        profile = self.host.models.profile
        return [gr.update(visible=profile is not None), question(profile) if profile is not None else ""]

    def _delete(self) -> list[Any]:
        try:
            self.host.calibrator.delete()
        except MoestroError as error:
            return [gr.update(visible=False), notice(str(error))]
        return [gr.update(visible=False), notice("The profile is deleted.", "info")]

    def _renew(self, now: Shown, layer: float, measure: str, event: Renewed) -> list[Any]:
        """Redraw: a calibration began or ended, a model was loaded or unloaded, another measure of co-activation is
        set, or the page's colours changed."""
        host, job, profile = self.host, self.host.calibrator.job, self.host.models.profile
        if job is not None and not (job.finished and job.model == host.models.model):
            job = None  # no notice of it
        otherwise = notice(job.note, "info") if job is not None else ""
        cancelled = "Cancelled. " + ("The profile is unchanged." if profile else "Nothing was saved.")
        head = self.tab.head(now, event, job, cancelled, otherwise or notice(host.calibrator.problem))
        empty = NO_MODEL if host.models.model is None else EMPTY
        ready = gr.update(interactive=host.models.model is not None)
        kinds = gr.update(choices=kind_choices(*self._counts()))
        if profile is None:
            return [
                *head,
                gr.update(value=empty, visible=True),
                gr.update(visible=False),
                *[gr.skip()] * (11 + len(self.plan.outputs)),
                ready,
                kinds,
            ]
        dark, at = event.dark, min(int(layer or 0), profile.layers - 1)
        path, rule = profile_path(host.store.folder, profile.model_hash), ListRule.of(host.models.settings)
        plots = [
            figures.counts(profile, dark),
            figures.pairs(profile, at, dark),
            figures.entropy(profile, dark),
            figures.recall(profile, dark),
        ]
        shown = [*map(drawn, plots)]
        layered = profile.pairs is not None or profile.likeness is not None
        return [
            *head,
            gr.update(visible=False),
            gr.update(visible=True),
            summary(profile, path.stat().st_size if path.exists() else 0),
            self.best.value(),
            gr.update(visible=False),
            "",
            shown[0],
            gr.update(maximum=max(1, profile.layers - 1), value=at, visible=layered),
            *shown[1:],
            gr.update(visible=profile.likeness is not None and rule.pairs(profile) is not None),
            drawn(figures.similarity(profile, at, measure, rule, dark)),
            *self.plan.values({"dark": dark}),
            ready,
            kinds,
        ]

    def _layer(self, now: Shown, layer: float, measure: str) -> list[Any]:
        """The figures of another layer."""
        profile = self.host.models.profile
        if profile is None:
            return [gr.skip()] * 2
        return [figures.pairs(profile, int(layer), bool(now["dark"])), self._similarity(now, layer, measure)]

    def _similarity(self, now: Shown, layer: float, measure: str) -> Any:
        profile = self.host.models.profile
        if profile is None:
            return gr.skip()
        return figures.similarity(
            profile, int(layer), measure, ListRule.of(self.host.models.settings), bool(now["dark"])
        )

    def _counts(self) -> tuple[int, int]:
        """Numbers of chats and recorded tokens available for reading."""
        recorded = self.host.calibrator.traces(self.host.models.model_hash)
        return len(self.host.store.chats.all()), sum(trace.tokens for trace in recorded)
