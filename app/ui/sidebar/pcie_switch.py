"""Sidebar, the switch "Simulate PCIe": a plain way to turn the setting `link`, which Advanced has with its figures."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.services.host import Host

HELP = (
    "On: experts are copied as slowly, beside computing, as a large model's over PCIe, and figures say EMULATED. Off: "
    "this machine's own link."
)


class PcieSwitch:
    """Builds the switch where it is created. It shows while a model is loaded: in Simple for the demo model alone,
    whose link is emulated from the start, in Advanced for all. `value()` is its look for the setting in force."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.box = gr.Checkbox(
            self.on,
            label="Simulate PCIe",
            info=HELP,
            interactive=True,
            visible=host.models.model is not None,
            elem_id="simulate-pcie",
            elem_classes=self._classes(),
        )

    @property
    def on(self) -> bool:
        """Whether the loaded model's copies are paced."""
        kind = self.host.models.settings.link.kind
        return kind == "emulated" or (kind == "auto" and self._demo)

    def value(self) -> Any:
        """Drawn for the loaded model and its settings."""
        return gr.update(value=self.on, visible=self.host.models.model is not None, elem_classes=self._classes())

    def turn(self, on: bool) -> str:
        """Set the link; returns the problem, or ""."""
        if on == self.on:
            return ""
        return self.host.models.change("link", "own" if not on else "auto" if self._demo else "emulated")

    @property
    def _demo(self) -> bool:
        return self.host.models.model == "demo"

    def _classes(self) -> list[str]:
        return [] if self._demo else ["advanced"]
