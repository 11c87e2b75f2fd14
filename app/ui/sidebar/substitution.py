"""Sidebar, Substitution: every setting that may change answers, all off by default, and one button to return to
exact.
"""

from __future__ import annotations

from typing import Any

import gradio as gr
from gradio.components import Component

from app.services.host import Host
from app.ui.controls import LIVE, html
from app.ui.sidebar.knobs import Knobs, OnlyWith
from core.settings.lossy import LOSSY, WAYS

EXACT = {"miss": "wait", "execute": "off"}  # with these values answers are exact, whatever else is set
ADVANCED = {
    "gate_temperature",
    "gate_margin",
    "protect",
    "drop_share",
    "drop_renormalise",
    "execute_weights",
    "execute_share",
    "substitute.buddy.search_rank",
    "substitute.buddy.weighted",
    "substitute.buddy.smoothing",
    "substitute.buddy.eta",
    "substitute.buddy.unique",
    "substitute.buddy.discount",
    "substitute.random.seed",
}
REPLACES = {"miss": [way for way in WAYS if way != "wait"]}
SUBSTITUTES = {"miss": [way for way in WAYS if way.startswith("substitute")]}
DROPS = {"miss": [way for way in WAYS if "drop" in way]}
ONLY_WITH: OnlyWith = {
    "substitute": {"miss": [way for way in WAYS if way != "drop"]},  # a substitute is chosen before it is enabled
    "substitute.": SUBSTITUTES,
    "substitute.buddy.discount": {"substitute.buddy.unique": (False,)},
    "rho": REPLACES,
    "gate": REPLACES,
    "gate_tau": {"gate": ("tau",)},
    "gate_percentile": {"gate": ("percentile",)},
    "gate_temperature": {"gate": ("tau", "percentile")},
    "gate_margin": REPLACES,
    "batch_gate": REPLACES,
    "beta": {"batch_gate": ("fixed",)},
    "beta_budget": {"batch_gate": ("adaptive",)},
    "protect": REPLACES,
    "drop_share": DROPS,
    "drop_renormalise": DROPS,
    "execute_weights": {"execute": ("verify", "always")},
    "execute_share": {"execute": ("verify",)},
    "quality_rate": REPLACES | {"execute": ("verify", "always")},
}
BADGE = '<em title="A lossy option is on: answers may differ from those of the model itself">may change output</em>'


class SubstitutionSection:
    """Builds the section. Its badge and its reset button show while a lossy setting is on (data-lossy of <body>)."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Column(elem_id="substitution"):
            html(BADGE, elem_id="may-change")
            with gr.Accordion("Substitution", open=False, elem_classes="section"):
                self.alert = html(elem_id="substitution-alert")
                self.exact = gr.Button("Exact again", size="sm", elem_id="exact-again")
                self.knobs = Knobs(host, LOSSY, ADVANCED, ONLY_WITH)
        self.outputs: list[Component] = [self.alert, *self.knobs.outputs]
        self.knobs.wire(self.alert)
        self.exact.click(self._exact, None, self.outputs, **LIVE)

    def values(self) -> list[Any]:
        """Every control with the engine's current value."""
        return [self.knobs.told(), *self.knobs.values()]

    def _exact(self) -> list[Any]:
        problem = self.host.change_many(EXACT)
        return [self.knobs.tell(problem), *self.knobs.values()]
