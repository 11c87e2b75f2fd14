"""Sidebar, Cache and prefetch: presets, and every live setting of the registry, a variant's own while it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from app.controls import LIVE, control, html, turned
from app.host import Host
from app.sidebar.text import notice
from core.config import GENERAL, KINDS, Budget, params
from core.presets import PRESETS, Preset, matching, preset
from core.registry import Value, variant, variants

ADVANCED = {"scope", "layer_slots", "pins", "prefetch_deadline", "prefetch_auto", "link", "link_gbps",
            "link_latency_us", "telemetry", "regret", "regret_tokens"}
ONLY_WITH = {
    "layer_slots": ("scope", "layer"),
    "link_gbps": ("link", "emulated"),
    "link_latency_us": ("link", "emulated"),
    "regret_tokens": ("regret", True),
}  # without it they would do nothing
LOWEST, STEP = 5, 1  # of the budget slider, in percent
CUSTOM = "custom"  # settings that are no preset's


class CacheSection:
    """Builds the section; every control acts at once, also while tokens stream. `refit` judges the fit anew."""

    def __init__(self, host: Host, form: list[Component], fit: gr.HTML, refit: Callable[..., str]) -> None:
        self.host, self._form, self._fit, self._refit = host, form, fit, refit
        self._controls: dict[str, Component] = {}
        self._notes: dict[str, gr.HTML] = {}
        self._groups: dict[tuple[str, str], gr.Column] = {}
        with gr.Accordion("Cache and prefetch", open=True, elem_classes="section"):
            self.alert = html(elem_id="cache-alert")
            self._build_preset()
            for param in GENERAL:
                name = param.name
                if name == "budget":
                    self._build_budget()
                elif name in KINDS:
                    self._build_kind(name)
                else:
                    self._controls[name] = control(param, host.settings[name], advanced=name in ADVANCED)
                    self._controls[name].visible = self._matters(name)
        self.outputs: list[Component] = [
            self.alert,
            self.preset,
            self.about_preset,
            self.slider,
            self.exact_budget,
            *self._controls.values(),
            *self._notes.values(),
            *self._groups.values(),
        ]
        self._wire()

    def values(self) -> list[Any]:
        """Every control as the engine has it."""
        settings = self.host.settings
        percent, like = self._percent(), matching(settings)
        return [
            "",
            like.name if like is not None else CUSTOM,
            about(like),
            gr.skip() if percent is None else percent,
            str(settings["budget"]),
            *(gr.update(value=settings[name], visible=self._matters(name)) for name in self._controls),
            *(self._note(kind) for kind in self._notes),
            *(gr.update(visible=settings[kind] == name) for kind, name in self._groups),
        ]

    def _build_preset(self) -> None:
        like = matching(self.host.settings)
        self.preset = gr.Dropdown(
            [*((one.title, one.name) for one in PRESETS), ("Custom", CUSTOM)],
            value=like.name if like is not None else CUSTOM,
            label="Preset",
            info="A system of the literature as values of the settings below. They act at once, and each can be moved.",
            filterable=False,
            interactive=True,
            elem_id="set-preset",
        )
        self.about_preset = html(about(like), elem_id="about-preset")

    def _build_budget(self) -> None:
        param = params()["budget"]
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
            str(self.host.settings["budget"]),
            label="Budget, typed",
            max_lines=1,
            elem_id="set-budget-text",
            info="50%, all, 6.5GB or 800 MiB. Press Enter.",
        )

    def _build_kind(self, kind: str) -> None:
        chosen = str(self.host.settings[kind])
        titles = [(v.title, v.name) for v in variants(kind)]
        advanced, visible = kind in ADVANCED, self._matters(kind)
        self._controls[kind] = control(params()[kind], chosen, titles, advanced=advanced)
        self._notes[kind] = html(note(kind, chosen), elem_id=f"about-{kind}", advanced=advanced)
        self._controls[kind].visible = self._notes[kind].visible = visible
        for choice in variants(kind):
            if not choice.params:
                continue
            with gr.Column(
                visible=choice.name == chosen, elem_classes="own", elem_id=f"own-{kind}-{choice.name}"
            ) as group:
                for param in choice.params:
                    name = f"{kind}.{choice.name}.{param.name}"
                    full = params()[name]
                    self._controls[name] = control(_named(full, name), self.host.settings[name])
            self._groups[kind, choice.name] = group

    def _wire(self) -> None:
        budget = [self.exact_budget, self.alert, self.slider]
        moved = [
            self.slider.input(self._slide, self.slider, budget, **LIVE),
            gr.on([self.exact_budget.submit, self.exact_budget.blur], self._type, self.exact_budget, budget, **LIVE),
            self._fit.select(self._suggested, None, budget, **LIVE),
        ]
        for event in moved:  # the setting acts at once; the verdict, which takes longer, follows
            event.then(self._refit, self._form, self._fit, **LIVE)
        self.preset.input(self._choose_preset, self.preset, self.outputs, **LIVE)
        for name, made in self._controls.items():
            if name in KINDS:
                groups = [group for (kind, _), group in self._groups.items() if kind == name]
                made.input(self._choose(name), made, [self.alert, made, self._notes[name], *groups], **LIVE)
            else:
                names = [follower for follower, (leader, _) in ONLY_WITH.items() if leader == name]
                followers = [(f, part[f]) for part in (self._controls, self._notes) for f in names if f in part]
                gr.on(
                    turned(made),
                    self._turn(name, [follower for follower, _ in followers]),
                    [made, *self._form],
                    [made, self.alert, self._fit, *(part for _, part in followers)],
                    **LIVE,
                )

    def _choose_preset(self, name: str) -> list[Any]:
        """All of its values or none; "custom" is where the settings stand anyway."""
        problem = self.host.change_many(preset(name).values) if name != CUSTOM else ""
        return [notice(problem), *self.values()[1:]]

    def _slide(self, percent: float) -> list[Any]:
        typed, problem, _ = self._budget(f"{percent:g}%")
        return [typed, problem, self._percent() if problem else gr.skip()]

    def _type(self, text: str) -> list[Any]:
        return [gr.skip()] * 3 if text == self.host.settings["budget"] else self._budget(text)

    def _suggested(self, picked: gr.EventData) -> list[Any]:
        return self._budget(str(picked.budget))

    def _budget(self, text: str) -> list[Any]:
        if problem := self.host.change("budget", text):
            return [str(self.host.settings["budget"]), notice(problem), gr.skip()]
        percent = self._percent()
        return [str(self.host.settings["budget"]), "", gr.skip() if percent is None else percent]

    def _choose(self, kind: str) -> Callable[[str], list[Any]]:
        names = [name for group, name in self._groups if group == kind]

        def choose(chosen: str) -> list[Any]:
            problem = self.host.change(kind, chosen)
            now = str(self.host.settings[kind])
            shown = now if problem else gr.skip()
            return [notice(problem), shown, note(kind, now), *(gr.update(visible=name == now) for name in names)]

        return choose

    def _turn(self, name: str, followers: list[str]) -> Callable[..., list[Any]]:
        def turn(value: Value | None, *form: Any) -> list[Any]:
            problem = self.host.change(name, value)
            shown = self.host.settings[name] if problem else gr.skip()
            verdict = self._refit(*form) if name == "scope" else gr.skip()
            return [shown, notice(problem), verdict, *(gr.update(visible=self._matters(f)) for f in followers)]

        return turn

    def _note(self, kind: str) -> Any:
        return gr.update(value=note(kind, str(self.host.settings[kind])), visible=self._matters(kind))

    def _matters(self, name: str) -> bool:
        """Does this setting act, given the others?"""
        leader, value = ONLY_WITH.get(name, ("", ""))
        return not leader or self.host.settings[leader] == value

    def _percent(self) -> float | None:
        """Where the slider stands; None (leave it) when the budget is in bytes."""
        share = Budget.parse(str(self.host.settings["budget"])).share
        return None if share is None else round(share * 100, 1)


def note(kind: str, name: str) -> str:
    """What the chosen variant does and where it comes from."""
    chosen = variant(kind, name)
    return f'<p class="about">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'


def about(chosen: Preset | None) -> str:
    """What a preset is, and what it needs."""
    if chosen is None:
        return '<p class="about">Your own values.</p>'
    return f'<p class="about">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'


def _named(param: Any, name: str) -> Any:
    """The parameter under its full dotted name, for its element id."""
    return replace(param, name=name)
