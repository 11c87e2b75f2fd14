"""Sidebar, Substitution: every setting that may change answers, all off by default, and one button to return to
exact.
"""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.ui.controls import LIVE, html
from app.ui.sidebar.setting_controls import SettingControls
from core.settings.config import general
from core.settings.lossy import EXACT, LossySettings

BADGE = '<em title="A lossy option is on: answers may differ from those of the model itself">may change output</em>'


class SubstitutionSection:
    """Builds the section. Its badge and its reset button show while a lossy setting is on (data-lossy of <body>), in
    Simple, too, where the section is hidden otherwise.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Column(elem_id="substitution"):
            html(BADGE, elem_id="may-change")
            with gr.Accordion("Substitution", open=False, elem_classes="section"):
                self.alert = html(elem_id="substitution-alert")
                self.exact = gr.Button("Back to exact", size="sm", elem_id="exact-again")
                self.setting_controls = SettingControls(host, {"": general(LossySettings)})
        self.outputs: list[Component] = [self.alert, *self.setting_controls.outputs]
        self.setting_controls.wire(self.alert)
        self.exact.click(self._exact, None, self.outputs, **LIVE)

    def values(self) -> list[Any]:
        """Every control with the engine's current value."""
        return [self.setting_controls.redrawn_notice(), *self.setting_controls.values()]

    def _exact(self) -> list[Any]:
        problem = self.host.models.change_many(EXACT)
        return [self.setting_controls.notice(problem), *self.setting_controls.values()]
