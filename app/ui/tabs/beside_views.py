"""Section A beside B: which is faster and whether they say the same, the time of every token, all figures."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from app.ui.tabs.analysis_views import card, head, rate, volume
from app.ui.tabs.figures import PALETTE, figure, legend
from app.ui.text import columns
from app.wording import count, name_of, title_of, value_of
from core.engine.quality.interval import share_of
from core.measure.evaluate.sides import Side, Sides

EMPTY = (
    "<div class='empty-note'><b>Nothing compared yet</b><span>One question is answered under two settings, and the "
    "same tokens are timed under both.</span></div>"
)


def summary(found: Sides) -> str:
    """What was compared, which is faster, and whether the tokens are the same."""
    facts = [
        escape(name_of(found.model)),
        f"{count(found.tokens)} tokens after a prompt of {count(found.prompt_tokens)}",
        f"{found.rounds} rounds by turns",
    ]
    notes = [] if found.differing else ["A and B are the same settings: what differs is noise."]
    tag = "emulated link" if found.a.emulated or found.b.emulated else "measured"
    speeds = [card(f"{letter}: {name}", f"{side.tok_s:.1f} tok/s", hits(side)) for letter, name, side in _sides(found)]
    return head(tag, facts, notes, [*speeds, card("B's time per token over A's", *faster(found)), card(*same(found))])


def _sides(found: Sides) -> tuple[tuple[str, str, Side], ...]:
    return ("A", found.names[0], found.a), ("B", found.names[1], found.b)


def hits(side: Side) -> str:
    """The hit rate in words."""
    return "no expert was requested" if side.hit_rate is None else f"{rate(side.hit_rate)} hits"


def faster(found: Sides) -> tuple[str, str]:
    """The ratio of times, and what may be said of it."""
    assert found.ratio is not None
    middle, low, high = found.ratio
    said = {"a": "A is faster", "b": "B is faster", "": "not told apart"}[found.verdict]
    return f"{middle:.2f}", f"95 %: {low:.2f}–{high:.2f}, {said}"


def same(found: Sides) -> tuple[str, str, str]:
    """Whether both compute the same logits: name, value, and more."""
    if found.equal == found.tokens:
        return "Logits", "identical", f"all {count(found.tokens)} tokens, bit for bit"
    share = share_of(found.agreed, found.tokens)
    assert share is not None
    interval = f"95 %: {100 * share.low:.0f}–{100 * share.high:.0f} %"
    return "Same likeliest token", rate(share.value), f"{interval}, KL {found.kl:.2g} nats"


def plot(found: Sides, dark: bool) -> Any:
    """The time of every token under A and under B."""
    import plotly.graph_objects as go

    traces = [
        go.Scatter(
            x=[*range(1, found.tokens + 1)],
            y=side.token_ms,
            mode="lines",
            name=f"{letter}: {name}",
            line=dict(color=colour, width=1.5),
            hovertemplate=f"{letter}, token %{{x}}: %{{y:.2f}} ms<extra></extra>",
        )
        for colour, (letter, name, side) in zip(PALETTE, _sides(found), strict=False)
    ]
    title = f"Time per token, medians of {found.rounds} rounds"
    made = figure(traces, dark, title, "token of the answer", "ms", height=320, **legend(dark, -0.2))
    made.update_yaxes(rangemode="tozero")
    return made


def listing(found: Sides) -> str:
    """All figures, the settings that differ, and the text."""
    figures: tuple[tuple[str, Callable[[Side], str]], ...] = (
        ("Time to the first token", lambda side: f"{side.first_ms:.1f} ms"),
        ("Time per token", lambda side: f"{sum(side.token_ms) / len(side.token_ms):.2f} ms"),
        ("Hit rate", lambda side: rate(side.hit_rate)),
        ("Misses per token", lambda side: f"{side.misses:.2f}"),
        ("Waited for copies per token", lambda side: f"{side.stall_ms:.2f} ms"),
        ("Copied per token", lambda side: volume(side.link_bytes)),
        ("Changed assignments", lambda side: rate(side.changed)),
    )
    names = [f"{letter}: {name}" for letter, name, _ in _sides(found)]
    measured = [(name, [of(found.a), of(found.b)]) for name, of in figures]
    settings = [
        (title_of(name), [value_of(name, value) for value in values]) for name, values in found.differing.items()
    ]
    return (
        f"{columns('Measured', names, measured)}{columns('Setting', names, settings) if settings else ''}"
        f"<details class='minor'><summary>The text</summary><p><b>{escape(found.question)}</b></p>"
        f"<p>{escape(found.text)}</p></details>"
    )
