"""The result of `bench methods`: what the papers claim of policies and predictors, and the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.store.results import BOUNDS
from bench.harness.report import cell, claim_lines, grid, headline, verdict
from bench.harness.run import Result

WAITED = ", waited for"  # ends the name of a row whose predictor's worker was waited for

# Claim -> (figure, the better, the worse): what a paper reports of its own models.
ORDERINGS: dict[str, tuple[str, str, str]] = {
    "MoEpic table 1: LCP hits more than LRU": ("policy", "lcp", "lru"),
    "MoEpic table 1: LCP hits more than LFU": ("policy", "lcp", "lfu"),
    "MoEpic ablation: LCP hits more than random": ("policy", "lcp", "random"),
    "FineMoE figure 14a: full map search above trajectory alone": ("hit", "expert_map", "expert_map, trajectory alone"),
    "FineMoE figure 14a: dynamic selection above always k": ("hit", "expert_map", "expert_map, always k"),
    "FineMoE figure 14a: map search above request counts": ("hit", "expert_map", "request"),
    "FineMoE figure 14a: map search above the next gate": ("hit", "expert_map", "gate"),
    "FineMoE figure 14b: its eviction hits more than LRU": ("heed", "finemoe", "lru"),
    "FineMoE figure 14b: its eviction hits more than LFU": ("heed", "finemoe", "lfu"),
    "ExpertFlow: PLEC hits more than LRU": ("plec", "plec, routing_path", "lru, routing_path"),
    "ExpertFlow: PLEC hits more than LRU behind perfect predictions": ("plec", "plec, oracle", "lru, oracle"),
    "ExpertFlow table 1: path predictor above temporal (TLP)": ("recall", "routing_path", "recent"),
    "ExpertFlow table 1: path predictor above spatial (SLP)": ("recall", "routing_path", "transitions"),
    "Speculating Experts figure 4: default vectors above the next gate": ("recall", "default_vectors", "gate"),
    "Speculating Experts figure 4: hybrid above the next gate": ("recall", "hybrid", "gate"),
}


def orderings(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which of the papers' orderings hold here, for every number of slots: as in the engine, and with predictors waited
    for where that is another. Hit rates of predictors with LRU are those that the engine itself had."""
    said = []
    for claim, (figure, better, worse) in ORDERINGS.items():
        tables = {"policy": found["hit_rate"].get("layer", {}), "heed": found["behind"], "plec": found.get("plec", {})}
        table = tables.get(figure, found["prefetchers"])
        key = "recall_at_k" if figure == "recall" else "hit_rate"

        def pairs(how: str, lived: bool, key: str = key, names: Any = (better, worse), table: Any = table) -> Any:
            rows = {share: [row.get(name + how) or row.get(name) for name in names] for share, row in table.items()}
            return {share: [_of(one, key, lived) for one in row] for share, row in rows.items()}

        of_engine = pairs("", figure == "hit")
        one = {"claim": claim, "figure": key, "pairs": of_engine, "holds": verdict(list(of_engine.values()))}
        if (waited_for := pairs(WAITED, False)) != pairs("", False):
            one |= {"pairs_waited_for": waited_for, "holds_waited_for": verdict(list(waited_for.values()))}
        said.append(one)
    return said


def _of(row: Any, key: str, lived: bool) -> Any:
    """A figure of a row: the engine's own if `lived`; a policy's row is its hit rate alone."""
    if not isinstance(row, dict):
        return row
    return row["engine"][key] if lived else row[key]


PREFETCHED = ("", "hits", "TPOT ms", "net ms", "link MB", "wasted MB", "recall", "engine's hits", "TPOT ms")


def table(r: Result) -> list[str]:
    lines = [f"{headline(r)}; {r['tokens']} decoded tokens, simulated"]
    for scope, sizes in r["hit_rate"].items():
        names = sorted(sizes["50.0%"], key=lambda name: -(sizes["50.0%"][name] or 0.0))
        rows = [(BOUNDS.get(n, n), *(cell(row.get(n), ".1%") for row in sizes.values())) for n in names]
        lines += [f"Hit rate by policy and slots, scope {scope}:", *grid(("", *sizes), rows)]
    by_layer = [(share, *(cell(rate, ".1%") for rate in row["lfu"])) for share, row in r["hit_rate_by_layer"].items()]
    lcp = [
        (share, f"rho {one['rho']:g} omega {one['omega']}", cell(one["hit_rate"], ".1%"), f"{one['tpot_ms']:.2f} ms")
        for share, settings in r["lcp_settings"].items()
        for one in settings
    ]
    lines += [
        "LFU's hit rate by layer, every layer with as many slots:",
        *grid([""] * len(by_layer[0]), by_layer),
        "LCP by rho and omega, slots of each layer, no prefetching:",
        *grid([""] * 4, lcp),
    ]
    apart = {r["distance"]["share"]: r["distance"]["rows"]}
    one_pool = "one cache for all layers, no guard,"
    for title, by_share in (
        ("ahead of LRU", r["prefetchers"]),
        (f"policies behind {r['behind_predictor']}, no guard", r["behind"]),
        (f"{one_pool} PLEC behind its own predictor and perfect ones", r["plec"]),
        (f"{one_pool} FineMoE's eviction behind expert maps by layers ahead", apart),
    ):
        for share, row in by_share.items():
            lines.append(f"With prefetching, {title}, {share} of the experts in slots (waited for = a bound):")
            lines += grid(PREFETCHED, [(name, *_prefetched(one)) for name, one in row.items()])
    lines += [
        f"Replayed at {share}: {one['compute_ms']:.2f} ms a token, {one['miss_ms']:.2f} ms and the copy's "
        f"{one['load_ms']:.2f} ms a miss, as in the engine"
        for share, one in r["clock"].items()
    ]
    return [*lines, "The papers' orderings here, and with predictors waited for:", *claim_lines(r["orderings"])]


def _prefetched(one: Mapping[str, Any]) -> tuple[str, ...]:
    own = one.get("engine")
    return (
        f"{one['hit_rate']:.1%}",
        f"{one['tpot_ms']:.2f}",
        f"{one['net_ms'] or 0:.2f}",
        f"{one['demand_mb'] + one['prefetch_mb']:.1f}",
        f"{one['wasted_mb']:.1f}",
        f"{one['recall_at_k'] or 0:.1%}",
        f"{own['hit_rate']:.1%}" if own else "",
        f"{own['tpot_ms']:.2f}" if own else "",
    )
