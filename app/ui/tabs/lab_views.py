"""The predictor lab's figures and table: recall by layer, and the time saved on this link."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from app.services.analysis.lab import Lab, Run, named
from app.services.analysis.whatif import NONE, mean, title
from app.ui.tabs.analysis_views import card, head, milliseconds, ms, rate, volume
from app.ui.tabs.figures import PALETTE, PLACES, accent, figure, heatmap, legend, quiet
from app.ui.text import cell, table
from app.wording import count, name_of
from core.simulate.prefetchers import ORACLE

EMPTY = (
    "<div class='empty-note'><b>No prefetcher tested yet</b><span>Test them on the same tokens: what share of "
    "each layer's experts they predict, how much time that saves on this link, and how many bytes they copy for "
    "nothing.</span></div>"
)
HEADS = (
    ("policy", "Prefetcher"),
    ("recall", "Recall@{k}"),
    ("recall", "Recall@{m}"),
    ("hit", "Hit rate"),
    ("tpot", "Time per token"),
    ("tpot", "Saved"),
    ("bytes", "Prefetched"),
    ("bytes", "Wasted"),
)
FLAT_MS = 0.01  # where less is saved, the axis ends here: it would show noise


def tested(lab: Lab) -> list[Run]:
    """Prefetchers with known recall, best first."""
    known = [run for run in lab.ran() if mean(run.recall) is not None]
    return sorted(known, key=lambda run: -(mean(run.recall) or 0.0))


def recall_map(lab: Lab, dark: bool, most: bool = False) -> Any:
    """Layers x prefetchers, recall in percent at k, or at m."""
    runs = tested(lab)
    if not runs:
        return None
    rows: list[Sequence[float | None]] = [run.recall_most if most else run.recall for run in runs]
    values = [[None if v is None else 100 * v for v in row] for row in rows]
    at = lab.most if most else lab.about.top_k
    trace = heatmap(
        values[::-1],
        dark,
        y=[named(run.predictor) for run in runs][::-1],
        zmin=0,
        zmax=100,
        hovertemplate=f"%{{y}}, layer %{{x}}: %{{z:.1f}} %<extra>recall@{at}</extra>",
        **({"texttemplate": "%{z:.0f}"} if lab.about.layers <= 16 else {}),
    )
    made = figure([trace], dark, f"Recall@{at} by layer, in percent (simulated)", "layer", height=120 + 28 * len(runs))
    made.update_xaxes(dtick=max(1, -(-lab.about.layers // 16)))
    return made


def worth(lab: Lab, dark: bool) -> Any:
    """Time saved against bytes wasted for each prefetcher: up and left is good."""
    import plotly.graph_objects as go

    runs = [
        run
        for run in lab.ran()
        if run.saved_ms is not None and run.wasted_bytes is not None and run.predictor not in (NONE, ORACLE)
    ]
    if not runs:
        return None
    points = [
        go.Scatter(
            x=[(run.wasted_bytes or 0.0) / 1e6],
            y=[run.saved_ms],
            mode="markers+text",
            text=[named(run.predictor)],
            textposition=PLACES[at % len(PLACES)],
            textfont=dict(size=10),
            cliponaxis=False,
            marker=dict(
                size=13, color=accent(dark) if run.predictor == lab.about.chosen[1] else PALETTE[at % len(PALETTE)]
            ),
            hovertemplate=f"{named(run.predictor)}: %{{y:.2f}} ms saved, %{{x:.3g}} MB wasted a token<extra></extra>",
        )
        for at, run in enumerate(runs)
    ]
    made = figure(points, dark, "Saved against wasted, per token (simulated)", "wasted copies (MB)", "saved (ms)", 340)
    made.add_hline(y=0, line=dict(color=quiet(dark), width=1, dash="dash"))
    most = max((run.wasted_bytes or 0.0) / 1e6 for run in runs) or 1.0
    made.update_xaxes(range=[-0.15 * most, 1.25 * most])
    if max(abs(run.saved_ms or 0.0) for run in runs) < FLAT_MS:
        made.update_yaxes(range=[-FLAT_MS, FLAT_MS])
    return made


def bars(lab: Lab, dark: bool) -> Any:
    """Mean recall at k and at m."""
    import plotly.graph_objects as go

    runs = tested(lab)
    if not runs:
        return None
    names = [named(run.predictor) for run in runs][::-1]
    both = [
        (f"recall@{lab.most}", [run.recall_most for run in runs], PALETTE[2]),
        (f"recall@{lab.about.top_k}", [run.recall for run in runs], accent(dark)),
    ]
    traces = [
        go.Bar(
            y=names,
            x=[100 * (mean(values) or 0.0) for values in of][::-1],
            name=label,
            orientation="h",
            marker=dict(color=colour),
            hovertemplate=f"%{{y}}: %{{x:.1f}} %<extra>{label}</extra>",
        )
        for label, of, colour in both
    ]
    made = figure(
        traces,
        dark,
        "Mean recall (simulated)",
        height=340,
        barmode="group",
        **legend(dark, -0.12, traceorder="reversed"),
    )
    made.update_xaxes(range=[0, 102], ticksuffix=" %")
    return made


def summary(lab: Lab) -> str:
    """What the figures apply to, and the key figures."""
    about = lab.about
    policy, _, slots = about.chosen
    facts = [
        f"{count(about.tokens)} tokens of {escape(about.name)}",
        *([escape(name_of(about.model))] if about.model else []),
        f"{title('eviction', policy)} with {slots} slots ({100 * slots / (about.layers * about.experts):.3g} %)",
        f"caches start {about.start}",
        escape(about.link),
    ]
    return head("simulated", facts, [*map(escape, about.notes)], _cards(lab))


def _cards(lab: Lab) -> list[str]:
    runs, found = lab.ran(), []
    if known := tested(lab):
        found.append(card("Best recall", rate(mean(known[0].recall)), named(known[0].predictor)))
    timed = [run for run in runs if run.saved_ms is not None and run.predictor not in (NONE, ORACLE)]
    if timed:
        best = max(timed, key=lambda run: run.saved_ms or 0.0)
        found.append(card("Saves most", ms(best.saved_ms), named(best.predictor), "a token"))
    for predictor, name in ((NONE, "Without a prefetcher"), (ORACLE, "Oracle, same link and slots")):
        if (run := next((run for run in runs if run.predictor == predictor), None)) is not None:
            found.append(card(name, rate(run.hit_rate), milliseconds(run.tpot_ms)))
    return found


def listing(lab: Lab) -> str:
    """The prefetchers that could be run, then the others with the reason."""
    heads = [(key, name.format(k=lab.about.top_k, m=lab.most), "") for key, name in HEADS]
    runs = sorted(lab.ran(), key=lambda run: (-(run.saved_ms or 0.0), -(mean(run.recall) or 0.0)))
    out = [run for run in lab.runs if run.problem]
    reasons = "".join(f"<dt>{escape(named(run.predictor))}</dt><dd>{escape(run.problem)}</dd>" for run in out)
    more = f"<h3>Not run on this routing</h3><dl class='reasons'>{reasons}</dl>" if out else ""
    return table(heads, "".join(_line(lab, run) for run in runs)) + more


def _line(lab: Lab, run: Run) -> str:
    values: list[tuple[float | None, str]] = [
        (mean(run.recall), rate(mean(run.recall))),
        (mean(run.recall_most), rate(mean(run.recall_most))),
        (run.hit_rate, rate(run.hit_rate)),
        (run.tpot_ms, ms(run.tpot_ms)),
        (run.saved_ms, ms(run.saved_ms)),
        (run.prefetch_bytes, volume(run.prefetch_bytes)),
        (run.wasted_bytes, volume(run.wasted_bytes)),
    ]
    cells = "".join(cell(key, *one) for (key, _), one in zip(HEADS[1:], values, strict=True))
    how = ", as recorded" if run.replayed else ", waited for" if run.waited_for else ""
    name = named(run.predictor) + how
    kind = "chosen" if run.predictor == lab.about.chosen[1] else "bound" if run.predictor == ORACLE else ""
    return f"<tr class='{kind}'>{cell('policy', name, name)}{cells}</tr>"
