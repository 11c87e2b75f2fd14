"""Sidebar, Advanced: the published systems, one plain line each, with marks for what they need; below them the controls
and ablations that they are compared with."""

from __future__ import annotations

from html import escape

import gradio as gr

from app.services.host import Host
from core.settings.preset import Kind, Preset
from core.settings.presets import PRESETS, matching

DRAWN = 'import("/ui/systems.js").then((m) => m.start(element, trigger, watch));'
LISTS: dict[Kind, str] = {"published": "Published systems", "control": "Controls and ablations"}


class SystemsMenu:
    """Builds the lists where it is created; `value()` draws them for the settings in force. Its `select` event carries
    the name of the `preset` that was pressed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.lists = gr.HTML(
            self.value(), elem_id="systems", elem_classes=["advanced"], apply_default_css=False, js_on_load=DRAWN
        )

    def value(self) -> str:
        """The lists as HTML."""
        chosen = matching(self.host.models.settings)
        return "".join(_list(kind, title, chosen) for kind, title in LISTS.items())


def _list(kind: Kind, title: str, chosen: Preset | None) -> str:
    rows = [one for one in PRESETS if one.kind == kind]
    return (
        f"<details data-list='{kind}'><summary>{title} <small>{len(rows)}</small></summary><ul>"
        f"{''.join(_row(one, one is chosen) for one in rows)}</ul></details>"
    )


def _row(one: Preset, chosen: bool) -> str:
    marks = "".join(f"<em title='{why}'>{mark}</em>" for mark, why in marks_of(one))
    return (
        f"<li><button type='button' data-preset='{one.name}' aria-pressed='{str(chosen).lower()}' "
        f"title='{escape(one.source, quote=True)}'><b>{escape(one.title)}</b>{marks}<span>{escape(one.line)}</span>"
        "</button></li>"
    )


def marks_of(one: Preset) -> list[tuple[str, str]]:
    """What it needs or does that the user has to know before choosing it, and why."""
    marks = [
        (bool(one.needs), "profile", "Needs a profile of the model: calibrate it first"),
        (one.splits, "blocks", "Needs a model loaded with several blocks per expert"),
        (one.lossy, "lossy", "May change answers"),
    ]
    return [(mark, why) for there, mark, why in marks if there]
