"""Event data beyond component inputs: sent by the page's own scripts, checked by app/server/security/events.py.

A field that may be missing is annotated with None. There are no defaults: they would hide what was sent.
"""

from __future__ import annotations

from typing import Annotated, Any

import gradio as gr
from pydantic import Field


class Renewed(gr.EventData):
    """A job has an update (assets/ui/jobs.js): its stamp, and whether the page is dark."""

    stamp: str
    dark: bool


class BudgetPicked(gr.EventData):
    """The button of the verdict on a model (app/ui/sidebar/model.py)."""

    budget: str


class PolicyPicked(gr.EventData):
    """The best policy of the regret meter (app/ui/deck/js/main.js)."""

    policy: str


class BestPicked(gr.EventData):
    """The button of the sentence that says what is best (app/ui/best.py)."""

    best: str


class RowPicked(gr.EventData):
    """A row of the library, `again` if it was only redrawn; or a column header (assets/ui/library.js)."""

    entry: str | None
    again: bool | None
    sort: str | None


class ExamplePicked(gr.SelectData):
    """A suggestion of the empty chat."""

    index: Any
    value: dict[str, Any]


class MessageEdited(gr.EditData):
    """A chat message edited by the user, identified by its index."""

    index: int | Annotated[list[int], Field(min_length=1)]
    previous_value: Any
    value: str
