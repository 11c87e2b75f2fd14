"""Section Quality: accuracy against speed with its Pareto front, the key figures, the table."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from app.services.analysis.best import without_loss
from app.services.analysis.quality import QualityResult, accuracy_of
from app.ui.tabs.analysis_views import card, head, percent, rate, volume
from app.ui.tabs.figures import PALETTE, PLACES, accent, figure, legend
from app.ui.text import cell, table
from app.wording import count, name_of
from core.engine.quality.interval import share_of
from core.measure.evaluate.others import MUCH
from core.measure.evaluate.rows import FIGURES, EvaluationRow, pareto

EMPTY = (
    "<div class='empty-note'><b>Nothing evaluated yet</b><span>The loaded model answers the same questions and "
    "reads the same text once in every mode, to measure what lossy settings cost in quality and gain in "
    "speed.</span></div>"
)
HEADS = (
    ("exact_match", "Exact match"),
    ("tok_s", "Speed"),
    ("perplexity", "Perplexity"),
    ("agreement", "Agreement"),
    ("substituted_rate", "Changed"),
    ("link_bytes", "Link / token"),
    ("saved", "Saved"),
    ("unseen_match", "Unseen"),
    ("kl", "KL"),
)
RATES = ("exact_match", "unseen_match", "agreement", "substituted_rate", "saved")
NAMES = {"exact_match": "Exact match", "agreement": "Agreement with the exact model"}
RIGHT = 0.8  # of the highest speed: from there on names stand left of their points, where there is room
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "cross")


def fronts(answer: QualityResult) -> dict[float, list[EvaluationRow]]:
    """Resident share -> its Pareto-optimal rows in accuracy and speed; fastest first."""
    rows, accuracy = answer.rows, accuracy_of(answer.rows)
    shares = dict.fromkeys(row.residency for row in rows)
    return {
        share: sorted(
            pareto([row for row in rows if row.residency == share], accuracy), key=lambda row: -(row.tok_s or 0.0)
        )
        for share in shares
    }


def plot(answer: QualityResult, dark: bool) -> Any:
    """Accuracy over speed, a colour per resident share, each front a line. None when no mode could be run."""
    import plotly.graph_objects as go

    figure_of = accuracy_of(answer.rows)
    known = [row for row in answer.rows if row.tok_s is not None and getattr(row, figure_of) is not None]
    if not known:
        return None
    traces: list[Any] = []
    right = RIGHT * max((row.tok_s or 0.0 for row in known), default=0.0)
    for at, (share, front) in enumerate(fronts(answer).items()):
        rows, colour = [row for row in known if row.residency == share], PALETTE[at % len(PALETTE)]
        traces.append(
            go.Scatter(
                x=[row.tok_s for row in front],
                y=[100 * getattr(row, figure_of) for row in front],
                mode="lines",
                line=dict(color=colour, width=1.5, dash="dot"),
                hoverinfo="skip",
                showlegend=False,
                name="front",
            )
        )
        traces.append(
            go.Scatter(
                x=[row.tok_s for row in rows],
                y=[100 * getattr(row, figure_of) for row in rows],
                mode="markers+text",
                name=f"{percent(share)} resident",
                cliponaxis=False,
                text=[row.title if row in front else "" for row in rows],
                textfont=dict(size=10),
                textposition=[
                    "middle left" if (row.tok_s or 0.0) > right else PLACES[i % len(PLACES)]
                    for i, row in enumerate(rows)
                ],
                customdata=[row.title for row in rows],
                marker=dict(
                    size=10,
                    symbol=SYMBOLS[at % len(SYMBOLS)],
                    color=colour,
                    line=dict(width=[2 if row in front else 0 for row in rows], color=accent(dark)),
                ),
                hovertemplate=f"%{{customdata}} at {percent(share)}: %{{y:.1f}} %, %{{x:.1f}} tokens/s<extra></extra>",
            )
        )
    link = "link emulated" if any(row.emulated for row in known) else "measured"
    made = figure(
        traces,
        dark,
        f"Accuracy against speed ({link})",
        "tokens per second",
        f"{NAMES[figure_of]} (%)",
        height=420,
        **legend(dark, -0.14),
    )
    made.update_yaxes(range=[-4, 106])
    return made


def summary(answer: QualityResult) -> str:
    """What the figures apply to, and the key figures."""
    about, rows = answer.about, answer.rows
    questions = about["questions"]
    facts = [
        escape(name_of(about["model"])),
        f"{questions['seen']} questions as trained and {questions['unseen']} in new phrasings"
        if questions["seen"]
        else "no questions: they come with the demo model alone",
        f"{count(about['text']['tokens'])} tokens of {escape(about['text']['source'])}",
        f"link: {escape(about['link'])}",
    ]
    tag = "emulated link" if about["emulated"] else "measured"
    notes = [] if answer.whole else ["Not all modes were run yet."]
    if about["profile"] is None:
        notes.append(
            "No profile: a fresh cache starts with the first experts instead of those used most, and some modes "
            "cannot run. Calibrate the model in the tab Calibrate."
        )
    if note := questions.get("note"):  # results of earlier versions have none
        notes.append(escape(note))
    busiest = max((row.others_cores or 0.0 for row in rows), default=0.0)
    if busiest > MUCH:
        notes.append(f"Other programs used up to {busiest:.1f} CPU cores during the runs: compare speeds with care.")
    return head(tag, facts, notes, _cards(answer, questions["seen"] or about["text"]["tokens"]))


def _cards(answer: QualityResult, n: int) -> list[str]:
    """At the smallest resident share: exact mode, the one that is best by the same rule as the sentence below, and the
    fastest ones, each with the interval that accuracy on `n` questions or tokens has."""
    rows, best = answer.rows, without_loss(answer)
    ran = [row for row in rows if not row.problem]
    if not ran:
        return []
    share, figure_of = min(row.residency for row in ran), accuracy_of(rows)
    here = [row for row in ran if row.residency == share]
    exact = next((row for row in here if row.mode == "exact"), None)
    if exact is None:
        return []
    found = [card(f"Exact at {percent(share)}", speed(exact.tok_s), sure(getattr(exact, figure_of), n))]
    if best is not None:
        row = best[1][0] if best[1] is not None else best[0]
        found.append(card("Best without loss", speed(row.tok_s), row.title, sure(getattr(row, figure_of), n)))
    for most, label in ((0.05, "Fastest within 5 points"), (1.0, "Fastest")):
        least = (getattr(exact, figure_of) or 0.0) - most
        row = max((row for row in here if (getattr(row, figure_of) or 0.0) >= least), key=lambda one: one.tok_s or 0.0)
        found.append(card(label, speed(row.tok_s), row.title, sure(getattr(row, figure_of), n)))
    return found


def sure(accuracy: float | None, n: int) -> str:
    """A share of `n` questions or tokens, with its 95 % interval."""
    share = share_of(round((accuracy or 0.0) * n), n)
    if accuracy is None or share is None:
        return rate(accuracy)
    return f"{rate(accuracy)} of {n}, 95 %: {100 * share.low:.0f}–{100 * share.high:.0f} %"


def speed(tok_s: float | None) -> str:
    """Tokens a second."""
    return "–" if tok_s is None else f"{tok_s:.1f} tok/s"


def listing(answer: QualityResult) -> str:
    """Every row that could be run, then the others with the reason."""
    questions, text = answer.about["questions"], answer.about["text"]["tokens"]
    of = {"exact_match": questions["seen"], "unseen_match": questions["unseen"], "agreement": text}
    front = {row.key for rows in fronts(answer).values() for row in rows}
    heads = [
        ("policy", "Mode", "A list of settings"),
        ("budget", "Resident", "Share of the experts"),
        *((key, name, FIGURES[key][1]) for key, name in HEADS),
    ]
    body = "".join(_line(row, row.key in front, of) for row in answer.rows if not row.problem)
    reasons = dict.fromkeys((row.title, row.problem) for row in answer.rows if row.problem)
    out = "".join(f"<dt>{escape(title)}</dt><dd>{escape(problem)}</dd>" for title, problem in reasons)
    more = f"<h3>Could not be run</h3><dl class='reasons'>{out}</dl>" if out else ""
    return (
        f"{table(heads, body)}<p class='minor'>Marked: Pareto-optimal at its residency, no other mode is better in "
        f"both accuracy and speed. In brackets: the 95 % interval.</p>{more}"
    )


def _line(row: EvaluationRow, marked: bool, of: Mapping[str, int]) -> str:
    """`of`: how many questions or tokens a share is of."""
    cells = [cell("policy", row.title, row.title), cell("budget", row.residency, percent(row.residency))]
    for key, _ in HEADS:
        value, share = getattr(row, key), None
        text = formatted(key, value)
        if value is not None and key in of:
            share = share_of(round(value * of[key]), of[key])
        text += f" ({100 * share.low:.0f}–{100 * share.high:.0f})" if share is not None else ""
        cells.append(cell(key, value, text))
    return f"<tr class='{'chosen' if marked else ''}'>{''.join(cells)}</tr>"


def formatted(key: str, value: float | None) -> str:
    """A row's value as displayed."""
    if value is None:
        return "–"
    if key in RATES:
        return rate(value)
    return volume(value) if key == "link_bytes" else speed(value) if key == "tok_s" else f"{value:.3g}"
