"""Notices of a job: a redraw shows its end, and the press of a button its start.

Neither replaces the other's notice: a redraw shows one for each job once (`news`). A press that starts a job clears the
notice; as its answer may come after the redraw that shows the job's end, it comes with the page's state as it was
when the button was pressed (`noticed`): the page then has an old stamp, and asks for that redraw again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from app.services.jobs import Job
from app.ui.text import notice
from core.errors import MoestroError

# State of a page: the "stamp" of what is shown, the last "notice" of a redraw; of a job's tab, "dark" or not.
Shown = dict[str, Any]


def news(before: str, job: Job | None, text: str) -> tuple[str, Any]:
    """(what to keep in the page's state, the update of the form's notice); `before` = what was kept by the last redraw.

    A redraw leaves the notice alone unless its own has changed since the last redraw: a notice of the form itself, of
    a field that lacks something, stays.
    """
    mark = f"{id(job)} {text}" if text else ""
    return mark, gr.skip() if mark == before else text


def noticed(act: Callable[..., object]) -> Callable[..., list[Any]]:
    """A button's handler that does `act` and returns the page's state, its first value, and the error as a notice."""

    def handler(now: Shown, *values: Any) -> list[Any]:
        try:
            act(*values)
        except MoestroError as error:
            return [now, notice(str(error))]
        return [now, ""]

    return handler
