"""Sidebar, Cache and prefetch: presets, the budget, and every live setting of the registry that keeps answers exact."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.ui.carried import BudgetPicked
from app.ui.controls import LIVE, html
from app.ui.sidebar.model import Card
from app.ui.sidebar.setting_controls import SettingControls
from core.settings.config import general
from core.settings.lossy import LossySettings
from core.settings.param import Param
from core.settings.presets import PRESETS, Preset, matching, preset

LOWEST, STEP = 5, 1  # of the budget slider, in percent
CUSTOM = "custom"  # shown when the settings match no preset


class CacheSection:
    """Builds the section; every control takes effect at once, also while tokens stream. `refit` estimates the fit
    again; `chosen` is the event of the preset menu, which also changes what other sections show.
    """

    def __init__(self, host: Host, form: list[Component], fit: gr.HTML, refit: Callable[..., Card]) -> None:
        self.host, self._form, self._fit, self._refit = host, form, fit, refit
        with gr.Accordion("Cache and prefetch", open=True, elem_classes="section"):
            self.alert = html(elem_id="cache-alert")
            self._build_preset()
            self._build_budget()
            self.setting_controls = SettingControls(host, [name for name in exact() if name != "budget"])
        self.outputs: list[Component] = [
            self.alert,
            self.preset,
            self.about_preset,
            self.slider,
            self.exact_budget,
            *self.setting_controls.outputs,
        ]
        self._wire()

    def values(self) -> list[Any]:
        """Every control with the engine's current value."""
        settings = self.host.models.settings
        percent, like = self._percent(), matching(settings)
        return [
            self.setting_controls.redrawn_notice(),
            like.name if like is not None else CUSTOM,
            about(like),
            gr.skip() if percent is None else percent,
            str(settings.cache.budget),
            *self.setting_controls.values(),
        ]

    def _build_preset(self) -> None:
        like = matching(self.host.models.settings)
        self.preset = gr.Dropdown(
            [*((one.title, one.name) for one in PRESETS), ("Custom", CUSTOM)],
            value=like.name if like is not None else CUSTOM,
            label="Preset",
            info="A published system, as values of the settings below and of Substitution. They apply at once, "
            "and you can change each of them.",
            filterable=False,
            interactive=True,
            elem_id="set-preset",
        )
        self.about_preset = html(about(like), elem_id="about-preset")

    def _build_budget(self) -> None:
        param = exact()["budget"]
        self.slider = gr.Slider(
            LOWEST,
            100,
            value=self._percent(),
            step=STEP,
            label="Budget (% of experts)",
            info=param.help,
            elem_id="set-budget",
            buttons=[],
        )
        self.exact_budget = gr.Textbox(
            str(self.host.models.settings.cache.budget),
            label="Exact budget",
            max_lines=1,
            elem_id="set-budget-text",
            info="50%, all, 6.5GB or 800 MiB. Press Enter.",
        )

    def _wire(self) -> None:
        budget = [self.exact_budget, self.alert, self.slider]
        moved = [
            self.slider.input(self._slide, self.slider, budget, **LIVE),
            gr.on([self.exact_budget.submit, self.exact_budget.blur], self._type, self.exact_budget, budget, **LIVE),
            self._fit.select(self._suggested, None, budget, **LIVE),
        ]
        for event in moved:  # the setting takes effect at once; the slower fit estimate follows
            event.then(self._refit, self._form, self._fit, **LIVE)
        self.chosen = self.preset.input(self._choose_preset, self.preset, self.outputs, **LIVE)
        turned = self.setting_controls.wire(self.alert)
        turned["scope"].then(self._refit, self._form, self._fit, **LIVE)

    def _choose_preset(self, name: str) -> list[Any]:
        """Apply all of a preset's values or none; "custom" stands for the current settings."""
        problem = self.host.models.change_many(preset(name).values) if name != CUSTOM else ""
        return [self.setting_controls.tell(problem), *self.values()[1:]]

    def _slide(self, percent: float) -> list[Any]:
        typed, problem, _ = self._budget(f"{percent:g}%")
        return [typed, problem, self._percent() if problem else gr.skip()]

    def _type(self, text: str) -> list[Any]:
        return [gr.skip()] * 3 if text == str(self.host.models.settings.cache.budget) else self._budget(text)

    def _suggested(self, picked: BudgetPicked) -> list[Any]:
        return self._budget(picked.budget)

    def _budget(self, text: str) -> list[Any]:
        if problem := self.host.models.change("budget", text):
            return [str(self.host.models.settings.cache.budget), self.setting_controls.tell(problem), gr.skip()]
        percent = self._percent()
        return [
            str(self.host.models.settings.cache.budget),
            self.setting_controls.tell(""),
            gr.skip() if percent is None else percent,
        ]

    def _percent(self) -> float | None:
        """The slider's position; None (leave it) when the budget is in bytes."""
        share = self.host.models.settings.cache.budget.share
        return None if share is None else round(share * 100, 1)


def exact() -> dict[str, Param]:
    """Every live setting that keeps answers exact."""
    return {name: param for name, param in general().items() if name not in general(LossySettings)}


def about(chosen: Preset | None) -> str:
    """Description and requirements of a preset."""
    if chosen is None:
        return '<p class="about">Your own settings.</p>'
    return f'<p class="about">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'
