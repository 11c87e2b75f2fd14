"""The text of tab Analysis: what was simulated, the key figures, the table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.services.analysis.whatif import BOUNDS, NONE, Row, Table, less, lru_cliff, times, title
from app.ui import text
from app.ui.tabs.analysis_figures import colours
from app.wording import count, name_of
from core.engine.quality.interval import surely_more
from core.simulate import BELADY, BELADY_BYPASS
from core.simulate.blocks import gain
from core.system.wording import format_bytes

EMPTY = (
    "<div class='empty-note'><b>Nothing compared yet</b><span>Choose recorded routing and press Compare: its "
    "tokens are replayed through every policy, without the model and without slowing down the chat.</span></div>"
)
HEADS = (
    ("policy", "Policy"),
    ("predictor", "Prefetcher"),
    ("budget", "Budget"),
    ("hit", "Hit rate"),
    ("tpot", "Time per token"),
    ("bytes", "Over the link"),
    ("belady", "Below best possible (points)"),
    ("perfect", "Above perfect prefetch"),
    ("resident", "Above all resident"),
)
HELP = {
    "hit": "Share of requested experts that were resident, while decoding",
    "tpot": "Predicted milliseconds per token",
    "bytes": "Copied per token, prefetches included",
    "belady": "Percentage points of hit rate below Belady's, the best possible with bypass on or off, as set",
    "perfect": "Milliseconds per token above those with every needed copy overlapped with compute, as far as the "
    "same link allows",
    "resident": "Milliseconds per token above those with every expert resident",
}


def summary(table: Table) -> str:
    """What the figures apply to, and four key figures."""
    about = table.about
    facts = [
        f"{count(about.tokens)} tokens of {escape(about.name)}",
        *([escape(name_of(about.model))] if about.model else []),
        f"{about.layers} layers × {about.experts} experts, top-{about.top_k}",
        "slots per layer" if about.scope == "layer" else "one pool for all layers",
        f"caches start {about.start}",
        escape(about.link),
    ]
    return head("simulated", facts, [*map(escape, about.notes)], cards(table))


def _ahead(row: Row, other: Row, of: int) -> bool:
    """Whether a token costs less in `row`, the best of several, beyond noise; not where no parts of the tokens are
    known."""
    less_cost = gain(row.blocks, other.blocks)
    return less_cost is not None and surely_more(*less_cost, of)


def cards(table: Table) -> list[str]:
    """At the current budget: the policy in use, the best one, Belady's; and the position of LRU's cliff."""
    policy, predictor, _ = table.about.chosen
    slots = nearest(table, table.about.chosen[2])
    rows = [row for row in table.rows if row.slots == slots]
    mine = next(
        (row for row in rows if (row.policy, row.predictor) == (policy, predictor)),
        next((row for row in rows if (row.policy, row.predictor) == (policy, NONE)), None),
    )
    bound, share = table.bound(slots), f"at {100 * slots / table.total:.3g} %"
    found = []
    if mine is not None:
        found.append(card(f"{named(mine)}, in use", rate(mine.hit_rate), milliseconds(mine.tpot_ms), share))
    if rows:
        best = min(rows, key=lambda row: (row.tpot_ms if row.tpot_ms is not None else 0.0, -(row.hit_rate or 0.0)))
        clear = mine is None or best is mine or _ahead(best, mine, len(rows) - 1)
        verdict = "best of these" if clear else "first of these, but not clearly ahead of the one in use"
        found.append(card(f"{named(best)}, {verdict}", rate(best.hit_rate), milliseconds(best.tpot_ms), share))
    found.append(card(BOUNDS[BELADY], rate(bound.hit_rate), milliseconds(bound.tpot_ms), share))
    if bound.bypass_hit_rate is not None:
        found.append(
            card(BOUNDS[BELADY_BYPASS], rate(bound.bypass_hit_rate), milliseconds(bound.bypass_tpot_ms), share)
        )
    edge = lru_cliff(table)
    found.append(
        card(
            "LRU cliff",
            "none" if edge is None else f"{100 * edge.slots / table.total:.3g} %",
            "no budget below which LRU collapses" if edge is None else f"{rate(edge.hit_rate)} there",
            "" if edge is None else "below it LRU's hit rate falls fastest",
        )
    )
    return found


def legend(table: Table, dark: bool) -> str:
    """One legend for all curves."""
    lines = [
        (title("eviction", policy) + (" (in use)" if policy == table.about.chosen[0] else ""), colour, "solid")
        for policy, colour in colours(table, dark).items()
    ]
    lines.sort(key=lambda line: not line[0].endswith("(in use)"))
    lines.append((BOUNDS[BELADY], "currentColor", "dashed"))
    if any(bound.bypass_hit_rate is not None for bound in table.bounds):
        lines.append((BOUNDS[BELADY_BYPASS], "currentColor", "double"))
    if table.resident_ms is not None:
        lines.append(("Perfect prefetch over the same link", "currentColor", "dotted"))
    return (
        "<ul class='legend'>"
        + "".join(
            f"<li><i style='border-top: 2px {style} {colour}'></i>{escape(name)}</li>" for name, colour, style in lines
        )
        + ("</ul>")
    )


def head(tag: str, facts: Sequence[str], notes: Sequence[str], cards: Sequence[str]) -> str:
    """What figures apply to, and the key figures; all in HTML."""
    lines = "".join(f"<p class='minor'>{note}</p>" for note in notes)
    return (
        f"<div class='whatif-head'><p><span class='tag'>{tag}</span> {' · '.join(facts)}.</p>{lines}"
        f"<div class='figures'>{''.join(cards)}</div></div>"
    )


def card(name: str, value: str, more: str, where: str = "") -> str:
    """One key figure."""
    return (
        f"<div class='card'><small title='{escape(name, quote=True)}'>{escape(name)}</small><b>{escape(value)}</b>"
        f"<small>{escape(' · '.join(part for part in (more, where) if part))}</small></div>"
    )


def named(row: Row) -> str:
    """Policy and, where there is one, prefetcher."""
    policy = title("eviction", row.policy)
    return policy if row.predictor == NONE else f"{policy} + {title('predictor', row.predictor)}"


def nearest(table: Table, slots: int) -> int:
    """The simulated budget closest to this number of slots."""
    return min((bound.slots for bound in table.bounds), key=lambda n: (abs(n - slots), n))


def budgets(table: Table) -> list[tuple[str, int]]:
    """The budget menu: every simulated budget, and all of them (0)."""
    return [
        *((f"{percent(bound.slots / table.total)} ({bound.slots} experts)", bound.slots) for bound in table.bounds),
        ("All budgets", 0),
    ]


def listing(table: Table, slots: int) -> str:
    """The table at one budget, or at all (0): fastest first, bounds last."""
    rows = [row for row in table.rows if slots in (0, row.slots)]
    rows.sort(key=lambda row: (row.slots, row.tpot_ms if row.tpot_ms is not None else 0.0, -(row.hit_rate or 0.0)))
    body = [_line(table, row) for row in rows]
    for bound in (one for one in table.bounds if slots in (0, one.slots)):
        share = bound.slots / table.total
        for name, hit, tpot, misses in (
            (BELADY, bound.hit_rate, bound.tpot_ms, bound.misses),
            (BELADY_BYPASS, bound.bypass_hit_rate, bound.bypass_tpot_ms, bound.bypass_misses),
        ):
            if name == BELADY or hit is not None:
                cells = (
                    BOUNDS[name],
                    "None",
                    share,
                    hit,
                    tpot,
                    times(misses, table.about.expert_bytes or None),
                    less(table.best_hit_rate(bound.slots), hit),
                    less(tpot, bound.perfect_ms),
                    less(tpot, table.resident_ms),
                )
                body.append(_cells(cells, "bound"))
        if bound.perfect_ms is not None:
            body.append(
                _cells(
                    (
                        "Perfect prefetch, same link",
                        "",
                        share,
                        None,
                        bound.perfect_ms,
                        times(bound.misses, table.about.expert_bytes or None),
                        None,
                        0.0,
                        less(bound.perfect_ms, table.resident_ms),
                    ),
                    "bound",
                )
            )
    if table.resident_ms is not None:
        body.append(_cells(("Everything resident", "", 1.0, 1.0, table.resident_ms, 0.0, None, None, 0.0), "bound"))
    return text.table([(key, name, HELP.get(key, name)) for key, name in HEADS], "".join(body))


def _line(table: Table, row: Row) -> str:
    bound, link = table.bound(row.slots), times(row.copies, table.about.expert_bytes or None)
    chosen = (row.policy, row.predictor) == table.about.chosen[:2]
    return _cells(
        (
            title("eviction", row.policy),
            title("predictor", row.predictor),
            row.slots / table.total,
            row.hit_rate,
            row.tpot_ms,
            link,
            less(table.best_hit_rate(row.slots), row.hit_rate),
            less(row.tpot_ms, bound.perfect_ms),
            less(row.tpot_ms, table.resident_ms),
        ),
        "chosen" if chosen else "",
    )


def _cells(values: Sequence[str | float | None], kind: str) -> str:
    shown = []
    for (key, _), value in zip(HEADS, values, strict=True):
        write = {"budget": percent, "hit": rate, "bytes": volume, "belady": points}.get(key, ms)
        shown.append(text.cell(key, value, value if isinstance(value, str) else write(value)))
    return f"<tr class='{kind}'>{''.join(shown)}</tr>"


def rate(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


def points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def milliseconds(value: float | None) -> str:
    return "" if value is None else ms(value)


def volume(value: float | None) -> str:
    return "–" if value is None else format_bytes(value)
