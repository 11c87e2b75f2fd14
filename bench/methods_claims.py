"""What the papers claim of policies and predictors, asked of the result of `bench methods`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.claims import verdict

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
    """A figure of a row: the engine's own where it is asked for; a policy's row is its hit rate alone."""
    if not isinstance(row, dict):
        return row
    return row["engine"][key] if lived else row[key]
