"""`simulate --predictors` and `--preset`: simulates prefetchers on a trace, with their hit rates and speed."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from app.cli import options
from app.cli.parser import real
from core.errors import MoestroError, SettingError
from core.metrics import BY_NAME
from core.profile import Profile
from core.profile.trace import Trace
from core.settings.config import Settings
from core.settings.registry import variant, variants
from core.simulate import Clock, Config, Result
from core.simulate.prefetchers import ORACLE, TimedConfig, TimedResult, predictor_for, timed
from core.system.wording import cell, grid

NONE = "none"
RULES = ("prefetch_deadline", "prefetch_guard", "prefetch_beside")  # settings with an option of their own here
MILLISECONDS = real("a number of milliseconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of prefetching, of the link and of computing."""
    group = parser.add_argument_group(
        "prefetching", "Needs compute and link times: given below, or measured in a profile."
    )
    group.add_argument(
        "--predictors",
        metavar="LIST",
        help="prefetchers, separated by commas, or all that this trace supports; without --policies, on lru, or on the "
        f"preset's policy (default: the preset's): {', '.join(v.name for v in variants('predictor'))}",
    )
    options.add_overrides(group, RULES)
    group.add_argument(
        "--head-ms",
        type=MILLISECONDS,
        metavar="X",
        help="the part of the compute time outside the layers (default: 0, or the profile's)",
    )


def clock_of(
    args: argparse.Namespace, prefetching: bool, profile: Profile | None, layers: int, top_k: int
) -> Clock | None:
    """The given times, else a profile's when prefetchers are simulated; None = neither. Raises SettingError when the
    given times do not suffice."""
    measured = profile.times if profile is not None and profile.times is not None and prefetching else {}
    compute_ms, head_ms, expert_ms = args.compute_ms, args.head_ms, args.expert_ms
    load_ms = measured.get("load") if args.load_ms is None else args.load_ms
    head_ms = measured.get("head", 0.0) if head_ms is None else head_ms
    if compute_ms is None and measured:
        compute_ms = layers * (measured["att"] + measured["moe"]) + head_ms
        expert_ms = expert_ms or measured["moe"] / top_k
    if compute_ms is None and load_ms is None and not prefetching:
        return None
    if compute_ms is None or load_ms is None:
        or_else = ", or a --profile with measured times" if prefetching else ""
        raise SettingError(f"To predict speed, give --compute-ms and --load-ms{or_else}.")
    return Clock(compute_ms, load_ms, expert_ms, head_ms=head_ms)


def wanted(args: argparse.Namespace) -> str:
    """The prefetchers to simulate: those requested, else the preset's; "" = none. A preset without one is its cache
    alone, which needs no times."""
    if args.preset is None:
        return args.predictors or ""
    named = args.predictors or str(args.preset.values["predictor"])
    return "" if named.strip() == NONE else named


def unsimulated(settings: Settings) -> list[str]:
    """What of these settings a simulation leaves out, in the user's words."""
    pausing = "Prefetching is never paused here: whether it pays (prefetch_auto) is measured while a model runs."
    exact = "Every missing expert is fetched here: what these settings compute lossily is not simulated."
    return [pausing] * settings.prefetch.auto + [exact] * settings.lossy.active


def chosen(
    text: str, settings: Settings, trace: Trace, profile: Profile | None, say: Callable[[str], None]
) -> list[str]:
    """The requested prefetchers, "none" first. For "all", those that the trace and the profile support; `say` reports
    the others. Raises SettingError for an unknown name."""
    if text.strip() != "all":
        names = [variant("predictor", word).name for word in text.replace(" ", "").split(",") if word != ORACLE]
        return list(dict.fromkeys([NONE, *names]))
    names = []
    for one in variants("predictor"):
        try:
            needs_model = predictor_for(_timed(Config("lru", 0), one.name, settings), trace).asks
        except MoestroError:
            needs_model = True
        if needs_model or any(profile is None or not profile.has(part) for part in one.needs):
            say(
                f"{one.name} is skipped: it needs data that was not recorded with this trace"
                f"{' or is not in a profile' if one.needs else ''}."
            )
        else:
            names.append(one.name)
    return list(dict.fromkeys([NONE, *names]))


def run(
    trace: Trace,
    names: Sequence[str],
    caches: Sequence[Config],
    settings: Settings,
    clock: Clock,
    profile: Profile | None,
    start: str,
    processes: int,
    say: Callable[[str], None],
) -> list[list[TimedResult]]:
    """Results [cache][prefetcher], those of the oracle last. Raises SettingError or TraceError."""
    configs = [_timed(cache, name, settings) for name in [*names, ORACLE] for cache in caches]
    found = timed(trace, configs, clock, 1, profile=profile, start=start, processes=processes, say=say)
    return [found[at :: len(caches)] for at in range(len(caches))]


def _timed(cache: Config, name: str, settings: Settings) -> TimedConfig:
    own = {} if name == ORACLE else settings.choice("predictor", name).params
    rules = settings.prefetch
    return TimedConfig(cache, name, own, rules.deadline, rules.guard, rules.beside)


def bound_ms(best: Result, clock: Clock) -> float | None:
    """TPOT that no cache, prefetcher and order of copies can beat: the longer of computing and of copying the misses of
    Belady's MIN over this link."""
    if best.misses_per_token is None:
        return None
    return max(clock.compute_ms, best.misses_per_token * clock.load_ms)


def table(found: Mapping[str, TimedResult], title: str, bound: float | None) -> str:
    """Results for one cache, a line per prefetcher, fastest first; below them perfect prefetching."""
    rows = sorted((n for n in found if n != ORACLE), key=lambda n: (found[n].tpot_ms or 0.0, n))
    heads = ("", "ms/token", "stall", "net ms", "hits", "prefetch", "late", "recall", "copied", "wasted")
    named = {name: f"{name}, waited for" if found[name].waited_for else name for name in rows}
    cells = [(named[name], *_cells(found[name])) for name in rows]
    cells.append(("perfect prefetch", *_cells(found[ORACLE])))
    if bound is not None:
        cells.append(("no cache, no prefetcher: bound", f"{bound:.2f}", *[""] * 8))
    about = f"{title}; copied and wasted in experts a token, net = what prefetching saved less what it cost:"
    return "\n".join([about, *grid(heads, cells)])


def _cells(one: TimedResult) -> list[str]:
    known = [value for value in one.recall_by_layer if value is not None]
    recall = sum(known) / len(known) if known else None
    copied, ahead, wasted = (one.per_token(f"{name}_bytes") or 0.0 for name in ("demand", "prefetch", "wasted"))
    return [
        *map(cell, (one.tpot_ms, one.per_token("stall_ms"), one.per_token("net_ms"))),
        *(cell(share, ".1%") for share in (one.hit_rate, one.rate("prefetch_hits"), one.rate("late"), recall)),
        *map(cell, (copied + ahead, wasted)),
    ]


def summaries(found: Mapping[tuple[str, str], Mapping[str, TimedResult]]) -> dict[str, dict[str, dict[str, object]]]:
    """Results by policy, size and prefetcher as plain values for JSON."""
    out: dict[str, dict[str, dict[str, object]]] = {}
    for (policy, size), by_name in found.items():
        out.setdefault(policy, {})[size] = {name: summary(one) for name, one in by_name.items()}
    return out


def summary(one: TimedResult) -> dict[str, object]:
    """One result as plain values for JSON: times per token, counts of prefetches under names of their own, and under
    `sums` every metric that the replay counted."""
    times, counts = ("compute_ms", "stall_ms", "net_ms"), ("issued", "used", "late", "wasted", "evicted")
    return {
        "tokens": one.figures["tokens"],
        "hit_rate": one.hit_rate,
        "prefetch_hit_rate": one.rate("prefetch_hits"),
        "late_rate": one.rate("late"),
        "tpot_ms": one.tpot_ms,
        **{name: one.per_token(name) for name in times},
        **{name: value for name, value in one.figures.items() if BY_NAME[name].unit == "bytes"},
        **{name: one.figures[f"prefetch_{name}"] for name in counts},
        "recall_by_layer": one.recall_by_layer,
        "replayed": one.replayed,
        "waited_for": one.waited_for,
        "sums": dict(one.figures),
    }
