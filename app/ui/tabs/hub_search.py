"""The search of the hub in the form of imports: shown where downloads are allowed; a found model is one click away."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import groupby
from pathlib import Path

import gradio as gr

from app.services.hub_search import Found, fits, search
from app.ui.controls import LIVE, ONCE, button
from app.ui.tabs.library_views import experts
from app.ui.text import notice
from core.errors import MoestroError
from core.system.wording import format_bytes

BUSY = "<p class='minor' role='status'>Searching the Hugging Face hub…</p>"
NONE = (
    "<p class='minor' role='status'>Nothing found that can be imported. Write another part of the name; models without "
    "experts, and those that run with code of their own only, are left out.</p>"
)
FOUND_JS = """element.addEventListener("click", (e) => {
  const button = e.target.closest("[data-source]");
  if (button) trigger("select", {source: button.dataset.source}); });"""
WORDS = {  # of errors that name what the command line has for it
    "add --download": "tick Allow download",
    "; run the same command to continue.": ".",
    "Run the same command to fetch it again.": "Import it again.",
}
Fits = Callable[[int], tuple[bool, str]]


class HubSearch:
    """The field, its button, and what was `found`: its `select` event has the source to import."""

    def __init__(self, packs: Path, allowed: gr.Checkbox) -> None:
        self._packs = packs
        with gr.Column(visible=False, elem_id="hub") as area:
            with gr.Row(equal_height=False):
                self.text = gr.Textbox(
                    "",
                    label="Search the hub",
                    max_lines=1,
                    elem_id="hub-search",
                    placeholder="Qwen3-30B",
                    info="Asks the Hugging Face hub for Mixture-of-Experts models with this name.",
                )
                self.start = button("Search", "hub-start", scale=0)
            self.found = gr.HTML(
                "", html_template="${value}", elem_id="hub-found", apply_default_css=False, js_on_load=FOUND_JS
            )
        allowed.change(lambda on: gr.update(visible=on), allowed, area, **LIVE)
        asked = gr.on([self.text.submit, self.start.click], lambda: BUSY, None, self.found, **ONCE)
        asked.then(self._search, [self.text, allowed], self.found, **ONCE)

    def _search(self, text: str | None, allowed: bool) -> str:
        try:
            return listed(search(text or "", allowed=allowed), lambda size: fits(size, self._packs))
        except MoestroError as error:
            return notice(str(error))


def listed(found: list[Found], fits: Fits) -> str:
    """What was found, a line for each model; the GGUF files of a repository are folded."""
    if not found:
        return NONE
    blocks = []
    for repo, group in groupby(found, lambda one: one.repo):
        lines = list(group)
        if len(lines) == 1:
            blocks.append(_line(lines[0], repo, fits))
            continue
        sizes = " to ".join(format_bytes(one.entry.bytes) for one in (lines[0], lines[-1]))
        head = f"<summary>{_about(lines[0], repo)}<small>{len(lines)} GGUF files, {sizes}</small></summary>"
        inside = "".join(_line(one, one.entry.name, fits) for one in lines)
        blocks.append(f"<details>{head}{inside}</details>")
    return f'<div class="hub-found">{"".join(blocks)}</div>'


def _about(one: Found, name: str) -> str:
    return f'<b title="{escape(name, quote=True)}">{escape(name)}</b>'


def _line(one: Found, name: str, fits: Fits) -> str:
    entry, (room, words) = one.entry, fits(one.entry.bytes)
    about = [entry.kind, entry.format, format_bytes(entry.bytes), experts(entry), f"{one.downloads:,} downloads"]
    gated = "<small>Its owner asks for consent: accept the terms there, and run hf auth login.</small>" * one.gated
    return (
        f'<div class="hub-line"><span>{_about(one, name)}<small>{escape(" · ".join(filter(None, about)))}</small>'
        f'<small class="{"" if room else "why"}">{escape(words)}</small>{gated}</span>'
        f'<button type="button" data-source="{escape(entry.path, quote=True)}"{"" if room else " disabled"} '
        f'aria-label="Import {escape(name, quote=True)}">Import</button></div>'
    )


def for_page(error: str) -> str:
    """An error with the page's controls in place of the command line's options."""
    for said, here in WORDS.items():
        error = error.replace(said, here)
    return error
