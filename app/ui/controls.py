"""Builds a UI control from a `Param` of the registry. One rule for all; no hand-kept list of controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr
from gradio.components import Component

from core.settings.param import Param, Value

SORTED = 'import("/ui/jobs.js").then((m) => m.sortable(element, watch));'
MOST_STEPS = 40_000  # numbers with more steps than this get a text field, not a slider
WIDE = "wide-range"  # class of a slider that assets/ui/sidebar.js makes logarithmic
DECADES = 100  # a slider whose ends are further apart than this factor is logarithmic
# For every event of the dashboard: no queue (so no open connection), the last of a fast series wins, not in the API.
LIVE: dict[str, Any] = {
    "queue": False,
    "trigger_mode": "always_last",
    "show_progress": "hidden",
    "api_visibility": "private",
}
ONCE: dict[str, Any] = {**LIVE, "trigger_mode": "once"}
EACH: dict[str, Any] = {**LIVE, "trigger_mode": "multiple"}


def control(
    param: Param, value: Value, choices: list[tuple[str, str]] | None = None, *, simple: bool = False
) -> Component:
    """The control for `param`, showing `value`; `choices` overrides the display names of a choice. `simple`: it is
    shown in Simple, too.
    """
    classes = [] if simple else ["advanced"]
    common: dict[str, Any] = {
        "value": value,
        "label": label(param),
        "info": param.help,
        "elem_id": element_id(param.name),
        "elem_classes": classes,
        "interactive": True,
    }
    if param.type == "bool":
        return gr.Checkbox(**common)
    if param.type == "choice":
        return gr.Dropdown(choices or titled(param), filterable=False, **common)
    if param.type == "text":
        return gr.Textbox(max_lines=1, **common)
    low, high, step = param.low, param.high, param.step or 1
    if is_wide(low, high, step):
        common["elem_classes"] = [*classes, WIDE]
    if low is None or high is None or (high - low) / step > MOST_STEPS:
        return gr.Number(minimum=low, maximum=high, step=step, precision=0 if param.type == "int" else None, **common)
    return gr.Slider(low, high, step=step, buttons=[], **common)


def titled(param: Param) -> list[tuple[str, str]]:
    """(what the page calls it, its name) of every choice."""
    return list(zip(param.choice_titles or param.choices, param.choices, strict=True))


def is_wide(low: float | None, high: float | None, step: float) -> bool:
    """Whether a slider from `low` to `high` is better logarithmic."""
    return low is not None and high is not None and low >= 0 and high / (low or step) > DECADES


def html(value: str = "", elem_id: str | None = None, advanced: bool = False) -> gr.HTML:
    """A piece of our own HTML, styled only by app.css."""
    shown_in = ["advanced"] if advanced else []
    return gr.HTML(value, elem_id=elem_id, elem_classes=shown_in, apply_default_css=False, js_on_load=None)


def button(label: str, elem_id: str, variant: Any = "secondary", min_width: int = 80, **more: Any) -> gr.Button:
    """A small button."""
    return gr.Button(label, variant=variant, size="sm", elem_id=elem_id, min_width=min_width, **more)


def number(value: float, label: str, elem_id: str, info: str, **more: Any) -> gr.Number:
    """A field for a whole number that is no setting."""
    return gr.Number(value, label=label, elem_id=elem_id, info=info, **{"precision": 0, **more})


def plot(elem_id: str, **more: Any) -> gr.Plot:
    """A figure."""
    return gr.Plot(show_label=False, elem_id=elem_id, **more)


def drawn(figure: Any) -> Any:
    """The update of a figure, which is hidden where there is none."""
    return gr.update(value=figure, visible=figure is not None)


def answered(parts: Sequence[Any] | None, count: int) -> list[Any]:
    """The updates of the words that stand while there is no result, of the result, and of its `count` parts. None:
    there is no result."""
    empty = parts is None
    return [gr.update(visible=empty), gr.update(visible=not empty), *([gr.skip()] * count if parts is None else parts)]


def sortable(elem_id: str) -> gr.HTML:
    """A table whose heads sort it."""
    return gr.HTML(elem_id=elem_id, apply_default_css=False, js_on_load=SORTED)


def download(path: str, name: str) -> gr.HTML:
    """The link to a table of results under /export."""
    link = f"<a href='/export/{path}' download id='{name}-csv'>Download the table (CSV)</a>"
    return html(link, elem_id=f"{name}-link")


def progress(what: str, elem_id: str) -> gr.HTML:
    """A progress bar of long work, moved by the page itself; `what` is its label for screen readers."""
    return html(
        f'<div class="progress"><div class="track" role="progressbar" aria-label="{what}" aria-valuemin="0" '
        'aria-valuemax="100" aria-valuenow="0"><i></i></div><span>Starting…</span></div>',
        elem_id,
    )


def label(param: Param) -> str:
    """The title with its unit."""
    return f"{param.title or param.name} ({param.unit})" if param.unit else param.title or param.name


def element_id(name: str) -> str:
    """The element id of a control: "eviction.lcp.rho" becomes #set-eviction-lcp-rho."""
    return "set-" + name.replace(".", "-")


def change_events(component: Component) -> list[Any]:
    """Events fired when the user changes this control (never by programmatic updates, which prevents loops)."""
    typed = isinstance(component, gr.Number | gr.Textbox)
    return [component.submit, component.blur] if typed else [component.input]


def whole(value: float | None) -> int:
    """The value of an unbounded number field as a count: empty and negative are 0."""
    return max(0, int(value or 0))
