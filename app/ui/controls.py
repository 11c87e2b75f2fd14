"""From a `Param` of the registry to the control that turns it. One rule for all; no hand-kept list of knobs."""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from core.settings.registry import Param, Value

MOST_STEPS = 20_000  # more positions than this are typed, not dragged
# Every event of the dashboard: no queue (so no open connection), the last of a fast series wins, not in the API.
LIVE: dict[str, Any] = {
    "queue": False,
    "trigger_mode": "always_last",
    "show_progress": "hidden",
    "api_visibility": "private",
}
ONCE: dict[str, Any] = {**LIVE, "trigger_mode": "once"}


def control(
    param: Param, value: Value, choices: list[tuple[str, str]] | None = None, advanced: bool = False
) -> Component:
    """The control for `param`, showing `value`; `choices` overrides how the names of a choice read."""
    common: dict[str, Any] = {
        "value": value,
        "label": label(param),
        "info": param.help,
        "elem_id": element_id(param.name),
        "elem_classes": ["advanced"] if advanced else [],
        "interactive": True,
    }
    if param.type == "bool":
        return gr.Checkbox(**common)
    if param.type == "choice":
        return gr.Dropdown(choices or [(name, name) for name in param.choices], filterable=False, **common)
    if param.type == "text":
        return gr.Textbox(max_lines=1, **common)
    low, high, step = param.low, param.high, param.step or 1
    if low is None or high is None or (high - low) / step > MOST_STEPS:
        return gr.Number(minimum=low, maximum=high, step=step, precision=0 if param.type == "int" else None, **common)
    return gr.Slider(low, high, step=step, buttons=[], **common)


def html(value: str = "", elem_id: str | None = None, advanced: bool = False) -> gr.HTML:
    """A piece of our own HTML, styled by app.css alone."""
    shown_in = ["advanced"] if advanced else []
    return gr.HTML(value, elem_id=elem_id, elem_classes=shown_in, apply_default_css=False, js_on_load=None)


def progress(what: str, elem_id: str) -> gr.HTML:
    """A bar of a long work, which the page moves by itself; `what` it is, for those who do not see it."""
    return html(
        f'<div class="progress"><div class="track" role="progressbar" aria-label="{what}" aria-valuemin="0" '
        'aria-valuemax="100" aria-valuenow="0"><i></i></div><span>Starting…</span></div>',
        elem_id,
    )


def label(param: Param) -> str:
    """The title with its unit."""
    return f"{param.title or param.name} ({param.unit})" if param.unit else param.title or param.name


def element_id(name: str) -> str:
    """The id of the control in the page: "eviction.lfu.half_life" is found as #set-eviction-lfu-half_life."""
    return "set-" + name.replace(".", "-")


def turned(component: Component) -> list[Any]:
    """The events that say the user turned this control (never our own updates, so nothing loops)."""
    typed = isinstance(component, gr.Number | gr.Textbox)
    return [component.submit, component.blur] if typed else [component.input]


def whole(value: float | None) -> int:
    """What a number field without bounds says, as a number of things: empty and negative are 0."""
    return max(0, int(value or 0))
