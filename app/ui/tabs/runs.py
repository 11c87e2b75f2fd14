"""Tab Sessions, section Runs: every answer with its figures, and some of them side by side with what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from app.services.host import Host
from app.services.runs import Run, differing, runs
from app.ui.controls import LIVE, html
from app.ui.tabs.library_views import when
from app.ui.tabs.messages import duration
from app.ui.text import cell, columns, table
from app.wording import lossy, name_of, percent, scored, title_of, value_of

SIDES = 4  # runs that are compared at once
EMPTY = "<p class='minor'>No answer has figures yet.</p>"
DOWNLOAD = "<p><a href='/export/runs.csv' download id='runs-csv'>Download all runs (CSV)</a></p>"
SAME = "<p class='minor'>All recorded settings are the same: what differs is noise, or the text.</p>"
NOT_RECORDED = "not recorded"
SETTINGS = "budget", "eviction", "predictor"  # in the table of all

Column = tuple[str, str, Callable[[Run], float | str | None], Callable[[Run], str]]


class Runs:
    """Drawn when it is opened, since it reads the settings of every answer."""

    def __init__(self, host: Host) -> None:
        self.host = host
        with gr.Accordion("Runs: every answer with its figures", open=False, elem_id="runs") as accordion:
            self.table = html(EMPTY, elem_id="runs-table")
            self.chosen = gr.Dropdown(
                [],
                label="Side by side",
                info=f"Two to {SIDES} answers: their figures, and the settings in which they differ.",
                multiselect=True,
                max_choices=SIDES,
                elem_id="runs-chosen",
            )
            self.sides = html(elem_id="runs-sides")
        accordion.expand(self._show, None, [self.table, self.chosen, self.sides], **LIVE)
        self.chosen.change(self._compare, self.chosen, self.sides, **LIVE)

    def _show(self) -> list[Any]:
        found = runs(self.host.store)
        return [listing(found), gr.update(choices=[(line(one), one.answer) for one in found], value=[]), ""]

    def _compare(self, chosen: Sequence[int]) -> str:
        of = {one.answer: one for one in runs(self.host.store)}
        return side_by_side([of[answer] for answer in chosen if answer in of])


def setting(one: Run, name: str) -> str:
    """A setting of a run in the page's words."""
    return value_of(name, one.settings[name]) if name in one.settings else NOT_RECORDED


def line(one: Run) -> str:
    """What it is called where it is chosen."""
    return f"{when(one.created)} · {one.title[:32]} · {one.stats['tok_s']:.1f} tok/s · {setting(one, 'eviction')}"


def speed(one: Run) -> str:
    return f"{one.stats['tok_s']:.1f} tok/s"


def first(one: Run) -> str:
    return duration(one.stats["ttft_ms"])


def hits(one: Run) -> str:
    return "–" if one.stats["hit_rate"] is None else percent(one.stats["hit_rate"])


def quality(one: Run) -> str:
    return ", ".join([lossy(one.stats), *scored(one.quality)])


TABLE: tuple[Column, ...] = (
    (
        "Answer",
        "When it began, and the chat that it is in.",
        lambda one: one.created,
        lambda one: f"{when(one.created)}, {one.title}",
    ),
    ("Model", "", lambda one: name_of(one.model), lambda one: name_of(one.model)),
    ("Speed", "Of its tokens after the first.", lambda one: one.stats["tok_s"], speed),
    ("TTFT", "From its turn to its first token.", lambda one: one.stats["ttft_ms"], first),
    ("Tokens", "Of the answer.", lambda one: one.stats["new_tokens"], lambda one: str(one.stats["new_tokens"])),
    ("Hit rate", "Of its decoded tokens.", lambda one: one.stats["hit_rate"], hits),
    ("Quality", "EXACT, or what was changed and, where that was scored, at what cost.", quality, quality),
)
FIGURES: dict[str, Callable[[Run], str]] = {
    "Speed": speed,
    "Time to the first token": first,
    "Tokens": lambda one: str(one.stats["new_tokens"]),
    "Hit rate": hits,
    "Time per token": lambda one: f"{one.stats['tpot_ms']:.2f} ms",
    "Waited for copies per token": lambda one: f"{one.stats['stall_ms']:.2f} ms",
    "Link": lambda one: "emulated" if one.stats["emulated"] else "own",
    "Quality": quality,
    "Turned while it ran": lambda one: ", ".join(map(title_of, one.turned)) or "–",
}


def listing(found: Sequence[Run]) -> str:
    """All runs as a table that can be sorted."""
    heads = [("name" if not at else "", name, why) for at, (name, why, *_) in enumerate(TABLE)]
    heads += [("", title_of(name), "When the answer began.") for name in SETTINGS]
    rows = "".join(f"<tr>{_cells(one)}</tr>" for one in found)
    return DOWNLOAD + table(heads, rows) if found else EMPTY


def _cells(one: Run) -> str:
    cells = [cell("" if at else "name", value(one), text(one)) for at, (_, _, value, text) in enumerate(TABLE)]
    cells += [cell("", one.settings.get(name), setting(one, name)) for name in SETTINGS]
    return "".join(cells)


def side_by_side(found: Sequence[Run]) -> str:
    """Figures of some runs, and the settings in which they differ."""
    if len(found) < 2:
        return "<p class='minor'>Choose at least two answers.</p>" if found else ""
    heads = [f"{when(one.created)}, {one.title}" for one in found]
    figures = columns("Measured", heads, [(name, [*map(of, found)]) for name, of in FIGURES.items()])
    settings = [
        (title_of(name), [value_of(name, value) if value else NOT_RECORDED for value in values])
        for name, values in differing(found).items()
    ]
    return figures + (columns("Setting", heads, settings) if settings else SAME)
