"""Tab Batch: how far it is, what a pass needs, the latest answers."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from app.services.batcher import BatchJob
from app.ui.tabs.analysis_views import card
from app.ui.tabs.figures import accent, figure
from app.wording import count, percent
from core.system.wording import format_bytes

EMPTY = (
    "<div class='empty-note'><b>No batch yet</b><span>A file of prompts is answered into another file, many at a time: "
    "an expert that several of them need is fetched once and used by all.</span></div>"
)
EXPLAINED = (
    "Of this run. Experts a layer: the distinct ones that a pass over one token of each answer needs, mean. Tokens per "
    "copy: (token, expert) pairs computed for each expert that was copied. Scheduler: experts a layer that a batch is "
    "expected to need, in the order of arrival → as divided."
)
TEXT = 160  # characters of an answer in the table


def cards(job: BatchJob) -> str:
    """The key figures, all of this run."""
    known, figures = job.answered, job.figures
    if known is None:
        return ""
    done = known.before + known.done
    errors = (
        f"{count(known.errors)} with an error"
        if known.errors
        else "no new errors"
        if known.failed_before
        else "no errors"
    )
    before = f"{count(known.before)} were answered before" if known.before else ""
    before += f", {count(known.failed_before)} of them with an error: tick the box to ask again" * bool(
        known.failed_before
    )
    found = [
        card("Answered", f"{count(done)} of {count(known.total)}", errors, before),
        card("Speed", f"{known.tok_s:.1f} tok/s", f"{count(known.tokens)} tokens"),
    ]
    if figures.hit_rate is not None:
        found.append(card("Hit rate", percent(figures.hit_rate), "of requested experts"))
    if figures.union is not None:
        found.append(card("Experts a layer", f"{figures.union:.1f} of {figures.shape.experts}", "in a token pass"))
    if figures.uses_per_copy is not None:
        found.append(card("Tokens per copy", f"{figures.uses_per_copy:.1f}", f"{format_bytes(figures.bytes)} copied"))
    elif figures.uses_per_expert is not None:
        found.append(card("Tokens an expert", f"{figures.uses_per_expert:.1f}", "nothing was copied"))
    if (scheduled := figures.scheduled) is not None:
        found.append(
            card("Scheduler", f"{scheduled.arrival:.1f} → {scheduled.chosen:.1f}", f"experts, in {scheduled.ms:.2f} ms")
        )
    return f"<div class='figures'>{''.join(found)}</div><p class='minor'>{EXPLAINED}</p>"


def plot(job: BatchJob, dark: bool) -> Any:
    """The experts that the last passes needed. None before there are some."""
    import plotly.graph_objects as go

    unions = list(job.figures.unions)
    if len(unions) < 2:
        return None
    line = go.Scatter(
        y=unions,
        mode="lines",
        line=dict(color=accent(dark), width=1.5),
        hovertemplate="%{y:.1f} experts a layer<extra></extra>",
    )
    return figure(
        [line],
        dark,
        "Distinct experts a layer, last passes",
        "pass",
        "experts",
        240,
        yaxis_range=[0, 1.05 * max(unions)],
    )


def latest(job: BatchJob) -> str:
    """The answers that came last, the newest first."""
    rows = "".join(map(_row, reversed(list(job.latest))))
    if not rows:
        return ""
    heads = "<th class='name'>Line</th><th class='why'>Answer</th><th>Tokens</th>"
    return (
        f"<h3>Latest answers</h3><div class='rows-box'><table class='rows'><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def about(job: BatchJob) -> str:
    """Where the answers are."""
    where = escape(str(job.answers.path)) if job.answers is not None else ""
    return f"<p class='minor'>Answers are in <code>{where}</code>. A run that was stopped continues there.</p>"


def _row(record: Mapping[str, Any]) -> str:
    name, text, tokens = _shown(record)
    short = text if len(text) <= TEXT else text[:TEXT] + "…"
    return f"<tr><td class='name'>{escape(str(name))}</td><td class='why'>{escape(short)}</td><td>{tokens}</td></tr>"


def _shown(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """(its id, its text or error, its tokens) of a record in either form."""
    name = record.get("custom_id", record.get("id", ""))
    error = record.get("error")
    if error:
        return name, f"Error: {error['message'] if isinstance(error, Mapping) else error}", ""
    if "response" not in record:
        return name, str(record.get("text") or ""), str(record.get("answer_tokens") or "")
    body = record["response"]["body"]
    choice = body["choices"][0]
    text = choice.get("text") if "message" not in choice else choice["message"].get("content")
    return name, str(text or ""), str((body.get("usage") or {}).get("completion_tokens", ""))
