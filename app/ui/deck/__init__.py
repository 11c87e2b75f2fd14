"""The live deck: one HTML component whose canvases are drawn by `js/main.js` from `/live/frame`."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

HERE = Path(__file__).parent


def deck() -> gr.HTML:
    """The component; its style sheet and modules are served under /ui/deck. Its `select` event carries the cache
    `policy` picked on it.
    """
    return gr.HTML(
        html_template=(HERE / "deck.html").read_text(encoding="utf-8"),
        elem_id="deck",
        apply_default_css=False,
        js_on_load='import("/ui/deck/js/main.js").then((m) => m.start(element, trigger));',
    )
