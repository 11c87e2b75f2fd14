"""`simulate`: what every cache policy would have done on a recorded trace, beside what none can beat."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from app.cli import options
from core.config import params
from core.errors import SettingError
from core.registry import Value, variant, variants
from core.simulate import BELADY, Clock, Config, Result, simulate
from core.trace import FileTrace, Trace, open_trace

HELP = "Replay a routing trace through cache policies and sizes, without a model."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = params()
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a recorded session, an .npz with "
                        "`experts` [layers, tokens, k], or a CSV or JSON list of token, layer, expert ids")
    parser.add_argument("--slots", default="50%", metavar="LIST", help="sizes of the cache, separated by commas: "
                        "shares of all experts (25%%,50%%) or numbers of experts (default: 50%%)")
    parser.add_argument("--policies", default="all", metavar="LIST", help="cache policies, separated by commas, or all "
                        f"(default: all): {', '.join(v.name for v in variants('eviction'))}")
    parser.add_argument("--scope", default="layer", choices=known["scope"].choices,
                        help=f"{known['scope'].help} (default: layer)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", type=options.pair, dest="pairs",
                        help="set a policy's own parameter, for example eviction.lfu.half_life=64")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="experts in a layer, where the trace does "
                        "not say (default: the largest id in it, plus one)")
    parser.add_argument("--start", default="empty", choices=("empty", "filled"), help="caches start empty, or filled "
                        "with every layer's first experts as the engine's are after a load (default: empty)")
    clock = parser.add_argument_group("predicted speed", "With the first two given, milliseconds per token without "
                                      "prefetching are predicted.")
    clock.add_argument("--compute-ms", type=positive, metavar="X", help="of a token with everything resident")
    clock.add_argument("--load-ms", type=positive, metavar="X", help="to copy one expert over the link")
    clock.add_argument("--expert-ms", type=positive, default=0.0, metavar="X", help="of that computing, one expert's "
                       "share (default: 0, nothing is computed beside a copy)")
    clock.add_argument("--miss-ms", type=positive, default=0.0, metavar="X", help="that a miss costs beside its copy "
                       "(default: 0)")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="at once (default: one per CPU core)")
    parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")


def run(args: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    trace = open_trace(args.trace, args.experts)
    if not trace.tokens:
        raise SettingError(f"{args.trace} has no tokens.")
    if isinstance(trace, FileTrace) and trace.cut:
        say(f"{args.trace} ends in the middle of a piece, which is left out.")
    sizes = slots(args.slots, trace.layers * trace.experts)
    names, own = policies(args.policies), parameters(args)
    if (args.compute_ms is None) != (args.load_ms is None):
        raise SettingError("To predict speed, give both --compute-ms and --load-ms.")
    clock = None
    if args.load_ms is not None:
        clock = Clock(args.compute_ms, args.load_ms, args.expert_ms, args.miss_ms)
    configs = [Config(name, n, args.scope, own.get(name, {})) for name in [*names, BELADY] for n in sizes.values()]
    results = simulate(trace, configs, start=args.start, clock=clock, processes=max(0, args.processes), say=say)
    by_name = {name: dict(zip(sizes, results[i * len(sizes) :], strict=False)) for i, name in
               enumerate([*names, BELADY])}
    seconds = time.perf_counter() - began_s
    print(table(args, trace, sizes, by_name, seconds))
    if args.json:
        print(json.dumps(summary(args, trace, sizes, by_name, clock, seconds)))
    return 0


def slots(text: str, total: int) -> dict[str, int]:
    """Sizes as the user wrote them -> experts. Raises SettingError."""
    found: dict[str, int] = {}
    for word in text.replace(" ", "").split(","):
        number = word.removesuffix("%")
        if not number.replace(".", "", 1).isdigit() or (number == word and "." in word):
            raise SettingError(f"--slots {word!r} is not understood. Write shares like 25%,50% or numbers of experts.")
        count = int(float(number) / 100 * total + 1e-9) if word.endswith("%") else int(number)
        if not 0 < count <= total:
            raise SettingError(f"--slots {word} is not between one expert and all {total} of this trace.")
        found[word] = count
    return found


def policies(text: str) -> list[str]:
    """The policies asked for. Raises SettingError that lists the choices."""
    if text.strip() == "all":
        return [v.name for v in variants("eviction")]
    names = [word for word in text.replace(" ", "").split(",") if word != BELADY]   # which always stands beside them
    return [variant("eviction", name).name for name in dict.fromkeys(names)]


def parameters(args: argparse.Namespace) -> dict[str, dict[str, Value]]:
    """Policy -> its own parameters as given with --set. Raises SettingError."""
    found: dict[str, dict[str, Value]] = {}
    for _, name, value in args.pairs:
        kind, _, rest = name.partition(".")
        if kind != "eviction" or not rest:
            raise SettingError(f"simulate has no use for {name}: it takes parameters of cache policies, like "
                               "eviction.lfu.half_life=64.")
        policy, _, param = rest.partition(".")
        found.setdefault(policy, {})[param] = value
    return found


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds.")
    return number


def table(args: argparse.Namespace, trace: Trace, sizes: dict[str, int], found: dict[str, dict[str, Result]],
          seconds: float) -> str:
    """The result for a reader: best policy first at the first size, the bound below."""
    first = next(iter(sizes))
    rows = [*sorted((n for n in found if n != BELADY), key=lambda n: -(found[n][first].hit_rate or 0.0)), BELADY]
    width = max(len(name) for name in rows)
    tpot = found[BELADY][first].tpot_ms is not None
    heads = [f"{size} ({n})" for size, n in sizes.items()]
    lines = [f"{args.trace.name}: {trace.tokens} tokens, {trace.layers} layers, {trace.experts} experts, "
             f"top {trace.top_k}{'; ' + trace.model if trace.model else ''}",
             f"Hit rate while decoding{' and predicted ms per token' if tpot else ''}, by slots; "
             f"{'each layer its own' if args.scope == 'layer' else 'one pool for all layers'}, starting {args.start}:",
             " " * (width + 2) + "".join(f"{head:>{18 if tpot else 14}}" for head in heads)]
    for name in rows:
        cells = []
        for size in sizes:
            one = found[name][size]
            rate = "-" if one.hit_rate is None else f"{one.hit_rate:.1%}"
            cells.append(f"{rate:>8}{one.tpot_ms:>10.2f}" if one.tpot_ms is not None else f"{rate:>14}")
        lines.append(f"  {name:<{width}}" + "".join(cells))
    bound = found[BELADY][first]
    lines.append(f"{BELADY} knows the future: no policy can do better. First requests of an expert count as misses "
                 f"({bound.compulsory} of {bound.requests} requests).")
    return "\n".join([*lines, f"{seconds:.1f} s"])


def summary(args: argparse.Namespace, trace: Trace, sizes: dict[str, int], found: dict[str, dict[str, Result]],
            clock: Clock | None, seconds: float) -> dict[str, object]:
    """The result for a program. Rates by policy and by size as the user wrote it."""
    out: dict[str, object] = {
        "trace": args.trace.name, "tokens": trace.tokens, "layers": trace.layers, "experts": trace.experts,
        "top_k": trace.top_k, "scope": args.scope, "start": args.start, "slots": sizes,
        "hit_rate": {name: {size: one.hit_rate for size, one in by_size.items()} for name, by_size in found.items()
                     if name != BELADY},
        "belady": {size: one.hit_rate for size, one in found[BELADY].items()},
        "belady_warm": {size: warm(one) for size, one in found[BELADY].items()},
        "prefill_hit_rate": {name: {size: one.prefill_hit_rate for size, one in by_size.items()}
                             for name, by_size in found.items()},
        "misses_per_token": {name: {size: one.misses_per_token for size, one in by_size.items()}
                             for name, by_size in found.items()}}
    if clock is not None:
        out["tpot_ms"] = {name: {size: one.tpot_ms for size, one in by_size.items()} for name, by_size in found.items()}
    return out | {"seconds": seconds}


def warm(result: Result) -> float | None:
    """The hit rate with the first request of each expert left out: what an empty cache must miss."""
    rest = result.requests - result.compulsory
    return result.hits / rest if rest > 0 else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
