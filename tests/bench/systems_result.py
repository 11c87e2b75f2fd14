"""A result of `bench systems`, drawn by hand: two systems, one of which changes answers, at two budgets."""

from typing import Any

from bench.harness.workload import NAMES


def figures(tpot_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "ttft_ms": 10 * tpot_ms,
        "tpot_ms": tpot_ms,
        "compute_ms": 0.5 * tpot_ms,
        "predict_ms": 0.1 * tpot_ms,
        "stall_ms": 0.4 * tpot_ms,
        "idle_ms": 0.1 * tpot_ms,
        "copy_ms": 0.4 * tpot_ms,
        "demand_bytes": 2e6,
        "prefetch_bytes": 1e6,
        "wasted_bytes": 5e5,
        "hit_rate": 0.6,
        "exact": True,
        "slots": 8,
        "problem": "",
        "tpot_rounds_ms": [tpot_ms],
        "quality": None,
        **more,
    }


def bound(tpot_ms: float) -> dict[str, Any]:
    return {
        **{name: {"hit_rate": 0.8, "misses": 1.0, "tpot_ms": tpot_ms} for name in NAMES},
        "perfect_prefetch": {"tpot_ms": tpot_ms - 1},
        "resident": {"tpot_ms": 5.0},
    }


def systems_result() -> dict[str, Any]:
    judged = {
        "exact_match": 0.5,
        "unseen_match": None,
        "agreement": 0.9,
        "kl": 0.1,
        "perplexity": 20.0,
        "substituted_rate": 0.2,
        "questions": 2,
        "positions": 8,
        "problem": "",
    }
    return {
        "bench": "systems",
        "date": "2026-01-02T03:04:05+00:00",
        "model": "demo",
        "layers": 2,
        "experts": 8,
        "top_k": 2,
        "link": "emulated",
        "link_gbps": 0.2,
        "budgets": {"50%": {"slots": 8, "share": 0.5, "bytes": 800}, "25%": {"slots": 4, "share": 0.25, "bytes": 400}},
        "rounds": 1,
        "tokens": 12,
        "prompts": 1,
        "titles": {"finemoe": "FineMoE", "buddymoe": "BuddyMoE"},
        "resident": figures(5.0),
        "exact_quality": {**judged, "exact_match": 1.0, "kl": 0.0},
        "bounds": {"25%": bound(12.0), "50%": bound(8.0)},
        "systems": {
            "finemoe": {"25%": figures(20.0), "50%": figures(10.0)},
            "buddymoe": {
                "25%": {"problem": "The budget is too small.", "quality": None},
                "50%": figures(9.0, exact=False, quality=judged),
            },
        },
        "device": "a CPU",
        "others_cores": 0.0,
    }
