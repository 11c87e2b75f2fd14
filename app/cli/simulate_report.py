"""The result of `simulate`, as a table and as JSON."""

from __future__ import annotations

import argparse

from core.simulate import BELADY, Clock, Result
from core.trace import Trace


def table(args: argparse.Namespace, trace: Trace, sizes: dict[str, int], found: dict[str, dict[str, Result]]) -> str:
    """The result as text: best policy at the first size first, the bound last."""
    first = next(iter(sizes))
    rows = [*sorted((n for n in found if n != BELADY), key=lambda n: -(found[n][first].hit_rate or 0.0)), BELADY]
    width = max(len(name) for name in rows)
    tpot = found[BELADY][first].tpot_ms is not None
    heads = [f"{size} ({n})" for size, n in sizes.items()]
    lines = [
        f"{args.trace.name}: {trace.tokens} tokens, {trace.layers} layers, {trace.experts} experts, "
        f"top {trace.top_k}{'; ' + trace.model if trace.model else ''}",
        f"Hit rate while decoding{' and predicted ms per token' if tpot else ''}, by slots; "
        f"{'each layer its own' if args.scope == 'layer' else 'one pool for all layers'}, starting {args.start}:",
        " " * (width + 2) + "".join(f"{head:>{18 if tpot else 14}}" for head in heads),
    ]
    for name in rows:
        cells = []
        for size in sizes:
            one = found[name][size]
            rate = "-" if one.hit_rate is None else f"{one.hit_rate:.1%}"
            cells.append(f"{rate:>8}{one.tpot_ms:>10.2f}" if one.tpot_ms is not None else f"{rate:>14}")
        lines.append(f"  {name:<{width}}" + "".join(cells))
    bound = found[BELADY][first]
    lines.append(
        f"{BELADY} knows the future: no policy can do better. First requests of an expert count as misses "
        f"({bound.compulsory} of {bound.requests} requests)."
    )
    return "\n".join(lines)


def summary(
    args: argparse.Namespace,
    trace: Trace,
    sizes: dict[str, int],
    found: dict[str, dict[str, Result]],
    clock: Clock | None,
) -> dict[str, object]:
    """The result as plain values for JSON. Rates by policy and by size as the user wrote it."""
    out: dict[str, object] = {
        "trace": args.trace.name,
        "tokens": trace.tokens,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "scope": args.scope,
        "layer_slots": args.layer_slots,
        "pins": args.pins,
        "start": args.start,
        "slots": sizes,
        "hit_rate": {
            name: {size: one.hit_rate for size, one in by_size.items()}
            for name, by_size in found.items()
            if name != BELADY
        },
        "belady": {size: one.hit_rate for size, one in found[BELADY].items()},
        "belady_warm": {size: warm(one) for size, one in found[BELADY].items()},
        "prefill_hit_rate": {
            name: {size: one.prefill_hit_rate for size, one in by_size.items()} for name, by_size in found.items()
        },
        "misses_per_token": {
            name: {size: one.misses_per_token for size, one in by_size.items()} for name, by_size in found.items()
        },
    }
    if clock is not None:
        out["tpot_ms"] = {name: {size: one.tpot_ms for size, one in by_size.items()} for name, by_size in found.items()}
    return out


def warm(result: Result) -> float | None:
    """The hit rate without the first request of each expert, which always misses in an empty cache."""
    rest = result.requests - result.compulsory
    return result.hits / rest if rest > 0 else None
