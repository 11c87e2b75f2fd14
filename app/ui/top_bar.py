"""The bar above the tabs: which model, Load and Unload, whether it fits, whether its answers are exact, and where other
programs find it. The sidebar's section Model makes these parts work; they are created there and shown here.
"""

from __future__ import annotations

from collections.abc import Sequence

import gradio as gr

from app.ui.controls import button, html, progress

CHIP = "<div data-fit-chip></div>"  # /ui/top_bar.js shows the verdict of the sidebar's card in it
API = (
    '<div class="api"><span title="The address of the API for other programs, as OpenAI\'s">API</span> '
    '<code data-api></code><button type="button" data-copy-api>Copy</button></div>'
)


class TopBar:
    """Creates the parts that have events; `show` draws all of them."""

    def __init__(self, models: Sequence[tuple[str, str]], chosen: str) -> None:
        self.model = gr.Dropdown(
            models,
            value=chosen,
            label="Model",
            allow_custom_value=True,
            elem_id="model",
            info="The bundled demo, a pack, or the path of a folder with a model or of a GGUF file.",
            render=False,
        )
        self.load = button("Load", "load", variant="primary", min_width=0, render=False)
        self.cancel = button("Cancel loading", "cancel-load", min_width=0, render=False)
        self.unload = button("Unload", "unload", min_width=0, render=False)
        self.alert = gr.HTML("", elem_id="model-alert", apply_default_css=False, js_on_load=None, render=False)
        self.loaded = gr.HTML("", elem_id="loaded", apply_default_css=False, js_on_load=None, render=False)

    def show(self) -> None:
        """Draw the bar where this is called."""
        with gr.Row(elem_id="top-bar"):
            self.model.render()
            self.load.render()
            self.cancel.render()
            self.unload.render()
            html(CHIP, elem_id="fit-chip")
            self.loaded.render()
            html(API, elem_id="api")
        progress("Loading the model", elem_id="load-progress")
        self.alert.render()
