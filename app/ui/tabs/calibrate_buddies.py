"""The buddies of tab Calibrate: how alike a layer's experts are, and how coverage turns into lengths of buddy lists.

Drawn by the lists' settings in use, whether or not buddies are substituted.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.services.host import Host
from app.ui.controls import drawn, html, plot, sortable
from app.ui.tabs import calibrate_figures as figures
from app.ui.tabs.calibrate_views import lists_summary, lists_table
from app.ui.text import notice
from core.errors import SettingError
from core.policy.substitute.list_lengths import ListRule, by_layer
from core.profile import Profile

NO_WEIGHTS = "Co-activations by weight were not measured, so that there are no lists by them. Calibrate Co-activations."


class BuddyAnswer:
    """`build_similarity` and `build_lists` place it, `values` fills `outputs`."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def build_similarity(self) -> None:
        """The heatmap of one layer."""
        self.measure = gr.Dropdown(
            [(title, name) for name, title in figures.MEASURES.items()],
            value="cosine",
            label="Similarity",
            filterable=False,
            elem_id="profile-measure",
        )
        self.similarity = plot("profile-similarity")

    def build_lists(self) -> None:
        """The lengths of lists: at one coverage, over all, and as a table."""
        with gr.Column(visible=False, elem_id="profile-lists") as self.found:
            self.problem = html(elem_id="profile-lists-problem")
            with gr.Row(elem_classes="plots"):
                with gr.Column(min_width=320, elem_classes="with-slider"):
                    self.alpha = gr.Slider(
                        0,
                        1,
                        value=0,
                        step=0.01,
                        label="Coverage (alpha), 0 = as set",
                        elem_id="profile-alpha",
                        buttons=[],
                    )
                    self.lengths = plot("profile-lengths")
                with gr.Column(min_width=320):
                    self.curve = plot("profile-coverage")
            self.summary = html(elem_id="profile-lists-said")
            self.table = sortable("profile-lists-table")

    @property
    def outputs(self) -> list[Any]:
        """What `values` fills."""
        return [self.measure, self.similarity, self.found, *self.lists_outputs]

    @property
    def lists_outputs(self) -> list[Any]:
        """What `lists` fills."""
        return [self.problem, self.lengths, self.curve, self.summary, self.table]

    def values(self, profile: Profile, layer: int, measure: str, alpha: float, dark: bool) -> list[Any]:
        """Everything, for a profile."""
        rule = ListRule.of(self.host.models.settings)
        both = profile.likeness is not None and rule.pairs(profile) is not None
        return [
            gr.update(visible=both),
            drawn(figures.similarity(profile, layer, measure, rule, dark)),
            gr.update(visible=profile.pairs is not None),
            *self.lists(profile, layer, alpha, dark),
        ]

    def drawn(self, profile: Profile, layer: int, measure: str, dark: bool) -> Any:
        """The heatmap alone; None where neither measure was gathered."""
        return figures.similarity(profile, layer, measure, ListRule.of(self.host.models.settings), dark)

    def lists(self, profile: Profile, layer: int, alpha: float, dark: bool) -> list[Any]:
        """The lists by the settings in use, at coverage `alpha`, 0 = as set; or why there are none."""
        rule = ListRule.of(self.host.models.settings)
        pairs = rule.pairs(profile)
        if pairs is None:
            return _without(NO_WEIGHTS) if profile.pairs is not None else [gr.skip()] * 5
        try:
            rows = by_layer(pairs, figures.coverage(rule, alpha, profile.layers), rule.k_max, rule.smoothing)
            lengths = figures.list_lengths(profile, layer, rule, alpha, dark)
            curve = figures.lengths_by_alpha(profile, layer, rule, alpha, dark)
        except SettingError as error:
            return _without(str(error))
        return [
            "",
            gr.update(value=lengths, visible=True),
            drawn(curve),
            lists_summary(rows, rule.k_max, rule.weighted),
            lists_table(rows),
        ]


def _without(why: str) -> list[Any]:
    return [notice(why), gr.update(visible=False), gr.update(visible=False), "", ""]
