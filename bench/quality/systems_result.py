"""The result of `bench systems` as a table."""

from collections.abc import Mapping
from typing import Any

from app.store.results import BOUNDS
from bench.harness.report import headline
from bench.harness.run import Result
from core.measure.evaluate.others import MUCH
from core.system.wording import cell, cells, grid

HEADS = ("", "TTFT", "TPOT", "compute", "predict", "stall", "idle", "hits", "demand", "prefetch", "wasted", "")
FORMS = {
    "exact_match": ".1%",
    "unseen_match": ".1%",
    "agreement": ".1%",
    "kl": ".3f",
    "perplexity": ".1f",
    "substituted_rate": ".1%",
}


def table(r: Result) -> list[str]:
    """A block of lines for every budget: the systems by time per token, and the bounds."""
    own = "EMULATED" if r["link"] == "emulated" else "this machine's own"
    lines = [
        f"{headline(r)}; {r['tokens']} decoded tokens after {r['prompts']} prompts, {r['rounds']} rounds; link: {own}, "
        f"{r['link_gbps']:g} GB/s",
        "Times in ms, MB a token. TPOT = compute + predict + stall + idle, in the round with the median TPOT.",
    ]
    for budget, about in r["budgets"].items():
        lines.append(f"Budget {budget}: {about['slots']} slots, {about['share']:.1%} of the experts")
        found = [(r["titles"][name], of[budget]) for name, of in r["systems"].items()]
        ran = sorted((row for row in found if not row[1]["problem"]), key=lambda row: float(row[1]["tpot_ms"]))
        rows = [(title, *_cells(one)) for title, one in ran]
        for name, bound in r["bounds"][budget].items():
            hits = "" if bound.get("hit_rate") is None else f"{bound['hit_rate']:.1%}"
            rows.append((f"= {BOUNDS[name]}", "", cell(bound["tpot_ms"]), *[""] * 4, hits, *[""] * 4))
        lines += grid(HEADS, rows)
        lines += [f"  {title}: {one['problem']}" for title, one in found if one["problem"]]
    lossy = [
        (f"{r['titles'][name]} at {budget}", one["quality"])
        for name, of in r["systems"].items()
        for budget, one in of.items()
        if one["quality"] is not None
    ]
    if lossy:
        rows = [("= Exact", r["exact_quality"])] if r["exact_quality"] else []
        heads = ("Systems that change answers", "match", "unseen", "agree", "KL", "perpl.", "changed", "")
        lines += grid(heads, [(what, *cells(one, FORMS), one["problem"]) for what, one in [*rows, *lossy]])
    if (r.get("others_cores") or 0.0) > MUCH:
        lines.append(f"Other programs used {r['others_cores']:.1f} CPU cores: its times mean little.")
    return lines


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    computed = one["compute_ms"] - one["predict_ms"]
    times = one["ttft_ms"], one["tpot_ms"], computed, one["predict_ms"], one["stall_ms"], one["idle_ms"]
    sizes = (one[f"{name}_bytes"] / 1e6 for name in ("demand", "prefetch", "wasted"))
    return (
        *(f"{value:.2f}" for value in times),
        f"{one['hit_rate'] or 0.0:.1%}",
        *(f"{value:.3f}" for value in sizes),
        "" if one["exact"] else "LOSSY",
    )
