"""Tab System: what Moestro detects on this machine, and the newest lines of its log."""

from __future__ import annotations

import logging
from html import escape
from typing import Any

import gradio as gr

from app.services.crash import log_crash
from app.services.examination import examine, rows
from app.services.host import Host
from app.services.log_lines import MOST
from app.ui.controls import ONCE, button, html
from app.ui.text import notice

ABOUT = """<h3>This machine</h3><p class="minor">Processor, memory, GPU, packages and what was measured of the
arithmetic here; link and disk are measured now, for some seconds. Best while nothing is answered.</p>"""
LOG = f"""<h3>Log</h3><p class="minor">The newest {MOST} lines since the start: warnings and errors, and what Auto
chose. They contain nothing of a conversation.</p>"""
COPY = '<button type="button" data-copy-of="{}">Copy</button>'
FAILED = "The machine was not examined because of an error inside Moestro. Its details are in the log."
NOTHING = "Nothing has been logged yet."
log = logging.getLogger("moestro.app")


class SystemTab:
    """Nothing is examined before its button is pressed; the log is read when the tab is opened."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Row(elem_id="system-tab", elem_classes="job-tab", equal_height=False):
            with gr.Column(scale=1, min_width=320, elem_classes="job-form"):
                html(ABOUT)
                with gr.Row(elem_classes="buttons"):
                    self.examine = button("Examine this machine", "examine", variant="primary")
                self.found = html(elem_id="examined")
            with gr.Column(scale=1, min_width=320, elem_classes="job-form"):
                html(LOG)
                with gr.Row(elem_classes="buttons"):
                    self.refresh = button("Refresh", "log-refresh")
                self.lines = html(elem_id="log-lines")
        working = notice("Examining this machine. It takes some seconds.", "info")
        begun = self.examine.click(lambda: working, None, self.found, **ONCE)
        begun.then(self._examine, None, self.found, **ONCE)
        self.refresh.click(self.read_log, None, self.lines, **ONCE)

    def read_log(self) -> str:
        """The log as it is now."""
        text = self.host.log.text()
        return (
            f"{COPY.format('#log-lines pre')}<pre>{escape(text)}</pre>" if text else f'<p class="minor">{NOTHING}</p>'
        )

    def _examine(self) -> str:
        try:
            found = examine(self.host.store.folder)
        except Exception as error:
            log_crash(log, error, "unexpected error while the machine was examined")
            return notice(FAILED)
        return "".join(map(notice, found["problems"])) + _table(found)


def _table(found: dict[str, Any]) -> str:
    packages = [one["name"] for one in found["packages"]]
    lines = [(name, text) for name, text in rows(found) if name not in ("Problem", *packages)]
    lines.append(("Packages", ", ".join(f"{name} {text}" for name, text in rows(found) if name in packages)))
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in lines)
    return f"{COPY.format('#examined table')}<table>{body}</table>"
