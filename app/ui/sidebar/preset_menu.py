"""Sidebar, the preset menu: which preset the settings are, or which one they were and what was changed since.

The preset chosen last is remembered, so that after a knob was turned the menu says "Auto, changed", the line below it
what was, and the way back is one click. Published systems have lists of their own, to which the last choice leads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.services.remembered import KNOBS
from app.ui.controls import EACH, html
from app.ui.sidebar.auto_note import account
from core.settings.config import Settings, params
from core.settings.param import Value
from core.settings.preset import Preset
from core.settings.presets import FIRST, PRESETS, matching, preset

CUSTOM = "custom"  # the last choice: what is in force where that is none of ours, else LISTS; it changes nothing
LISTS = "Published systems…"  # leads to them
NAMED = 4  # changed settings that are named; of more, their number is
SHOW_JS = f"""() => {{
  if (document.querySelector("#set-preset input").value === "{LISTS}") import("/ui/systems.js").then((m) => m.show());
}}"""


class PresetMenu:
    """Builds the menu where it is created. `values` fills `outputs`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        offered, chosen, text, back, possible = self._state()
        self.menu = gr.Dropdown(
            offered,
            value=chosen,
            label="Preset",
            info="Auto is what works nearly everywhere. A preset is values of the settings that Advanced shows: they "
            "apply at once, and you can change each of them. The last choice leads to the published systems.",
            filterable=False,
            interactive=True,
            elem_id="set-preset",
        )
        # An event of its own, as what the choice changes may have to wait for the answer to the one before.
        self.menu.select(None, self.menu, None, js=SHOW_JS, **EACH)
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
        """Apply all of a preset's values or none; CUSTOM leaves the settings. Returns the problem, or ""."""
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
        ours = [(one.title, one.name) for one in PRESETS if one.kind == "ours"]
        known = sorted(ours, key=lambda one: one[1] != FIRST)
        if like is not None and not (like.name == FIRST and by_hand):
            if like.kind == "ours":
                return [*known, (LISTS, CUSTOM)], like.name, about(like), "", False
            return [*known, (like.title, CUSTOM)], CUSTOM, about(like), "", False
        known_titles = params()
        turned = list(dict.fromkeys([*(known_titles[one].title for one in by_hand), *changed(base, settings)]))
        return [*known, (was(base), CUSTOM)], CUSTOM, about(base, turned), f"Reset to {base.title}", True


def changed(base: Preset, settings: Settings, before: Mapping[str, Value] | None = None) -> list[str]:
    """The titles of the preset's settings that are not as in the preset, or as they were `before`."""
    known, were = params(), base.values if before is None else before
    return [known[name].title or name for name in base.values if settings[name] != were[name]]


def listed(titles: list[str]) -> str:
    """As many of them as are read at a glance."""
    left = len(titles) - NAMED
    return ", ".join(titles[:NAMED]) + (f" and {left} more" if left > 0 else "")


def was(base: Preset) -> str:
    """What the menu calls settings that began as a preset's: by the name of its system, so that it has room."""
    system = re.split(",|'s ", base.title)[0]
    return f"{system}, changed"


def about(chosen: Preset, turned: list[str] | None = None) -> str:
    """What was changed since a preset was chosen, and what it does: at a glance in Simple, in full in Advanced."""
    since = f'<p class="about"><b>Changed: {escape(listed(turned))}.</b></p>' if turned else ""
    full = f'<p class="about advanced">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'
    return f'{since}<p class="about simple">{escape(chosen.line)}.</p>{full}'
