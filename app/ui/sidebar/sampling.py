"""Sidebar, Sampling: how the next token is drawn. Changes apply from the next answer on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.ui.controls import LIVE, change_events, control, html
from app.ui.text import notice
from core.settings.param import declared
from core.settings.sampling import Sampling

SIMPLE = ("temperature", "max_new_tokens")  # the others are shown in Advanced


class SamplingSection:
    """Builds the section from `core.settings.sampling.Sampling`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Accordion("Sampling", open=True, elem_classes="section"):
            self.alert = html(elem_id="sampling-alert")
            self._controls: dict[str, Component] = {
                name: control(
                    replace(param, name=f"sampling.{name}"), getattr(host.chats.sampling, name), simple=name in SIMPLE
                )
                for name, param in declared(Sampling).items()
            }
        for name, made in self._controls.items():
            gr.on(change_events(made), self._turn(name), made, [made, self.alert], **LIVE)
        self.outputs: list[Component] = [*self._controls.values()]

    def values(self) -> list[Any]:
        """Every control with the host's current value."""
        return [getattr(self.host.chats.sampling, name) for name in self._controls]

    def _turn(self, name: str) -> Callable[[Any], list[Any]]:
        def turn(value: Any) -> list[Any]:
            problem = self.host.chats.set_sampling(**{name: value})
            return [getattr(self.host.chats.sampling, name) if problem else gr.skip(), notice(problem)]

        return turn
