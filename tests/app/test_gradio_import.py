"""Gradio as the dashboard imports it: with every component, and without the files it writes for editors."""

from __future__ import annotations

import gradio as gr
from gradio import component_meta

from app.start.gradio_import import skip_interface_files


def test_components_are_made_without_interface_files() -> None:
    assert component_meta.create_or_modify_pyi.__module__ == skip_interface_files.__module__
    assert gr.Slider.EVENTS
    assert gr.Slider(0, 1).get_config()["maximum"] == 1
