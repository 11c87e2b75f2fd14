"""Sidebar, the preset menu: which published system the settings are, or which one they were and what was changed since.

The preset chosen last is remembered, so that after a knob was turned the menu says "Auto, changed: Prefetcher" and the
way back is one click.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.services.remembered import KNOBS
from app.ui.controls import html
from app.ui.sidebar.auto_note import account
from core.settings.config import Settings, params
from core.settings.param import Value
from core.settings.preset import Preset
from core.settings.presets import FIRST, PRESETS, matching, preset

CUSTOM = "custom"  # the choice while the settings match no preset
NAMED = 2  # changed settings that are named; of more, their number is


class PresetMenu:
    """Builds the menu where it is created. `values` fills `outputs`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        offered, chosen, text, back, possible = self._state()
        self.menu = gr.Dropdown(
            offered,
            value=chosen,
            label="Preset",
            info="Auto is what works nearly everywhere. The others are published systems, as values of the settings "
            "that Advanced shows. They apply at once, and you can change each of them.",
            filterable=False,
            interactive=True,
            elem_id="set-preset",
        )
        self.about = html(text, elem_id="about-preset")
        self.account = html(self.explained(), elem_id="auto-account")
        self.reset = gr.Button(back, size="sm", elem_id="reset-preset", visible=possible)
        self.outputs: list[Component] = [self.menu, self.about, self.account, self.reset]

    def values(self) -> list[Any]:
        """The menu, the description and the way back, for the settings in force."""
        offered, chosen, text, back, possible = self._state()
        return [
            gr.update(choices=offered, value=chosen),
            text,
            self.explained(),
            gr.update(value=back, visible=possible),
        ]

    def explained(self) -> str:
        """What Auto chose and why, as HTML."""
        return account(self.host, self.base().name)

    def choose(self, name: str) -> str:
        """Apply all of a preset's values or none; CUSTOM stands for the current settings. Returns the problem, or
        "".
        """
        if name == CUSTOM:
            return ""
        loaded, values = self.host.models.spec, dict(preset(name).values)
        if name == FIRST and loaded is not None and (budget := self.host.loader.safe_budget(loaded)):
            values["budget"] = budget
        problem = self.host.models.change_many(values, preset=name)
        if not problem and name == FIRST:
            self.host.auto.begun()
        return problem

    def base(self) -> Preset:
        """The preset that was chosen last; the first one, before any."""
        return preset(self.host.remembered.preset)

    def _state(self) -> tuple[list[tuple[str, str]], str, str, str, bool]:
        """The menu's choices, the chosen one, the description, the words of the reset button, and whether it shows."""
        settings, base, auto = self.host.models.settings, self.base(), self.host.remembered.auto
        if base.name == FIRST:  # what Auto chose itself is not a change
            settings = settings.with_({name: base.values[name] for name in auto & base.values.keys()})
        like = matching(settings)
        by_hand = [name for name in KNOBS if name not in auto] if FIRST in (base.name, like and like.name) else []
        first = [one for one in PRESETS if one.name == FIRST]
        known = [(one.title, one.name) for one in (*first, *(one for one in PRESETS if one.name != FIRST))]
        if like is not None and not (like.name == FIRST and by_hand):
            return [*known, ("Custom", CUSTOM)], like.name, about(like), "", False
        known_titles = params()
        turned = list(dict.fromkeys([*(known_titles[one].title for one in by_hand), *changed(base, settings)]))
        title = f"{base.title}, changed: {listed(turned)}"
        return [*known, (title, CUSTOM)], CUSTOM, about(base), f"Reset to {base.title}", True


def changed(base: Preset, settings: Settings, before: Mapping[str, Value] | None = None) -> list[str]:
    """The titles of the preset's settings that are not as in the preset, or as they were `before`."""
    known, were = params(), base.values if before is None else before
    return [known[name].title or name for name in base.values if settings[name] != were[name]]


def listed(titles: list[str]) -> str:
    """As many of them as are read at a glance."""
    return ", ".join(titles) if len(titles) <= NAMED else f"{titles[0]} and {len(titles) - 1} more"


def about(chosen: Preset) -> str:
    """Description and requirements of a preset."""
    return f'<p class="about">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'
