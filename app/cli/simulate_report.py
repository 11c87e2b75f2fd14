"""The result of `simulate`, as a table and as JSON."""

import argparse

from core.profile.trace import Trace
from core.simulate import BELADY, BELADY_BYPASS, Clock, Result
from core.system.wording import cell, grid

BOUNDS = (BELADY, BELADY_BYPASS)


def table(args: argparse.Namespace, trace: Trace, sizes: dict[str, int], found: dict[str, dict[str, Result]]) -> str:
    """The result as text: best policy at the first size first, the bound last."""
    first = next(iter(sizes))
    rows = sorted((n for n in found if n not in BOUNDS), key=lambda n: -(found[n][first].hit_rate or 0.0))
    rows += [name for name in BOUNDS if name in found]
    tpot = found[BELADY][first].tpot_ms is not None
    heads = [head for size, n in sizes.items() for head in (f"{size} ({n})", *["ms"] * tpot)]
    lines = [
        f"{args.trace.name}: {trace.tokens} tokens, {trace.layers} layers, {trace.experts} experts, "
        f"top {trace.top_k}{'; ' + trace.model if trace.model else ''}",
        f"Hit rate while decoding{' and predicted ms per token' if tpot else ''}, by slots; "
        f"{'each layer its own' if args.scope == 'layer' else 'one pool for all layers'}, starting {args.start}:",
        *grid(("", *heads), [(n, *(c for s in sizes for c in _cells(found[n].get(s), tpot))) for n in rows]),
    ]
    bound = found[BELADY][first]
    lines.append(
        f"{BELADY} knows the future: no policy can do better where every missing expert takes another's slot (forced "
        f"admission). First requests of an expert count as misses ({bound.compulsory} of {bound.requests} requests)."
    )
    if BELADY_BYPASS in found:
        lines.append(f"{BELADY_BYPASS}: nor one with --bypass on, which sets {trace.top_k} of the slots aside for it.")
    return "\n".join(lines)


def _cells(one: Result | None, tpot: bool) -> list[str]:
    rate = cell(None if one is None else one.hit_rate, ".1%")
    return [rate, *([cell(None if one is None else one.tpot_ms)] if tpot else [])]


def summary(
    args: argparse.Namespace,
    trace: Trace,
    sizes: dict[str, int],
    found: dict[str, dict[str, Result]],
    clock: Clock | None,
) -> dict[str, object]:
    """The result as plain values for JSON. Rates by policy and by size as the user wrote it."""
    rates = {name: {size: one.hit_rate for size, one in by_size.items()} for name, by_size in found.items()}
    out: dict[str, object] = {
        "trace": args.trace.name,
        **{name: getattr(trace, name) for name in ("tokens", "layers", "experts", "top_k")},
        **{name: getattr(args, name) for name in ("scope", "layer_slots", "pins", "bypass", "start")},
        "slots": sizes,
        "hit_rate": {name: of for name, of in rates.items() if name not in BOUNDS},
        "belady": rates[BELADY],
        "belady_warm": {size: warm(one) for size, one in found[BELADY].items()},
        "belady_bypass": rates.get(BELADY_BYPASS, {}),
    }
    for field in ("prefill_hit_rate", "rank_hit_rate", "misses_per_token", *["tpot_ms"] * (clock is not None)):
        out[field] = {
            name: {size: getattr(one, field) for size, one in by_size.items()} for name, by_size in found.items()
        }
    return out


def warm(result: Result) -> float | None:
    """The hit rate without the first request of each expert, which always misses in an empty cache."""
    rest = result.requests - result.compulsory
    return result.hits / rest if rest > 0 else None
