"""Sidebar, Cache and prefetch: presets, the budget, and every live setting of the registry that keeps answers exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.ui.controls import LIVE, html
from app.ui.event_data import BudgetPicked, PresetPicked
from app.ui.sidebar.model import Card
from app.ui.sidebar.pcie_switch import PcieSwitch
from app.ui.sidebar.preset_menu import CUSTOM, PresetMenu
from app.ui.sidebar.setting_controls import SettingControls
from app.ui.sidebar.systems_menu import SystemsMenu
from app.wording import written
from core.errors import MoestroError, SettingError
from core.settings import config
from core.settings.config import general
from core.settings.lossy import LossySettings
from core.settings.param import Param
from core.settings.presets import PRESETS

LOWEST, STEP = 5, 1  # of the budget slider, in percent
FIND = (
    "<label class='find'>Find a setting<input type='search' id='find-setting' placeholder='Words of its name or help' "
    "autocomplete='off'></label><p class='minor' id='find-none' role='status' hidden>No setting has these words.</p>"
)


class CacheSection:
    """Builds the section; every control takes effect at once, also while tokens stream. `refit` estimates the fit
    again; `chosen` are the events of the preset menu, which also change what other sections show.
    """

    def __init__(self, host: Host, form: list[Component], fit: gr.HTML, refit: Callable[..., Card]) -> None:
        self.host, self._form, self._fit, self._refit = host, form, fit, refit
        with gr.Accordion("Cache and prefetch", open=True, elem_classes="section"):
            self.alert = html(elem_id="cache-alert")
            self.preset = PresetMenu(host)
            self.systems = SystemsMenu(host)
            html(FIND, advanced=True)  # /ui/sidebar.js hides what has not the words
            self._build_budget()
            self.pcie = PcieSwitch(host)
            self.setting_controls = SettingControls(host, sections())
        self.outputs: list[Component] = [
            self.alert,
            *self.preset.outputs,
            self.systems.lists,
            self.slider,
            self.exact_budget,
            self.pcie.box,
            *self.setting_controls.outputs,
        ]
        self._wire()

    def values(self) -> list[Any]:
        """Every control with the engine's current value."""
        settings, percent = self.host.models.settings, self._percent()
        return [
            self.setting_controls.redrawn_notice(),
            *self.preset.values(),
            self.systems.value(),
            gr.skip() if percent is None else percent,
            written(settings.cache.budget),
            self.pcie.value(),
            *self.setting_controls.values(),
        ]

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
            written(self.host.models.settings.cache.budget),
            label="Exact budget",
            max_lines=1,
            elem_id="set-budget-text",
            elem_classes=["advanced"],
            info="50%, all, 6.5GB or 800 MiB. Press Enter.",
        )

    def _wire(self) -> None:
        budget = [self.exact_budget, self.alert, self.slider]
        moved = [
            self.slider.input(self._slide, self.slider, budget, **LIVE),
            gr.on([self.exact_budget.submit, self.exact_budget.blur], self._type, self.exact_budget, budget, **LIVE),
            self._fit.select(self._suggested, self._form[0], budget, **LIVE),
            self.pcie.box.input(self._simulate, self.pcie.box, [self.alert, self.pcie.box], **LIVE),
        ]
        for event in moved:  # the setting takes effect at once; the slower fit estimate follows
            event.then(self._refit, self._form, self._fit, **LIVE)
        self.chosen = [
            self.preset.menu.input(self._choose_preset, self.preset.menu, self.outputs, **LIVE),
            self.systems.lists.select(self._pick_system, None, self.outputs, **LIVE),
            self.preset.reset.click(self._reset_preset, None, self.outputs, **LIVE),
        ]
        turned = self.setting_controls.wire(self.alert)
        turned["scope"].then(self._refit, self._form, self._fit, **LIVE)

    def _simulate(self, on: bool) -> list[Any]:
        problem = self.pcie.turn(on)
        return [self.setting_controls.notice(problem), self.pcie.value() if problem else gr.skip()]

    def _choose_preset(self, name: str) -> list[Any]:
        """Apply all of a preset's values or none; CUSTOM leaves the settings."""
        problem = self.preset.choose(name)
        return [self.setting_controls.notice(problem), *self.values()[1:]]

    def _pick_system(self, picked: PresetPicked) -> list[Any]:
        if picked.preset not in {one.name for one in PRESETS}:
            return [gr.skip()] * len(self.outputs)
        return self._choose_preset(picked.preset)

    def _reset_preset(self) -> list[Any]:
        base = self.preset.base()
        return self._choose_preset(base.name if base is not None else CUSTOM)

    def _slide(self, percent: float) -> list[Any]:
        typed, problem, _ = self._budget(f"{percent:g}%")
        return [typed, problem, self._percent() if problem else gr.skip()]

    def _type(self, text: str) -> list[Any]:
        return [gr.skip()] * 3 if text == written(self.host.models.settings.cache.budget) else self._budget(text)

    def _suggested(self, model: str, picked: BudgetPicked) -> list[Any]:
        start = self.host.models.start(model)
        if not start.own:
            return self._budget(picked.budget)
        problem = ""
        if not picked.budget:
            self.host.remembered.forget(model)
        else:
            try:
                self.host.remembered.keep(start.with_budget(picked.budget))
            except SettingError as error:
                problem = str(error)
        return [gr.skip(), self.setting_controls.notice(problem), gr.skip()]

    def _budget(self, text: str) -> list[Any]:
        if problem := self.host.models.change("budget", text):
            return [written(self.host.models.settings.cache.budget), self.setting_controls.notice(problem), gr.skip()]
        percent = self._percent()
        return [
            written(self.host.models.settings.cache.budget),
            self.setting_controls.notice(""),
            gr.skip() if percent is None else percent,
        ]

    def _percent(self) -> float | None:
        """The slider's position: of a budget in bytes the share of the experts that fit, as on the card; None (leave
        it) where that is not known."""
        share, spec = self.host.models.settings.cache.budget.share, self.host.models.spec
        if share is not None:
            return round(share * 100, 1)
        try:
            fit = self.host.loader.estimate(self.host.loader.plan(spec.model)) if spec is not None else None
        except MoestroError:
            return None
        return None if fit is None else min(100, max(LOWEST, round(100 * fit.slots / fit.shape.total)))


def sections() -> dict[str, list[str]]:
    """The accordions of Advanced: title -> settings, all that keep answers exact but the budget, which stands above."""
    exactly = [group for group in config.GROUPS if group is not LossySettings]
    return {group.TITLE: [name for name in general(group) if name != "budget"] for group in exactly}


def exact() -> dict[str, Param]:
    """Every live setting that keeps answers exact."""
    return {name: param for name, param in general().items() if name not in general(LossySettings)}
