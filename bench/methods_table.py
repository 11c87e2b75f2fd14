"""The result of `bench methods` as text."""

from __future__ import annotations

from typing import Any

from app.store.results import BOUNDS


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"{result['tokens']} decoded tokens, simulated."
    ]
    for scope, sizes in result["hit_rate"].items():
        names = sorted(sizes["50.0%"], key=lambda name: -(sizes["50.0%"][name] or 0.0))
        lines += [
            f"Hit rate by policy and slots, scope {scope}:",
            f"  {'':26s}" + "".join(f"{share:>8s}" for share in sizes),
        ]
        lines += [
            f"  {BOUNDS.get(name, name):26s}" + "".join(_share(row.get(name)) for row in sizes.values())
            for name in names
        ]
    lines += ["LFU's hit rate by layer, every layer with as many slots:"]
    lines += [
        f"  {share:>8s} {''.join(_share(rate) for rate in row['lfu'])}"
        for share, row in result["hit_rate_by_layer"].items()
    ]
    lines += ["LCP by rho and omega, slots of each layer, no prefetching:"]
    for share, settings in result["lcp_settings"].items():
        lines += [
            f"  {share:>8s} rho {one['rho']:<5g} omega {one['omega']:<6d}{_share(one['hit_rate'])} "
            f"{one['tpot_ms']:8.2f} ms"
            for one in settings
        ]
    apart = result["distance"]
    for title, rows in (
        ("ahead of LRU", result["prefetchers"]),
        (f"policies behind {result['behind_predictor']}, no guard", result["behind"]),
        ("one cache for all layers, no guard, PLEC behind its own predictor and perfect ones", result["plec"]),
        (
            "one cache for all layers, no guard, FineMoE's eviction behind expert maps by layers ahead",
            {apart["share"]: apart["rows"]},
        ),
    ):
        for share, row in rows.items():
            lines += [
                f"With prefetching, {title}, {share} of the experts in slots (waited for = a bound; engine = hits and "
                "TPOT there):",
                f"  {'':42s}    hits  TPOT ms   net ms  link MB  wasted MB  recall     engine",
            ]
            lines += [
                f"  {name:42s} {one['hit_rate']:7.1%} {one['tpot_ms']:8.2f} {one['net_ms'] or 0:8.2f} "
                f"{one['demand_mb'] + one['prefetch_mb']:8.1f} {one['wasted_mb']:10.1f} "
                f"{one['recall_at_k'] or 0:7.1%}"
                + (f" {own['hit_rate']:7.1%} {own['tpot_ms']:6.2f}" if (own := one.get("engine")) else "")
                for name, one in row.items()
            ]
    lines += [
        f"Replayed at {share}: {one['compute_ms']:.2f} ms a token, {one['miss_ms']:.2f} ms and the copy's "
        f"{one['load_ms']:.2f} ms a miss, as in the engine"
        for share, one in result["clock"].items()
    ]
    lines += ["The papers' orderings here, and with predictors waited for:"]
    lines += [f"  {one['holds']:13s}{one.get('holds_waited_for', ''):13s}{one['claim']}" for one in result["orderings"]]
    return "\n".join(lines)


def _share(rate: float | None) -> str:
    return f"{'-':>8s}" if rate is None else f"{rate:8.1%}"
