"""The result of `bench methods` as a table."""

from collections.abc import Mapping
from typing import Any

from app.store.results import BOUNDS
from bench.harness.report import headline
from bench.harness.run import Result
from core.system.wording import cell, grid

WAITED = ", waited for"  # ends the name of a row whose predictor's worker was waited for

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
        ("PLEC in one pool, others in layers, behind its own predictor and perfect ones", r["plec"]),
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
    return lines


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
