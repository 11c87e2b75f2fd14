"""FineMoE: what it proposes, where it is here, and its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.papers.parts import HOLDS, NO, PART, Paper, Part, Row
from bench.papers.sources import DRAWING, Claims, Reading, Stated, Systems, never

RIVALS = ("se_moe", "mixtral_offloading", "promoe", "moe_infinity")
SEARCHED = ("live_searches", "residents")
BATCH = "No bench lets requests arrive one after the other yet; FineMoE's search follows one sequence."
FREE = 0.02  # of a token's time: what the paper calls negligible is 1 %


def searching(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """What map searches cost the computing thread of a token: their own part of it, and the stall."""
    one = result["predictors"].get("expert_map")
    if one is None:
        return None
    own, token = one["predict_ms"], one["none_ms"]
    verdict = HOLDS if own <= FREE * token and not one["stall_ms"] else NO
    return verdict, (
        f"Of a token of {token:.2f} ms the computing thread spends {own:.2f} ms on maps ({own / token:.0%}), and "
        f"waits {one['stall_ms']:.2f} ms for a search; a token takes {one['added_ms']:.2f} ms longer in all. At "
        f"most {FREE:.0%} would be next to nothing; the model is small."
    )


def best_distance(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Hits and time per token over prefetch distances: whether the least time is at neither end."""
    if not (found := result.get("distance")):
        return None
    rows = {int(distance): row for distance, row in found["rows"].items()}
    ordered = sorted(rows)
    if len(ordered) < 3:
        return None
    best = min(ordered, key=lambda distance: float(rows[distance]["tpot_ms"]))
    text = "; ".join(
        f"{distance} ahead hits {row['hit_rate']:.1%}, late {row['late_rate']:.1%}, {row['tpot_ms']:.2f} ms"
        for distance, row in sorted(rows.items())
    )
    verdict = HOLDS if best not in (ordered[0], ordered[-1]) else NO
    return verdict, (
        f"Layers ahead, with {found['share']} of the experts in slots, behind its own eviction, simulated on "
        f"searches recorded live: {text}. The least time is {best} ahead; at an end of what was tried it is no best "
        "distance."
    )


PAPER = Paper(
    "finemoe",
    "FineMoE",
    "Store, for every token computed, the probabilities of all routers (an expert map) and what the token meant; "
    "find the most similar stored one by meaning and by the layers so far, prefetch as many of its experts as the "
    "similarity asks for, and evict by its probabilities and by use.",
    (
        Part("The store of maps, its search and its deduplication", "core/policy/predict/maps.py"),
        Part("The searches, while the model computes", "core/policy/predict/map_search.py"),
        Part(
            "Prediction from the maps found",
            "core/policy/predict/expert_map.py",
            (
                "predictor=expert_map",
                "predictor.distance",
                "predictor.expert_map.capacity",
                "predictor.expert_map.semantic",
                "predictor.expert_map.dynamic",
            ),
        ),
        Part("Eviction by 1 / (probability x use)", "core/policy/eviction/finemoe.py", ("eviction=finemoe",)),
        Part("What predictors tell policies", "core/policy/hints.py"),
        Part("Prefetch priority: probability over distance", "core/cache/prefetch_priority.py"),
    ),
    ("finemoe", "moe_infinity", "promoe", "mixtral_offloading", "se_moe"),
    "Batches of requests, and several GPUs.",
    (
        Row("Figures 1a, 2, 5-7", "Stages, the design space, the system, maps and their search.", DRAWING),
        Row("Table 1", "The models.", never("A description of their models: nothing was measured.")),
        Row(
            "Figure 3b",
            "Routing summed over a request is harder to predict (higher entropy) than of one token.",
            Claims("expert_maps", "FineMoE figure 3b: fine-grained entropy below coarse-grained"),
        ),
        Row(
            "Figures 3a, 3c",
            "The more tokens are summed, the harder (3a draws examples).",
            Claims("expert_maps", "FineMoE figure 3c: entropy rises with the iterations aggregated"),
        ),
        Row(
            "Figure 4, distances",
            "The further ahead, the less is hit; here the recall of searches that are waited for.",
            Claims("expert_maps", "FineMoE figure 4: recall falls with the distance"),
        ),
        Row(
            "Figure 4, request counts",
            "Maps name more of what comes than counts of the request, at every distance.",
            Claims("expert_maps", "FineMoE figure 4: map search above request counts, at every distance"),
        ),
        Row(
            "Figures 8, 9",
            "The more similar the map found, the more of its experts are hit (Pearson).",
            Claims("expert_maps", "FineMoE figure 9: semantic and trajectory scores correlate with hits"),
        ),
        Row(
            "Figures 1b, 10, TPOT",
            "Less time per token than four other systems (SE-MoE stands for fetching whole layers).",
            Systems("finemoe", RIVALS),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row(
            "Figure 10, TTFT",
            "Less time to the first token, too.",
            Systems("finemoe", RIVALS, "ttft_ms"),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row(
            "Figure 10, hit rate",
            "More hits than the systems that cache.",
            Systems("finemoe", RIVALS[1:], "hit_rate"),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row("Figure 11", "Latency of requests that arrive as in a recorded day.", never(BATCH)),
        Row(
            "Figure 12",
            "The same at every limit of the memory.",
            Systems("finemoe", RIVALS),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row(
            "Figure 13",
            "On a faster GPU the lead is smaller.",
            never("It compares GPUs, and this asks for two of them."),
        ),
        Row(
            "Figure 14a, trajectory",
            "Search by meaning and layers hits more than by layers alone.",
            Claims(
                "methods",
                "FineMoE figure 14a: full map search above trajectory alone",
                ("full search", "trajectory alone"),
            ),
            SEARCHED,
        ),
        Row(
            "Figure 14a, selection",
            "As many experts as the similarity asks for hit more than always k.",
            Claims(
                "methods", "FineMoE figure 14a: dynamic selection above always k", ("dynamic selection", "always k")
            ),
            SEARCHED,
        ),
        Row(
            "Figure 14a, hit count",
            "Maps hit more than counts of the request.",
            Claims("methods", "FineMoE figure 14a: map search above request counts", ("maps", "request counts")),
            SEARCHED,
        ),
        Row(
            "Figure 14a, speculation",
            "Maps hit more than asking the next layer's gate.",
            Claims("methods", "FineMoE figure 14a: map search above the next gate", ("maps", "next gate")),
            SEARCHED,
        ),
        Row(
            "Figure 14b, LRU",
            "Its eviction hits more than LRU behind the same maps.",
            Claims("methods", "FineMoE figure 14b: its eviction hits more than LRU", ("FineMoE", "LRU")),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row(
            "Figure 14b, LFU",
            "Its eviction hits more than LFU behind the same maps.",
            Claims("methods", "FineMoE figure 14b: its eviction hits more than LFU", ("FineMoE", "LFU")),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row(
            "Figure 15",
            "There is a best prefetch distance: nearer hides too little, further hits too little.",
            Reading("methods", best_distance),
            ("finemoe_eviction", *SEARCHED),
        ),
        Row(
            "Figure 16a",
            "The larger the store, the more similar are the maps found (little so above 1000).",
            Claims("expert_maps", "FineMoE figure 16a: scores rise with the store's capacity"),
        ),
        Row("Figure 16b", "The lead stays with batches of up to eight.", never(BATCH)),
        Row(
            "Figure 17",
            "Searches run while the model computes and cost a token next to nothing.",
            Reading("overhead", searching),
            ("live_searches",),
        ),
        Row(
            "Figure 18",
            "The largest store they try, 32,000 maps, takes less than 200 MB.",
            Stated(
                PART,
                "By arithmetic: a router output takes 4 bytes in the store, so that 32,000 maps of their largest "
                "one (24 layers of 60 experts) are 184 MB, as they say; the embeddings that are searched are 262 MB "
                "more at a width of 2048.",
            ),
        ),
    ),
)
