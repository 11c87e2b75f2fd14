"""Sidebar, Model: what to load and how, whether it fits before it is loaded, load, cancel and unload."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Component

from app.controls import LIVE, ONCE, control, html
from app.host import Host
from app.sidebar.text import fit_card, fit_error, notice
from core.config import LOADING, LoadSpec
from core.errors import MoestroError

ADVANCED = {"dtype", "device", "threads"}
MOST_CONTEXT = 8192  # top of the slider until a model's own limit is known
RECENT = 8
PROGRESS = (
    '<div class="progress"><div class="track" role="progressbar" aria-label="Loading the model" aria-valuemin="0" '
    'aria-valuemax="100" aria-valuenow="0"><i></i></div><span>Starting…</span></div>'
)


class ModelSection:
    """Builds the section inside the sidebar; `outputs` and `values()` show the state of the host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Accordion("Model", open=True, elem_classes="section"):
            self.status = html(self._status(), elem_id="model-status")
            spec = self._offered()
            self.model = gr.Dropdown(
                self._models(spec),
                value=spec.model,
                label="Model",
                allow_custom_value=True,
                elem_id="model",
                info="The bundled demo, or type a folder with config.json and safetensors.",
            )
            self.choices: list[Component] = []
            for param in LOADING:
                value = getattr(spec, param.name)
                self.choices.append(
                    self._context(value)
                    if param.name == "context"
                    else control(param, value, advanced=param.name in ADVANCED)
                )
            self.fit = html(self._estimate(spec.model, *self._chosen(spec))[0], elem_id="fit")
            self.alert = html(elem_id="model-alert")
            html(PROGRESS, elem_id="load-progress")
            with gr.Row(elem_classes="buttons"):
                self.load = gr.Button("Load", variant="primary", size="sm", elem_id="load", min_width=80)
                self.cancel = gr.Button("Cancel loading", size="sm", elem_id="cancel-load", min_width=80)
                self.unload = gr.Button("Unload", size="sm", elem_id="unload", min_width=80)
        self.form = [self.model, *self.choices]
        self.outputs = [self.status, self.alert]
        self._wire()

    def values(self) -> list[Any]:
        """What is loaded, and how the last load ended."""
        loading = self.host.loading
        said = loading.error or loading.text if loading is not None and loading.state in ("error", "cancelled") else ""
        return [self._status(), notice(said, "error" if loading is not None and loading.state == "error" else "info")]

    def form_values(self) -> list[Any]:
        """The form as it was last used: for a page that opens."""
        spec = self._offered()
        return [
            gr.update(choices=self._models(spec), value=spec.model),
            *(gr.update(value=value) for value in self._chosen(spec)),
        ]

    def refit(self, *form: Any) -> str:
        """The verdict on the form as it stands, with the settings of now."""
        return self._estimate(*form)[0]

    def _wire(self) -> None:
        gr.on(
            [self.model.change, *(c.change for c in self.choices)],
            self._judge,
            self.form,
            [self.fit, *self.choices],
            **LIVE,
        )
        self.load.click(self._load, self.form, [self.status, self.alert, self.model], **ONCE)
        self.cancel.click(self._cancel, None, None, **ONCE)
        self.unload.click(self._unload, None, self.outputs, **ONCE)

    def _judge(self, *form: Any) -> list[Any]:
        """The verdict; the context slider reaches the model's own limit."""
        html, limit = self._estimate(*form)
        updates: list[Any] = []
        for param in LOADING:
            if param.name == "context" and limit:
                updates.append(gr.update(maximum=limit))
            else:
                updates.append(gr.skip())
        return [html, *updates]

    def _estimate(self, model: Any, *choices: Any) -> tuple[str, int]:
        try:
            fit = self.host.estimate(self._spec(model, *choices))
        except MoestroError as error:
            return fit_error(str(error)), 0
        return fit_card(fit), fit.context_limit

    def _spec(self, model: Any, *choices: Any) -> LoadSpec:
        values = {p.name: v for p, v in zip(LOADING, choices, strict=True) if v is not None}
        return self.host.plan(str(model or "").strip() or "demo", **values)

    def _load(self, *form: Any) -> list[Any]:
        try:
            spec = self._spec(*form)
            self.host.load(spec)
        except MoestroError as error:
            return [gr.skip(), notice(str(error)), gr.skip()]
        self._remember(spec.model)
        return [self._status(), "", gr.update(choices=self._models(spec))]

    def _cancel(self) -> None:
        self.host.cancel_load()

    def _unload(self) -> list[Any]:
        try:
            self.host.unload()
        except MoestroError as error:
            return [gr.skip(), notice(str(error))]
        return [self._status(), ""]

    def _status(self) -> str:
        spec, loading = self.host.spec, self.host.loading
        if loading is not None and not loading.finished:
            return f'<div class="status loading"><i></i>Loading <b>{escape(name_of(loading.model))}</b></div>'
        if spec is None:
            return '<div class="status empty"><i></i>No model loaded. Choose one, then press Load.</div>'
        return (
            f'<div class="status ready"><i></i><b title="{escape(spec.model)}">{escape(name_of(spec.model))}</b> '
            f"{escape(spec.format)}, context {self.host.context}</div>"
        )

    def _offered(self) -> LoadSpec:
        """What the form shows when a page opens: what is loaded, what could not be loaded, or what was loaded last."""
        failed = self.host.loading.model if self.host.loading is not None and self.host.spec is None else ""
        return (
            self.host.spec
            or (self.host.plan(failed) if failed else None)
            or self.host.last_spec()
            or self.host.plan("demo")
        )

    def _chosen(self, spec: LoadSpec) -> list[Any]:
        return [str(getattr(spec, p.name)) if p.type == "choice" else getattr(spec, p.name) for p in LOADING]

    def _models(self, spec: LoadSpec) -> list[tuple[str, str]]:
        known = dict.fromkeys(["demo", spec.model, *(self.host.store.db.get("recent") or [])])
        return [(name_of(model), model) for model in known]

    def _remember(self, model: str) -> None:
        recent = [m for m in self.host.store.db.get("recent") or [] if m not in (model, "demo")]
        if model != "demo":
            self.host.store.db.put("recent", [model, *recent][:RECENT])

    def _context(self, value: int) -> gr.Slider:
        param = next(p for p in LOADING if p.name == "context")
        return gr.Slider(
            0,
            max(MOST_CONTEXT, value),
            value=value,
            step=param.step,
            label=f"{param.title} ({param.unit})",
            info=param.help,
            elem_id="set-context",
            buttons=[],
        )


def name_of(model: str) -> str:
    """How a model is called on screen: the demo, or the last part of its path."""
    return "Demo model (bundled)" if model == "demo" else Path(model).name or model
