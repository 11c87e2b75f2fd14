"""ExpertFlow: what it proposes, where it is here, and its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.papers.parts import HOLDS, NO, PART, Paper, Part, Row
from bench.papers.sources import DRAWING, Claims, Reading, Readings, Systems, never, of
from core.system.command import COMMAND

PATH = ("path_predictor", "residents")
NEAR = 0.02  # less is no difference


def predicted_beside(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the path predictor adds to a token with everything resident."""
    one = result["predictors"].get("routing_path")
    if one is None:
        return None
    added, token = one["added_ms"], one["none_ms"]
    verdict = HOLDS if added <= 0.02 * token else NO
    return verdict, (
        f"A token of {token:.2f} ms takes {added:.2f} ms longer ({added / token:.0%}), of which "
        f"{one['predict_ms']:.2f} ms are the computing thread's own work; the network runs in a process of its own. "
        "At most 2 % would be no time; the model is small."
    )


def scheduled(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Two batches of half of the sequences each, regrouped or not."""
    rows = result["schedulers"]
    none, ours, whole = rows["none"], rows["similarity"], rows["one batch"]
    gain = ours["tok_s"] / none["tok_s"]
    verdict = HOLDS if gain >= 1.15 else PART if gain >= 1.075 else NO  # in part: at least half of it
    return verdict, (
        f"{gain:.2f} times the tokens a second of two batches in the order of arrival (half of the "
        f"experts resident, emulated link); a pass needs {ours['union']:.1f} experts a layer in place of "
        f"{none['union']:.1f}. Sequences are expected to need their newest token's experts again. All of them as one "
        f"batch: {whole['tok_s'] / none['tok_s']:.2f} times.{_by_network(rows)}"
    )


def _by_network(rows: Mapping[str, Any]) -> str:
    none, ours = rows.get("none, network"), rows.get("similarity, network")
    if none is None or ours is None:
        return ""
    return (
        f" By the network's predictions, with PLEC: {ours['tok_s'] / none['tok_s']:.2f} times, experts a layer "
        f"{ours['union']:.1f} in place of {none['union']:.1f}."
    )


def scheduling(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """What regrouping takes, between two passes."""
    row = result["schedulers"]["similarity"]
    share = row["scheduled_ms"] / (2 * row["pass_ms"])
    return HOLDS if share <= NEAR else NO, (
        f"{row['scheduled_ms']:.2f} ms for two passes of {row['pass_ms']:.1f} ms ({share:.1%}); it runs between "
        "passes here; pipelined it runs at the same time. At most 2 % would be no time."
    )


def accuracies(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """The network against its two controls, by size of the batch."""
    sizes = {size: rows for size, rows in result.get("accuracy", {}).items() if int(size) >= 8}
    if not sizes:
        return None
    above = [rows["network"]["accuracy"] > rows[name]["accuracy"] for rows in sizes.values() for name in ("TLP", "SLP")]
    verdict = of(above)
    found = "; ".join(
        f"{size}: network {rows['network']['accuracy']:.0%}, TLP {rows['TLP']['accuracy']:.0%}, SLP "
        f"{rows['SLP']['accuracy']:.0%}"
        for size, rows in sizes.items()
    )
    return verdict, (
        f"Batch-level accuracy, batches of {found} ({result['top_k']} of {result['experts']} experts "
        "a token, as many named for each sequence). The network learned from what this small model wrote to its "
        "bundled texts, and gives next to no expert a probability above one half; the paper's models choose one expert."
    )


def over_batches(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Hit rates from batches of 4 to those of 16."""
    lost = {name: rows["4"]["hit_rate"] - rows["16"]["hit_rate"] for name, rows in result["caches"].items()}
    ours = "plec, network" if "plec, network" in lost else "plec"
    fewer = [lost[ours] < lost[name] - NEAR for name in ("lru", "lru, one pool")]
    verdict = of(fewer)
    found = ", ".join(
        f"{name} {100 * points:+.1f}" for name, points in lost.items() if name.startswith(("lru", "plec"))
    )
    return verdict, (
        f"Points lost from 4 to 16 sequences: {found} (half of the experts resident; PLEC alone is behind the next "
        "gate)."
    )


PAPER = Paper(
    "expertflow",
    "ExpertFlow",
    "A small trained network tells from the tokens alone which experts all layers will need; one cache for all "
    "layers is filled in the order of use and evicts what is done with (PLEC); sequences are regrouped into batches "
    "that need few experts.",
    (
        Part("The network (T5 shape)", "core/policy/predict/nets/path.py"),
        Part("Its answers for the next token", "core/policy/predict/routing_path.py", ("predictor=routing_path",)),
        Part("PLEC", "core/policy/eviction/plec.py", ("eviction=plec", "scope=global")),
        Part("The token scheduler", "core/policy/batching/scheduler.py"),
        Part("Its two batches, and the dual-batch pipeline", "core/engine/batch_groups.py"),
        Part("Demands before prefetches", "core/cache/prefetch_queue.py"),
        Part("Temporal locality (TLP), the control", "core/policy/predict/recent.py", ("predictor=recent",)),
        Part("Spatial locality (SLP), the control", "core/policy/predict/transitions.py", ("predictor=transitions",)),
    ),
    ("expertflow", "se_moe", "pre_gated"),
    "Its tables on Switch models: they run, but cannot be calibrated, so that the network is trained for others alone.",
    (
        Row("Figures 1-6", "The system, its cache, its scheduler, and its pipelines.", DRAWING),
        Row(
            "Table 1, temporal",
            "The network recalls more than what was used of late (TLP); here of one sequence.",
            Claims("methods", "ExpertFlow table 1: path predictor above temporal (TLP)", ("network", "TLP")),
            PATH,
        ),
        Row(
            "Table 1, spatial",
            "The network recalls more than layer-to-layer counts (SLP); here of one sequence.",
            Claims("methods", "ExpertFlow table 1: path predictor above spatial (SLP)", ("network", "SLP")),
            PATH,
        ),
        Row(
            "Table 1, batches of 8 to 32",
            "The network names more of what a batch needs than TLP and SLP.",
            Readings("batch", accuracies),
            ("path_predictor",),
        ),
        Row(
            "Figure 7",
            "Faster than fetching whole layers (SE-MoE), at every size of the cache; here of one sequence.",
            Systems("expertflow", ("se_moe",)),
            PATH,
        ),
        Row(
            "Figure 8, speed",
            "Faster than a cache in every layer with LRU (Mixtral-offloading, which prefetches, too).",
            Systems("expertflow", ("mixtral_offloading",)),
            PATH,
        ),
        Row(
            "Figure 8, hit ratio",
            "More hits than that cache.",
            Systems("expertflow", ("mixtral_offloading",), "hit_rate"),
            PATH,
        ),
        Row(
            "Table 2",
            "Memory saved against everything resident.",
            never(
                "The budget is set by the user and held to the byte, so that there is nothing to find; "
                f"{COMMAND} bench systems prints the bytes of each budget."
            ),
        ),
        Row(
            "Figure 9, sizes of the cache",
            "PLEC hits more than LRU behind the same predictions.",
            Claims("methods", "ExpertFlow: PLEC hits more than LRU", ("PLEC", "LRU")),
            ("live_searches", *PATH),
        ),
        Row(
            "Figure 9, its bound",
            "PLEC hits more than LRU where predictions are perfect (the paper measures its own predictor alone).",
            Claims("methods", "ExpertFlow: PLEC hits more than LRU behind perfect predictions", ("PLEC", "LRU")),
            ("residents",),
        ),
        Row(
            "Figure 9, sizes of batches",
            "Larger batches cost PLEC fewer hits than LRU.",
            Readings("batch", over_batches),
        ),
        Row("Table 3", "The token scheduler makes decoding 1.15 times as fast.", Readings("batch", scheduled)),
        Row(
            "Section 5.5, predictor",
            "Predicting while the model computes takes no extra time.",
            Reading("overhead", predicted_beside),
            ("path_predictor",),
        ),
        Row("Section 5.5, scheduler", "Scheduling takes no extra time.", Readings("batch", scheduling)),
    ),
)
