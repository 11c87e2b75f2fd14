"""A group of live settings in the sidebar: a control each; under a kind, its variant's description and parameters,
first those that variants share.

Every control takes effect at once, also while tokens stream. Settings without effect, given the others, are hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from app.services.host import Host
from app.ui.controls import LIVE, change_events, control, html
from app.ui.text import PROFILED, notice
from core.settings.config import KINDS, Settings, params
from core.settings.param import Value, When
from core.settings.registry import shared, variant, variants


class SettingControls:
    """Builds the controls of each of `sections` where it is created, one with a title in an accordion of that name;
    all are shown in Advanced. `outputs` and `values()` show their current engine values;
    `wire` attaches their events.
    """

    def __init__(self, host: Host, sections: Mapping[str, Iterable[str]]) -> None:
        self.host, self._params = host, params()
        self._refused: object = None  # the state in which a change was refused last
        self.controls: dict[str, Component] = {}
        self.notes: dict[str, gr.HTML] = {}
        self.groups: dict[tuple[str, str], gr.Column] = {}  # (kind, variant) -> the variant's own controls
        for title, names in sections.items():
            with gr.Accordion(title, open=True, elem_classes=["group", "advanced"]) if title else nullcontext():
                for name in names:
                    if name in KINDS:
                        self._build_kind(name)
                    else:
                        self._build(name)
        self.outputs: list[Component] = [*self.controls.values(), *self.notes.values(), *self.groups.values()]

    def values(self) -> list[Any]:
        """Every control with the engine's current value."""
        settings = self.host.models.settings
        return [
            *(gr.update(value=settings[name], visible=self.acts(name)) for name in self.controls),
            *(self._note(kind) for kind in self.notes),
            *(self._group(*group) for group in self.groups),
        ]

    def wire(self, alert: Component) -> dict[str, Dependency]:
        """Attach every control's event; a refused change is reported in `alert` and reverted. Returns the event of
        each.
        """
        events = {}
        for name, made in self.controls.items():
            moved = self._moved(name)
            parts = [part for part, _ in moved]
            looks = [look for _, look in moved]
            events[name] = gr.on(change_events(made), self.turn(name, looks), made, [made, alert, *parts], **LIVE)
        return events

    def turn(self, name: str, looks: Collection[Callable[[], Any]] = ()) -> Callable[[Value | None], list[Any]]:
        """The handler of a control's change: returns its own value if refused, the notice, and the updated dependent
        parts.
        """

        def turned_to(value: Value | None) -> list[Any]:
            before = self.host.models.settings
            problem = self.host.models.change(name, value)
            after = self.host.models.settings
            shown = after[name] if problem else gr.skip()
            message = self.notice(problem) if problem else self.notice(instead(before, after), "info")
            return [shown, message, *(look() for look in looks)]

        return turned_to

    def notice(self, problem: str, kind: str = "error") -> str:
        """The notice that a change was refused, or what else it changed; "" as `problem` clears it."""
        self._refused = self._state() if problem else None
        return notice(problem, kind)

    def redrawn_notice(self) -> Any:
        """The notice in a redraw: cleared when something has changed since. A redraw computed before the notice but
        applied later leaves it unchanged.
        """
        if self._refused in (None, self._state()):
            return gr.skip()
        self._refused = None
        return ""

    def _state(self) -> object:
        return id(self.host.models.settings), id(self.host.models.profile)

    def acts(self, name: str) -> bool:
        """Whether this setting has an effect, given the others and how the model was loaded."""
        param = self._params[name]
        models = self.host.models
        loaded = (models.in_blocks or not param.in_blocks) and (models.on_gpu or not param.on_gpu)
        return loaded and self._holds(param.active_when)

    def _holds(self, when: When | None) -> bool:
        return when is None or any(
            self.host.models.settings[leader] in values and self.acts(leader) for leader, values in when.items()
        )

    def _build(self, name: str) -> None:
        made = control(replace(self._params[name], name=name), self.host.models.settings[name])
        made.visible = self.acts(name)
        self.controls[name] = made

    def _build_kind(self, kind: str) -> None:
        chosen = str(self.host.models.settings[kind])
        titles = [(v.title, v.name) for v in variants(kind)]
        self.controls[kind] = control(self._params[kind], chosen, titles)
        self.notes[kind] = html(about(kind, chosen), elem_id=f"about-{kind}", advanced=True)
        self.controls[kind].visible = self.notes[kind].visible = self.acts(kind)
        for name in shared(kind):
            self._build(f"{kind}.{name}")
        for choice in variants(kind):
            own = [param for param in choice.params if not param.shared]
            if not own:
                continue
            with gr.Column(
                visible=self._group_acts(kind, choice.name),
                elem_classes=["own", "advanced"],
                elem_id=f"own-{kind}-{choice.name}",
            ) as group:
                for param in own:
                    self._build(choice.full_name(param))
            self.groups[kind, choice.name] = group

    def _moved(self, name: str) -> list[tuple[Component, Callable[[], Any]]]:
        """The parts whose look depends on this setting, each with the function that computes its update."""
        names = self._followers(name)
        affected = {name, *names}
        kinds = [kind for kind in self.notes if affected & {kind, *(self._params[kind].variants_active_when or ())}]
        return [
            *((self.controls[one], partial(self._look, one)) for one in names if one in self.controls),
            *((self.notes[kind], partial(self._note, kind)) for kind in kinds),
            *((part, partial(self._group, *at)) for at, part in self.groups.items() if at[0] in kinds),
        ]

    def _followers(self, name: str) -> list[str]:
        """The settings whose effect depends on this one, directly or through others."""
        found = [one for one, param in self._params.items() if name in (param.active_when or ())]
        return list(dict.fromkeys([*found, *(far for near in found for far in self._followers(near))]))

    def _look(self, name: str) -> Any:
        return gr.update(visible=self.acts(name))

    def _note(self, kind: str) -> Any:
        return gr.update(value=about(kind, str(self.host.models.settings[kind])), visible=self.acts(kind))

    def _group(self, kind: str, name: str) -> Any:
        return gr.update(visible=self._group_acts(kind, name))

    def _group_acts(self, kind: str, name: str) -> bool:
        chosen = self.host.models.settings[kind] == name and self.acts(kind)
        return chosen and self._holds(self._params[kind].variants_active_when)


def instead(before: Settings, after: Settings) -> str:
    """What to say where turning substituting on took another substitute than the one shown; "" where it did not."""
    old, new = (variant("substitute", one.lossy.substitute.name) for one in (before, after))
    if before.lossy.miss == after.lossy.miss or old.name == new.name:
        return ""
    return (
        f"{old.title} needs a profile of this model, so that “{new.title}” is used, which needs none. Calibrate the "
        f"model in {PROFILED} to choose {old.title}."
    )


def about(kind: str, name: str) -> str:
    """Description and source of the chosen variant."""
    chosen = variant(kind, name)
    return f'<p class="about">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'
