"""A group of live settings in the sidebar: a control each; under a kind, its variant's description and parameters.

Every control takes effect at once, also while tokens stream. Settings without effect, given the others, are hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Component
from gradio.events import Dependency

from app.services.host import Host
from app.ui.controls import LIVE, control, html, turned
from app.ui.sidebar.text import notice
from core.settings.config import KINDS, params
from core.settings.registry import Param, Value, variant, variants

# Setting -> {other setting: values with which it has an effect}. One of them is enough, if that one has an effect
# itself. "kind." stands for the parameters of the chosen variant of a kind.
OnlyWith = Mapping[str, Mapping[str, Collection[Value]]]


class Knobs:
    """Builds the controls of `shown` where it is created. `outputs` and `values()` show their current engine values;
    `wire` attaches their events.
    """

    def __init__(self, host: Host, shown: Iterable[Param], advanced: Collection[str], only_with: OnlyWith) -> None:
        self.host, self._advanced, self._only_with = host, advanced, only_with
        self._refused: object = None  # the state in which a change was refused last
        self.controls: dict[str, Component] = {}
        self.notes: dict[str, gr.HTML] = {}
        self.groups: dict[tuple[str, str], gr.Column] = {}  # (kind, variant) -> the variant's own controls
        for param in shown:
            if param.name in KINDS:
                self._build_kind(param.name)
            else:
                self._build(param)
        self.outputs: list[Component] = [*self.controls.values(), *self.notes.values(), *self.groups.values()]

    def values(self) -> list[Any]:
        """Every control with the engine's current value."""
        settings = self.host.settings
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
            events[name] = gr.on(turned(made), self.turn(name, looks), made, [made, alert, *parts], **LIVE)
        return events

    def turn(self, name: str, looks: Collection[Callable[[], Any]] = ()) -> Callable[[Value | None], list[Any]]:
        """The handler of a control's change: returns its own value if refused, the notice, and the updated dependent
        parts.
        """

        def turned_to(value: Value | None) -> list[Any]:
            problem = self.host.change(name, value)
            shown = self.host.settings[name] if problem else gr.skip()
            return [shown, self.tell(problem), *(look() for look in looks)]

        return turned_to

    def tell(self, problem: str) -> str:
        """The notice that a change was refused; "" as `problem` clears it."""
        self._refused = self._state() if problem else None
        return notice(problem)

    def told(self) -> Any:
        """The notice in a redraw: cleared when something has changed since. A redraw computed before the notice but
        applied later leaves it unchanged.
        """
        if self._refused in (None, self._state()):
            return gr.skip()
        self._refused = None
        return ""

    def _state(self) -> object:
        return id(self.host.settings), id(self.host.profile)

    def acts(self, name: str) -> bool:
        """Whether this setting has an effect, given the others."""
        leaders = self._only_with.get(name)
        return leaders is None or any(
            self.host.settings[leader] in values and self.acts(leader) for leader, values in leaders.items()
        )

    def _build(self, param: Param) -> None:
        name = param.name
        made = control(param, self.host.settings[name], advanced=name in self._advanced)
        made.visible = self.acts(name)
        self.controls[name] = made

    def _build_kind(self, kind: str) -> None:
        chosen, advanced = str(self.host.settings[kind]), kind in self._advanced
        titles = [(v.title, v.name) for v in variants(kind)]
        self.controls[kind] = control(params()[kind], chosen, titles, advanced=advanced)
        self.notes[kind] = html(about(kind, chosen), elem_id=f"about-{kind}", advanced=advanced)
        self.controls[kind].visible = self.notes[kind].visible = self.acts(kind)
        for choice in variants(kind):
            if not choice.params:
                continue
            with gr.Column(
                visible=self._group_acts(kind, choice.name), elem_classes="own", elem_id=f"own-{kind}-{choice.name}"
            ) as group:
                for param in choice.params:
                    name = f"{kind}.{choice.name}.{param.name}"
                    self._build(replace(params()[name], name=name))
            self.groups[kind, choice.name] = group

    def _moved(self, name: str) -> list[tuple[Component, Callable[[], Any]]]:
        """The parts whose look depends on this setting, each with the function that computes its update."""
        names = self._followers(name)
        kinds = [kind for kind in self.notes if {kind, f"{kind}."} & {name, *names}]
        return [
            *((self.controls[one], partial(self._look, one)) for one in names if one in self.controls),
            *((self.notes[kind], partial(self._note, kind)) for kind in kinds),
            *((part, partial(self._group, *at)) for at, part in self.groups.items() if at[0] in kinds),
        ]

    def _followers(self, name: str) -> list[str]:
        """The settings whose effect depends on this one, directly or through others."""
        found = [one for one, leaders in self._only_with.items() if name in leaders]
        return list(dict.fromkeys([*found, *(far for near in found for far in self._followers(near))]))

    def _look(self, name: str) -> Any:
        return gr.update(visible=self.acts(name))

    def _note(self, kind: str) -> Any:
        return gr.update(value=about(kind, str(self.host.settings[kind])), visible=self.acts(kind))

    def _group(self, kind: str, name: str) -> Any:
        return gr.update(visible=self._group_acts(kind, name))

    def _group_acts(self, kind: str, name: str) -> bool:
        return self.host.settings[kind] == name and self.acts(kind) and self.acts(f"{kind}.")


def about(kind: str, name: str) -> str:
    """Description and source of the chosen variant."""
    chosen = variant(kind, name)
    return f'<p class="about">{escape(chosen.help)} <cite>{escape(chosen.source)}</cite></p>'
