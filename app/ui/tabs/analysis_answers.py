"""The right side of tab Analysis: results of the last comparison and the last test of prefetchers, and the systems of
the literature as a bench measured them last."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from app.services import probes
from app.services.analysis.best import of_lab, of_table
from app.services.analysis.whatif import Table
from app.services.host import Host
from app.store import results
from app.ui.best import BestLine
from app.ui.controls import LIVE, answered, download, drawn, html, plot, sortable
from app.ui.tabs import lab_views
from app.ui.tabs.analysis_figures import budget_curve, compared
from app.ui.tabs.analysis_views import EMPTY, budgets, legend, listing, nearest, summary
from app.ui.tabs.calibrate_views import when
from app.ui.tabs.systems_figures import tpot_over_budgets
from core.system.command import COMMAND

SYSTEMS_EMPTY = (
    f"<div class='empty-note'><b>No systems measured yet</b><span>Run <code>{COMMAND} bench systems</code> on a "
    "machine that does nothing else: every preset at several budgets, live, and the best possible.</span></div>"
)


class WhatIfAnswer:
    """Curves over budgets, and every policy and prefetcher at one budget. `values` fills `outputs`."""

    def __init__(self, host: Host) -> None:
        self.analyst = analyst = host.analyst
        self.empty = html(EMPTY, elem_id="whatif-empty")
        with gr.Column(visible=False, elem_id="whatif-answer") as self.answer:
            self.head = html(elem_id="whatif-head")
            self.best = BestLine(host, "whatif-best", lambda: of_table(analyst.table) if analyst.table else None)
            self.legend = html(elem_id="whatif-legend")
            with gr.Row(elem_classes="plots"):
                self.hits = plot("whatif-hits", min_width=320)
                self.tpot = plot("whatif-tpot", min_width=320)
            with gr.Row(elem_classes="head-row"):
                self.budget = gr.Dropdown(
                    [], label="At a budget of", filterable=False, elem_id="whatif-budget", min_width=180, scale=0
                )
                download("whatif.csv", "whatif")
            self.bars = plot("whatif-bars")
            self.table = sortable("whatif-table")
        top = [self.empty, self.answer, self.head, self.best.line, self.legend]
        self.outputs = [*top, self.hits, self.tpot, self.budget, self.bars, self.table]

    def values(self, budget: int | None, dark: bool) -> list[Any]:
        """The last result, at `budget` if it was simulated."""
        table = self.analyst.table
        if table is None:
            return answered(None, 8)
        offered = budgets(table)
        slots = budget if budget in [n for _, n in offered] else nearest(table, table.about.chosen[2])
        timed = table.resident_ms is not None
        curves = [budget_curve(table, "hit_rate", dark), drawn(budget_curve(table, "tpot_ms", dark) if timed else None)]
        budget_menu = gr.update(choices=offered, value=slots)
        head = [summary(table), self.best.value(), legend(table, dark)]
        return answered([*head, *curves, budget_menu, *at_budget(table, slots, dark)], 8)

    def wire(self, news: gr.HTML) -> None:
        """Attach the events; `news` holds the page's colours."""

        def moved(now: dict[str, Any], slots: int) -> list[Any]:
            table = self.analyst.table
            return [gr.skip()] * 2 if table is None else at_budget(table, slots, bool(now["dark"]))

        self.budget.input(moved, [news, self.budget], [self.bars, self.table], **LIVE)


def at_budget(table: Table, slots: int, dark: bool) -> list[Any]:
    """The figure and the table at this number of slots; 0 = the table at all of them. A page may still offer the
    budgets of an earlier result: then the nearest is shown.
    """
    slots = nearest(table, slots) if slots else 0
    return [
        gr.update(value=compared(table, slots, dark), visible=True) if slots else gr.update(visible=False),
        listing(table, slots),
    ]


class LabAnswer:
    """Recall by layer, and the time saved by each prefetcher. `values` fills `outputs`."""

    def __init__(self, host: Host) -> None:
        self.analyst = analyst = host.analyst
        self.empty = html(lab_views.EMPTY, elem_id="lab-empty")
        with gr.Column(visible=False, elem_id="lab-answer") as self.answer:
            self.head = html(elem_id="lab-head")
            self.best = BestLine(host, "lab-best", lambda: of_lab(analyst.lab) if analyst.lab else None)
            self.recall = plot("lab-recall")
            self.most = plot("lab-most")
            with gr.Row(elem_classes="plots"):
                self.worth = plot("lab-worth", min_width=320)
                self.bars = plot("lab-bars", min_width=320)
            download("predictors.csv", "lab")
            self.table = sortable("lab-table")
        top = [self.empty, self.answer, self.head, self.best.line]
        self.outputs = [*top, self.recall, self.most, self.worth, self.bars, self.table]

    def values(self, dark: bool) -> list[Any]:
        """The last result."""
        lab = self.analyst.lab
        if lab is None:
            return answered(None, 7)
        plots = [
            lab_views.recall_map(lab, dark),
            lab_views.recall_map(lab, dark, most=True),
            lab_views.worth(lab, dark),
            lab_views.bars(lab, dark),
        ]
        head = [lab_views.summary(lab), self.best.value()]
        return answered([*head, *map(drawn, plots), lab_views.listing(lab)], 7)


def measured_on(machine: object) -> str:
    """Whether a result is of this machine, as HTML."""
    if machine == (here := probes.machine()):
        return f"Measured on this machine: {escape(here)}."
    of = (
        f"on another machine: {escape(str(machine))}"
        if machine
        else "perhaps on another machine, which it does not name"
    )
    return f"Measured {of}. For figures of this machine run <code>{COMMAND} bench systems</code>."


class SystemsAnswer:
    """The newest result of `bench systems`: time per token over budgets. `values` fills `outputs`."""

    def __init__(self) -> None:
        self.empty = html(SYSTEMS_EMPTY, elem_id="systems-empty")
        with gr.Column(visible=False, elem_id="systems-answer") as self.answer:
            self.head = html(elem_id="systems-head")
            self.tpot = plot("systems-tpot")
        self.outputs = [self.empty, self.answer, self.head, self.tpot]

    def values(self, dark: bool) -> list[Any]:
        """The newest result that can be read."""
        found = results.newest("systems")
        if found is None:
            return answered(None, 2)
        file, result = found
        head = (
            f"<div class='whatif-head'><p><span class='tag'>measured</span> {escape(when(str(result['date'])))}, "
            f"{result['tokens']} tokens, {result['rounds']} rounds · {escape(str(result['device']))} · "
            f"{escape(file.name)}.</p><p>{measured_on(result.get('machine'))}</p></div>"
        )
        return answered([head, tpot_over_budgets(result, dark)], 2)
