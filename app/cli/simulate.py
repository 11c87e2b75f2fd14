"""`simulate`: simulates every cache policy on a recorded trace, and the bound that none can beat."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from app.cli import options, simulate_prefetch
from app.cli.simulate_prefetch import MILLISECONDS, RULES
from app.cli.simulate_report import summary, table
from app.services.profiles import stored_profile
from core.errors import SettingError, TraceError
from core.profile import Profile, load
from core.profile.trace import FileTrace, Trace, open_trace
from core.settings.config import Settings
from core.settings.registry import variant, variants
from core.simulate import BELADY, BELADY_BYPASS, Config, Result, simulate
from core.simulate.prefetchers import ORACLE, TimedResult
from core.system.paths import expanded

Fetched = dict[tuple[str, str], dict[str, TimedResult]]  # (policy, size) -> prefetcher -> result
PLACING = ("scope", "layer_slots", "pins", "bypass")  # settings with an option of their own here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=expanded,
        required=True,
        metavar="FILE",
        help="a recorded session, an .npz with "
        "`experts` [layers, tokens, k], or a CSV or JSON list of token, layer, expert ids",
    )
    parser.add_argument(
        "--slots",
        default="50%",
        metavar="LIST",
        help="sizes of the cache, separated by commas: "
        "shares of all experts (25%%,50%%) or numbers of experts (default: 50%%)",
    )
    parser.add_argument(
        "--policies",
        metavar="LIST",
        help="cache policies, separated by commas, or all (default: all, "
        f"or the preset's): {', '.join(v.name for v in variants('eviction'))}",
    )
    parser.add_argument(
        "--preset",
        type=options.preset_named,
        metavar="NAME",
        help="a published system: its cache policy, scope and slots per layer, and its prefetcher with the settings of "
        "both (--predictors none: its cache alone); what it computes lossily is not simulated",
    )
    options.add_overrides(parser, PLACING)
    parser.add_argument(
        "--profile",
        type=expanded,
        metavar="FILE",
        help="a profile of the model, for settings that need one (default: the stored profile of the trace's model)",
    )
    options.add_pairs(parser, "set a policy's own parameter, for example eviction.lcp.omega=64")
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        metavar="N",
        help="experts in a layer, where the trace does not say (default: the largest id in it, plus one)",
    )
    parser.add_argument(
        "--start",
        default="empty",
        choices=("empty", "filled"),
        help="caches start empty, or filled "
        "with every layer's first experts as the engine's are after a load (default: empty)",
    )
    _add_clock(parser)
    simulate_prefetch.add_arguments(parser)
    parser.add_argument(
        "--processes", type=int, default=0, metavar="N", help="number of processes (default: one per CPU core)"
    )
    options.add_json(parser)


def _add_clock(parser: argparse.ArgumentParser) -> None:
    clock = parser.add_argument_group(
        "predicted speed", "With the first two given, milliseconds per token without prefetching are predicted."
    )
    clock.add_argument("--compute-ms", type=MILLISECONDS, metavar="X", help="of a token with everything resident")
    clock.add_argument("--load-ms", type=MILLISECONDS, metavar="X", help="to copy one expert over the link")
    clock.add_argument(
        "--expert-ms",
        type=MILLISECONDS,
        default=0.0,
        metavar="X",
        help="compute time of one expert (default: 0, no compute overlaps a copy)",
    )


def run(args: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    trace = opened(args)
    sizes = slots(args.slots, trace.layers * trace.experts)
    prefetching = simulate_prefetch.wanted(args)
    settings, profile = chosen_settings(args, prefetching), profile_for(args, trace)
    names = policies(args.policies or (settings.cache.eviction.name if args.preset or prefetching else "all"))
    with own_prefetcher(args):
        clock = simulate_prefetch.clock_of(args, bool(prefetching), profile, trace.layers, trace.top_k)
        predictors = simulate_prefetch.chosen(prefetching, settings, trace, profile, say) if prefetching else []
    for text in simulate_prefetch.unsimulated(settings):
        say(text)
    cache, processes = settings.cache, max(0, args.processes)
    args.scope, args.layer_slots = cache.scope, cache.layer_slots.name
    args.pins, args.bypass = str(cache.pins), cache.bypass
    configs = caches(settings, names, sizes, trace, profile)
    results = simulate(trace, [*configs.values()], start=args.start, clock=clock, processes=processes, say=say)
    found: dict[str, dict[str, Result]] = {}
    for (name, size), result in zip(configs, results, strict=True):
        found.setdefault(name, {})[size] = result
    fetched: Fetched = {}
    if clock is not None and predictors:
        places = [(name, size) for name in names for size in sizes]
        with own_prefetcher(args):
            rows = simulate_prefetch.run(
                trace,
                predictors,
                [configs[at] for at in places],
                settings,
                clock,
                profile,
                args.start,
                processes,
                say,
            )
        fetched = {at: dict(zip([*predictors, ORACLE], one, strict=True)) for at, one in zip(places, rows, strict=True)}
    seconds = time.perf_counter() - began_s
    print(table(args, trace, sizes, found))
    out = summary(args, trace, sizes, found, clock) if args.json else {}
    if clock is not None and fetched:
        bounds = {size: simulate_prefetch.bound_ms(fewest(found, size, args.bypass), clock) for size in sizes}
        for (name, size), one in fetched.items():
            title = f"Prefetching, {name} with {size} ({sizes[size]})"
            print(simulate_prefetch.table(one, title, bounds[size]))
        out |= {"prefetching": simulate_prefetch.summaries(fetched), "bound_ms": bounds}
    print(f"{seconds:.1f} s")
    if args.json:
        print(json.dumps(out | {"seconds": seconds}))
    return 0


def opened(args: argparse.Namespace) -> Trace:
    """The given trace, with a message where a part of it is missing. Raises SettingError for one without tokens."""
    trace = open_trace(args.trace, args.experts)
    if not trace.tokens:
        raise SettingError(f"{args.trace} has no tokens.")
    if isinstance(trace, FileTrace) and trace.cut:
        say(f"{args.trace} is cut short; the incomplete part at its end is left out.")
    return trace


def caches(
    settings: Settings, names: list[str], sizes: dict[str, int], trace: Trace, profile: Profile | None
) -> dict[tuple[str, str], Config]:
    """(policy, size) -> the cache to simulate; after all policies the bounds, at the sizes that they apply to."""

    def sized(size: str, **changes: object) -> Config:
        changed = settings.with_(changes)
        return Config.of(changed, sizes[size], trace.layers, trace.experts, trace.top_k, profile)

    configs = {(name, size): sized(size, eviction=name) for name in names for size in sizes}
    for size in sizes:
        configs[BELADY, size] = replace(sized(size, eviction=names[0], bypass=False), policy=BELADY, params={})
    for size in sizes if settings.cache.scope == "layer" else ():  # in one pool for all layers it could not do better
        with suppress(SettingError):  # too few slots to set any aside
            sparing = sized(size, eviction=names[0], bypass=True)
            configs[BELADY_BYPASS, size] = replace(sparing, policy=BELADY_BYPASS, params={})
    return configs


def fewest(found: dict[str, dict[str, Result]], size: str, bypass: bool) -> Result:
    """The fewest misses that caches like these can have."""
    bypassing = found.get(BELADY_BYPASS, {}).get(size) if bypass else None
    return bypassing or found[BELADY][size]


def slots(text: str, total: int) -> dict[str, int]:
    """Parse sizes into numbers of experts. Raises SettingError."""
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
    """The requested policies. Raises SettingError with a list of the choices."""
    if text.strip() == "all":
        return [v.name for v in variants("eviction")]
    bounds = BELADY, BELADY_BYPASS  # always included
    names = [word for word in text.replace(" ", "").split(",") if word not in bounds]
    return [variant("eviction", name).name for name in dict.fromkeys(names)]


def chosen_settings(args: argparse.Namespace, prefetching: str) -> Settings:
    """The settings of cache and prefetching: the preset's, overridden by those given separately. Raises
    SettingError."""
    given = {name: value for name in (*PLACING, *RULES) if (value := getattr(args, name)) is not None}
    values: dict[str, object] = dict(args.preset.values) if args.preset else {}
    for name, value in [*given.items(), *(pair[1:] for pair in args.pairs)]:
        ours = name in PLACING or name.startswith("eviction.")
        if not ours and not (prefetching and (name in RULES or name.startswith("predictor."))):
            raise SettingError(
                f"simulate has no use for {name}: it takes parameters of cache policies, like eviction.lcp.omega=64, "
                f"and with --predictors those of prefetchers, and {', '.join(RULES[:-1])} and {RULES[-1]}."
            )
        values[name] = value
    return Settings(values)


@contextmanager
def own_prefetcher(args: argparse.Namespace) -> Iterator[None]:
    """An error of a prefetcher that the preset chose says so, and how to do without it."""
    try:
        yield
    except (SettingError, TraceError) as error:
        if args.preset is None or args.predictors:
            raise
        raise type(error)(
            f"{error} (The preset {args.preset.name} prefetches; --predictors none simulates its cache alone.)"
        ) from None


def profile_for(args: argparse.Namespace, trace: Trace) -> Profile | None:
    """The given profile, or the stored one of the trace's model. Raises ProfileError when it is of another model."""
    model_hash = trace.model_hash if isinstance(trace, FileTrace) else ""
    if args.profile is None:
        return stored_profile(model_hash) if model_hash else None
    profile = load(args.profile, model_hash=model_hash or None, model=trace.model)
    if (profile.layers, profile.experts) != (trace.layers, trace.experts):
        raise SettingError(
            f"{args.profile} is of a model with {profile.layers} layers of {profile.experts} experts, "
            f"the trace of one with {trace.layers} of {trace.experts}."
        )
    return profile


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
