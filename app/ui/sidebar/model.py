"""Sidebar, Model: what to load and how, the fit estimate before loading, load, cancel and unload."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from app.server.live_state import host_state
from app.services.candidates import MANIFEST, is_gone, is_pack
from app.services.host import Host
from app.ui.controls import LIVE, ONCE, WIDE, change_events, control, html
from app.ui.news import Shown, news
from app.ui.text import error_chip, fit_card, fit_chip, fit_error, least_memory, notice
from app.ui.top_bar import TopBar
from app.wording import name_of
from core.errors import MoestroError, NotImported
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.settings.presets import preset
from core.types import Fit

ONLY_PACKS = {"host"}  # choices without effect for other models
CHOICES = tuple(declared(LoadSpec).values())
MOST_CONTEXT = 8192  # maximum of the slider until a model's own limit is known
FALLBACK = {
    "reference": "The reference arithmetic computes this model: {}.",
    "fast_experts": "Only the experts of this model are computed in the fast arithmetic: {}.",
}
# The button inside the verdict: sends its budget to Python as event data. The verdict in few words is for the top bar.
FIT_JS = """element.addEventListener("click", (e) => {
  const button = e.target.closest("[data-budget]");
  if (button) trigger("select", {budget: button.dataset.budget}); });
import("/ui/top_bar.js").then((m) => m.follow(props, watch));"""

# What a model restricts: the "format" that a pack fixes ("" = no pack), the limit of the "context" (0 = unknown).
Limits = dict[str, Any]
# The verdict as the value of its component: its "html", the same in few words ("chip"), the "limits", and what it is
# "of" (form, settings and model).
Card = dict[str, Any]


class ModelSection:
    """Builds the section inside the sidebar; `outputs` and `values()` show the host's state.

    Answers of the server may overtake each other, so what several events show is kept right by what each brings along:
    - the verdict says what it is of, and the form is judged again when it shows something else (`_settle`);
    - status and notice come with the page's stamps (`known`) as they were when the event began: a late answer brings
      back old ones, upon which the page asks for a redraw.
    """

    def __init__(self, host: Host, known: gr.HTML) -> None:
        """`known` = the page's state: the stamps of the host that it shows, and the last notice of a load."""
        self.host, self.known = host, known
        with gr.Accordion("Model", open=True, elem_classes="section"):
            self.status = html(elem_id="model-status")
            spec = self._offered()
            self.bar = TopBar(self._models(spec), spec.model)
            self.model = self.bar.model
            self.choices: list[Component] = []
            for param, value in zip(CHOICES, self._chosen(spec), strict=True):
                made = self._context(value) if param.name == "context" else control(param, value)
                made.visible = param.name not in ONLY_PACKS or is_pack(spec.model)
                self.choices.append(made)
            self.fit = gr.HTML(
                self.refit(spec.model, *self._chosen(spec)),
                html_template="${value.html}",
                elem_id="fit",
                apply_default_css=False,
                js_on_load=FIT_JS,
            )
            self.target = gr.Number(
                0,
                label="Time per token (ms)",
                minimum=0,
                elem_id="fit-target",
                elem_classes="advanced",
                info="Finds the smallest budget predicted to meet this time per token; 0 = off.",
            )
            self.needed = html(elem_id="fit-needed", advanced=True)
            self.limits = gr.HTML(
                self.fit.value["limits"], html_template="", elem_id="fit-limits", apply_default_css=False
            )
            html('<p class="importing" data-import="line" hidden></p>', elem_id="import-line")
        self.form = [self.model, *self.choices]
        self.form_outputs = [*self.form, self.limits]
        self.outputs = [self.known, self.status, self.bar.alert]
        self._wire()

    def values(self, known: Shown) -> list[Any]:
        """The loaded model, and the outcome of the last load when that is news to the page."""
        stamp, loading = host_state(self.host)["stamp"], self.host.loader.loading  # the stamp first: never too new
        text = loading.error or loading.text if loading is not None and loading.state in ("error", "cancelled") else ""
        kind = "error" if loading is not None and loading.state == "error" else "info"
        mark, update = news(known.get("loaded", ""), loading, notice(text, kind))
        return [{**known, "stamp": stamp, "loaded": mark}, self._status(), update]

    def form_values(self, spec: LoadSpec | None = None) -> list[Any]:
        """The form's values for `spec`, or as last used when a page opens. Outputs: `form_outputs`."""
        spec = spec or self._offered()
        values = self._chosen(spec)
        limits = self.refit(spec.model, *values)["limits"]
        return [
            gr.update(choices=self._models(spec), value=spec.model),
            *(
                gr.update(value=value, **change)
                for value, change in zip(values, self._changes(limits, *values), strict=True)
            ),
            limits,
        ]

    def refit(self, *form: Any) -> Card:
        """The fit verdict on the form's values, with the current settings."""
        of, fit = self._of(form), self._fit(*form)  # what it is of first: never too new
        if not isinstance(fit, Fit):
            source = str(form[0]).strip() if isinstance(fit, NotImported) else ""
            return {
                "of": of,
                "html": fit_error(str(fit), source),
                "chip": error_chip(source),
                "limits": {"format": "", "context": 0},
            }
        limits = {"format": fit.format if is_pack(fit.model) else "", "context": fit.context_limit}
        start = self.host.models.start(fit.model)
        budget, auto = str(start.spec.settings.cache.budget), "budget" in start.auto
        own = preset(start.preset).title if start.own else ""
        card = fit_card(fit, budget, auto, self._is_loaded(*form), own)
        return {"of": of, "html": card, "chip": fit_chip(fit, auto), "limits": limits}

    def offer(self, model: str) -> Any:
        """The menu of models as they are now; a chosen `model` whose folder is gone is replaced by another."""
        spec = self._offered()
        return gr.update(choices=self._models(spec), **({"value": spec.model} if is_gone(model) else {}))

    def open(self, path: str, known: Shown) -> list[Any]:
        """Start loading the model at a path and show it in the form; returns the values of `opened`. Raises
        MoestroError.
        """
        spec = self.host.loader.plan(path)
        self.host.loader.load(spec)
        return [known, self._status(), "", *self.form_values(spec)]

    @property
    def opened(self) -> list[Component]:
        """The components that `open` updates."""
        return [*self.outputs, *self.form_outputs]

    def _wire(self) -> None:
        self.model.input(self._recall, self.model, [self.bar.alert, *self.choices], **LIVE)
        gr.on([self.model.change, *(c.change for c in self.choices)], self.refit, self.form, self.fit, **LIVE)
        self.fit.change(self._settle, [self.fit, *self.form], [self.fit, self.limits], **LIVE)
        self.limits.change(self._restrict, [self.limits, *self.choices], self.choices, **LIVE)
        triggers = [*change_events(self.target), self.model.change, *(c.change for c in self.choices)]
        gr.on(triggers, self._needed, [self.target, *self.form], self.needed, **LIVE)
        self.bar.load.click(self._load, [self.known, *self.form], [*self.outputs, self.model], **ONCE)
        self.bar.cancel.click(self._cancel, None, None, **ONCE)
        self.bar.unload.click(self._unload, self.known, self.outputs, **ONCE)

    def _recall(self, model: Any) -> list[Any]:
        """A model was chosen: what was said of another one goes; its loading choices and settings of the last time."""
        path = str(model or "").strip()
        self.host.models.recall(path)
        own = self.host.remembered.of(path)
        return ["", *(self._chosen(own.spec) if own is not None else [gr.skip()] * len(self.choices))]

    def _settle(self, card: Card, *form: Any) -> list[Any]:
        """Another verdict is shown: its limits hold. One that is not of this form, from an answer that was overtaken,
        is judged again.
        """
        if card["of"] == self._of(form):
            return [gr.skip(), card["limits"]]
        right = self.refit(*form)
        return [right, right["limits"]]

    def _restrict(self, limits: Limits, *choices: Any) -> list[Any]:
        """Other limits hold."""
        return [gr.update(**change) if change else gr.skip() for change in self._changes(limits, *choices)]

    def _fit(self, model: Any, *choices: Any) -> Fit | MoestroError:
        """The estimate, or the error that prevents it."""
        try:
            return self.host.loader.estimate(self._spec(model, *choices))
        except MoestroError as error:
            return error

    def _needed(self, tpot_ms: float | None, model: Any, *choices: Any) -> str:
        """The least memory for a time per token, in words."""
        if not tpot_ms or tpot_ms <= 0:
            return ""
        try:
            found = self.host.loader.least_memory(self._spec(model, *choices), float(tpot_ms))
        except MoestroError as error:
            return notice(str(error))
        return least_memory(found, float(tpot_ms))

    def _of(self, form: Sequence[Any]) -> str:
        """What a verdict on this form depends on, briefly."""
        models, auto = self.host.models, self.host.remembered.auto
        own = self.host.remembered.of(str(form[0] or ""))
        kept = (*own.spec.settings.items(), *sorted(own.auto)) if own is not None else ()
        return f"{hash((*form, *models.settings.items(), models.load_id, *sorted(auto), *kept)):x}"

    def _is_loaded(self, *form: Any) -> bool:
        """Whether the form's choices are those of the loaded model."""
        loaded = self.host.models.spec
        return loaded is not None and self._spec(*form).describe() == loaded.describe()

    def _changes(self, limits: Limits, *choices: Any) -> list[dict[str, Any]]:
        """The update of each choice: a pack fixes the format, the context slider ends at the model's own limit."""
        changes: list[dict[str, Any]] = []
        pack = limits["format"]
        for param, value in zip(CHOICES, choices, strict=True):
            if param.name == "format":
                names = [(f"{pack} (fixed by the pack)", value)] if pack else [(n, n) for n in param.choices]
                changes.append({"choices": names, "interactive": not pack})
            elif param.name in ONLY_PACKS:
                changes.append({"visible": bool(pack)})
            elif param.name == "context" and limits["context"]:
                changes.append({"maximum": limits["context"]})
            else:
                changes.append({})
        return changes

    def _spec(self, model: Any, *choices: Any) -> LoadSpec:
        values = {p.name: v for p, v in zip(CHOICES, choices, strict=True) if v is not None}
        return self.host.loader.plan(str(model or "").strip() or "demo", **values)

    def _load(self, known: Shown, *form: Any) -> list[Any]:
        try:
            self.host.loader.load(spec := self._spec(*form))
        except MoestroError as error:
            return [known, gr.skip(), notice(str(error)), gr.skip()]
        return [known, self._status(), "", gr.update(choices=self._models(spec))]

    def _cancel(self) -> None:
        self.host.loader.cancel()

    def _unload(self, known: Shown) -> list[Any]:
        try:
            self.host.models.unload()
        except MoestroError as error:
            return [known, gr.skip(), notice(str(error))]
        return [known, self._status(), ""]

    def _status(self) -> str:
        spec, loading = self.host.models.spec, self.host.loader.loading
        arithmetic = self.host.models.arithmetic
        if loading is not None and not loading.finished:
            return f'<div class="status loading"><i></i>Loading <b>{escape(name_of(loading.model))}</b></div>'
        if spec is None:
            return '<div class="status" data-without="model"><i></i>No model loaded. Choose one, then press Load.</div>'
        return (
            f'<div class="status ready" data-load="{self.host.models.load_id}"><i></i>'
            f'<b title="{escape(spec.model)}">{escape(name_of(spec.model))}</b> '
            f"{escape(self.host.models.format)}, context {self.host.models.context}</div>"
            + (
                notice(FALLBACK[arithmetic["arithmetic"]].format(arithmetic["fallback"]), "info")
                if arithmetic["fallback"]
                else ""
            )
        )

    def _offered(self) -> LoadSpec:
        """The spec that the form shows when a page opens: the loaded model, the failed load, or the last one loaded, if
        it is still there."""
        loading, last = self.host.loader.loading, self.host.loader.last_spec()
        return (
            self.host.models.spec
            or (self.host.loader.plan(loading.model) if loading is not None and loading.state != "done" else None)
            or (last if last is not None and not is_gone(last.model) else None)
            or self.host.loader.plan("demo")
        )

    def _chosen(self, spec: LoadSpec) -> list[Any]:
        return [str(getattr(spec, p.name)) if p.type == "choice" else getattr(spec, p.name) for p in CHOICES]

    def _models(self, spec: LoadSpec) -> list[tuple[str, str]]:
        """The menu of models: the demo, recently loaded ones, and the packs in their default folder."""
        packs = sorted(str(found.parent) for found in self.host.library.packs.glob(f"*/{MANIFEST}"))
        recent = [one for one in self.host.remembered.recent if not is_gone(one)]
        known = dict.fromkeys(["demo", spec.model, *recent, *packs])
        return [(name_of(model), model) for model in known]

    def _context(self, value: int) -> gr.Slider:
        param = declared(LoadSpec)["context"]
        return gr.Slider(
            0,
            max(MOST_CONTEXT, value),
            value=value,
            step=param.step,
            label=f"{param.title} ({param.unit})",
            info=param.help,
            elem_id="set-context",
            elem_classes=["advanced", WIDE],
            buttons=[],
        )
