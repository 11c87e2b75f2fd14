"""The result of `simulate`, as a table and as JSON."""

import argparse

from core.profile.trace import Trace
from core.simulate import BELADY, BELADY_BYPASS, Clock, Result

BOUNDS = (BELADY, BELADY_BYPASS)


def table(args: argparse.Namespace, trace: Trace, sizes: dict[str, int], found: dict[str, dict[str, Result]]) -> str:
    """The result as text: best policy at the first size first, the bound last."""
    first = next(iter(sizes))
    rows = sorted((n for n in found if n not in BOUNDS), key=lambda n: -(found[n][first].hit_rate or 0.0))
    rows += [name for name in BOUNDS if name in found]
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
            one = found[name].get(size)
            if one is None:
                cells.append(f"{'-':>{18 if tpot else 14}}")
                continue
            rate = "-" if one.hit_rate is None else f"{one.hit_rate:.1%}"
            cells.append(f"{rate:>8}{one.tpot_ms:>10.2f}" if one.tpot_ms is not None else f"{rate:>14}")
        lines.append(f"  {name:<{width}}" + "".join(cells))
    bound = found[BELADY][first]
    lines.append(
        f"{BELADY} knows the future: no policy can do better where every missing expert takes another's slot (forced "
        f"admission). First requests of an expert count as misses ({bound.compulsory} of {bound.requests} requests)."
    )
    if BELADY_BYPASS in found:
        lines.append(f"{BELADY_BYPASS}: nor one with --bypass on, which sets {trace.top_k} of the slots aside for it.")
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
        "bypass": args.bypass,
        "start": args.start,
        "slots": sizes,
        "hit_rate": {
            name: {size: one.hit_rate for size, one in by_size.items()}
            for name, by_size in found.items()
            if name not in BOUNDS
        },
        "belady": {size: one.hit_rate for size, one in found[BELADY].items()},
        "belady_warm": {size: warm(one) for size, one in found[BELADY].items()},
        "belady_bypass": {size: one.hit_rate for size, one in found.get(BELADY_BYPASS, {}).items()},
    }
    for field in (
        "prefill_hit_rate",
        "rank_hit_rate",
        "misses_per_token",
        *(("tpot_ms",) if clock is not None else ()),
    ):
        out[field] = {
            name: {size: getattr(one, field) for size, one in by_size.items()} for name, by_size in found.items()
        }
    return out


def warm(result: Result) -> float | None:
    """The hit rate without the first request of each expert, which always misses in an empty cache."""
    rest = result.requests - result.compulsory
    return result.hits / rest if rest > 0 else None
