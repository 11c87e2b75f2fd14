"""One sentence under a result that says what is best here and by how much, and a button that applies it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr

from app.services.analysis.best import Best
from app.services.host import Host
from app.ui.controls import LIVE
from app.ui.event_data import BestPicked
from app.ui.text import notice
from core.settings.config import KINDS, params
from core.settings.param import Value
from core.settings.registry import variant

USE_JS = """element.addEventListener("click", (e) => {
  const button = e.target.closest("[data-best]");
  if (button) trigger("select", {best: button.dataset.best}); });"""


class BestLine:
    """Builds the line where it is created. `find` returns what is best in the result shown, or None."""

    def __init__(self, host: Host, elem_id: str, find: Callable[[], Best | None]) -> None:
        self.host, self._find = host, find
        self.line = gr.HTML(self.value(), elem_id=elem_id, apply_default_css=False, js_on_load=USE_JS)
        self.line.select(self._use, None, self.line, **LIVE)

    def value(self) -> str:
        """The sentence, with a button if it names settings that are not in force; "" where there is none."""
        best = self._find()
        if best is None:
            return ""
        settings = self.host.models.settings
        changed = {name: value for name, value in best.changes.items() if settings[name] != value}
        if not best.changes:
            return f"<p class='best'>{escape(best.text)}</p>"
        if not changed:
            return f"<p class='best'>{escape(best.text)} <span class='why'>In use.</span></p>"
        words = escape("Use " + ", ".join(worded(name, value) for name, value in changed.items()))
        return (
            f"<p class='best'>{escape(best.text)}<button type='button' data-best='{mark(best)}' title='{words}'>"
            "Use it</button></p>"
        )

    def _use(self, picked: BestPicked) -> Any:
        """Apply what the button stood for, if that is still what is best."""
        best = self._find()
        if best is None or mark(best) != picked.best:
            return self.value()
        problem = self.host.models.change_many(best.changes)
        return self.value() + notice(problem)


def mark(best: Best) -> str:
    """Which recommendation this is."""
    return hashlib.sha1(repr((best.text, sorted(best.changes.items()))).encode()).hexdigest()[:16]


def worded(name: str, value: Value) -> str:
    """A setting and its value, in the words of the sidebar."""
    param = params()[name]
    shown = variant(name, str(value)).title if name in KINDS else str(value)
    return f"{param.title or name} {shown}"
