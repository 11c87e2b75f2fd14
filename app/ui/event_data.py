"""Event data beyond component inputs: sent by the page's own scripts, checked by app/server/security/events.py.

A field that may be missing is annotated with None. There are no defaults: they would hide what was sent.
"""

from __future__ import annotations

from typing import Literal

import gradio as gr


class Renewed(gr.EventData):
    """A job has an update (assets/ui/jobs.js): its stamp, and whether the page is dark."""

    stamp: str
    dark: bool


class BudgetPicked(gr.EventData):
    """The buttons of the verdict on a model (app/ui/sidebar/model.py); "" = its own settings are no longer used."""

    budget: str


class PolicyPicked(gr.EventData):
    """The best policy of the regret meter (app/ui/deck/js/main.js)."""

    policy: str


class PresetPicked(gr.EventData):
    """A published system, or a control (assets/ui/systems.js)."""

    preset: str


class BestPicked(gr.EventData):
    """The button of the sentence that says what is best (app/ui/best.py)."""

    best: str


class RowPicked(gr.EventData):
    """A row of the library, `again` if it was only redrawn; or a column header (assets/ui/library.js)."""

    entry: str | None
    again: bool | None
    sort: str | None


class HubPicked(gr.EventData):
    """A model of the hub is to be imported: its name there."""

    source: str


class MessageAction(gr.EventData):
    """What the user did to a message (assets/ui/chat/view.js): `id` = the message that is edited, regenerated or
    continued, the answer to `rewrite`, or one of the branch to `show`; `text` = of an edit, or of a suggestion to
    `ask`.
    """

    do: Literal["ask", "edit", "regenerate", "continue", "rewrite", "show"]
    id: int | None
    text: str | None


class ChatAction(gr.EventData):
    """What the user did in the list of chats (assets/ui/chat/list.js): `text` = the new name; "pin" also unpins."""

    do: Literal["open", "rename", "pin", "delete"]
    id: int
    text: str | None
