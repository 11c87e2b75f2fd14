"""Replays predictors with prefetching over one trace, in parallel processes: hits, late copies, waste,
predicted speed."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.errors import SettingError, TraceError
from core.metrics import METRICS
from core.policy.allocation.slot_allocation import AllocationProfile, check_need
from core.policy.predict import Oracle, Predictor
from core.policy.predict.base import PredictorProfile, has_worker
from core.profile.trace import FileTrace, Trace
from core.settings.migration import migrated_params
from core.settings.param import Value
from core.settings.prefetch import PrefetchSettings
from core.settings.registry import create, variant
from core.simulate.blocks import Block
from core.simulate.clock import Clock
from core.simulate.processes import run as run_jobs
from core.simulate.replayed import Replayed
from core.simulate.run import Config
from core.simulate.timed_replay import DecodedToken, Sums, TimedReplay, passes

ORACLE = "oracle"
SMALL = 2000  # tokens x configurations; fewer are finished before a second process would have started


class Gathered(PredictorProfile, AllocationProfile, Protocol):
    """What is needed of a profile (core.profile.Profile)."""


@dataclass(frozen=True, slots=True)
class TimedConfig:
    """A cache (a registered eviction policy) and its predictor: a registered one, or ORACLE, which knows the future.
    `deadline`, `guard`, `beside`: the settings prefetch_deadline, prefetch_guard and prefetch_beside."""

    config: Config
    predictor: str = "none"
    params: Mapping[str, Value] = field(default_factory=dict)
    deadline: bool = False
    guard: bool = True
    beside: bool = False


@dataclass(frozen=True, slots=True)
class TimedResult:
    """Results of one configuration on decoded tokens.

    `figures`: sums of every metric that a replay counts, under its name in core.metrics. `recall_by_layer`: share of a
    layer's requests that were among the first k of its last prediction. `replayed`: the predictions are those recorded
    with the trace, each in the layer in which it was there. `waited_for`: the predictor's worker, which in the engine
    nothing waits for, was; so what this predictor does here is a bound. `blocks`: milliseconds per token in each part
    of the trace; `decoded`: every decoded token."""

    timed: TimedConfig
    figures: Mapping[str, float]
    recall_by_layer: tuple[float | None, ...]
    replayed: bool = False
    waited_for: bool = False
    blocks: tuple[Block, ...] = ()
    decoded: tuple[DecodedToken, ...] = ()

    def per_token(self, name: str) -> float | None:
        """A figure per decoded token; None = there were none."""
        return _ratio(self.figures[name], self.figures["tokens"])

    def rate(self, name: str) -> float | None:
        """A number of requests as a share of all; None = there were none."""
        return _ratio(self.figures[name], self.figures["requests"])

    @property
    def hit_rate(self) -> float | None:
        return self.rate("hits")

    @property
    def tpot_ms(self) -> float | None:
        """Predicted time per token: compute + stall."""
        return self.per_token("total_ms")

    def more(self, shown: Collection[str], *, sized: bool) -> dict[str, float]:
        """The figures per token, without those in `shown`, and without bytes where experts have no known size."""
        skipped = {"tokens", *shown, *(() if sized else (one.name for one in METRICS if one.unit == "bytes"))}
        per_token = {name: self.per_token(name) for name in self.figures if name not in skipped}
        return {name: value for name, value in per_token.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PrefetchJob:
    """One configuration, ready to run in any process."""

    timed: TimedConfig
    clock: Clock
    blob_bytes: int
    start: str
    profile: Gathered | None = None

    def run(self, trace: Trace) -> TimedResult:
        """Runs it in this process. Raises TraceError or SettingError."""
        predictor = predictor_for(self.timed, trace)
        replay = follow(
            trace, self.timed, self.clock, self.blob_bytes, predictor, start=self.start, profile=self.profile
        )
        sums = replay.run()["decode"]
        return _result(self.timed, sums, replay, isinstance(predictor, Replayed))


def timed(
    trace: Trace,
    configs: Sequence[TimedConfig],
    clock: Clock,
    blob_bytes: int,
    *,
    profile: Gathered | None = None,
    start: str = "empty",
    processes: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[TimedResult]:
    """Runs every configuration over `trace`; results in their order. Raises SettingError or TraceError before any runs.

    `clock.load_ms`: time of one expert of `blob_bytes` on the link, latency included. `processes`: 0 = one per core."""
    for config in configs:
        if not isinstance(predictor_for(config, trace), Oracle | Replayed):
            check_need("predictor", config.predictor, profile)
        follow(trace, config, clock, blob_bytes, Replayed())  # raise errors of any configuration before the first runs
    processes = processes or os.cpu_count() or 1
    jobs = [
        PrefetchJob(
            config,
            clock,
            blob_bytes,
            start,
            profile if config.predictor != ORACLE and variant("predictor", config.predictor).needs else None,
        )
        for config in configs
    ]
    found: dict[int, TimedResult] = {}
    for at, result in run_jobs(jobs, trace, 1 if trace.tokens * len(configs) <= SMALL else processes):
        found[at] = result
        say(f"{len(found)} of {len(configs)}: {jobs[at].timed.config.policy}, {jobs[at].timed.predictor}")
    return [found[at] for at in range(len(configs))]


def predictor_for(config: TimedConfig, trace: Trace, *, waited_for: bool = False) -> Predictor:
    """The predictor of a configuration; one that needs more than ids is replaced by its predictions recorded with the
    trace. So is one with a worker, where there are any: only they tell when its answers came. Run on the trace instead
    (also when `waited_for`, which asks for it where it was the one in use), it is waited for.

    Raises SettingError for an unknown name, TraceError when no predictions of it were recorded."""
    if config.predictor == ORACLE:
        return Oracle((ids for ids, *_ in passes(trace)), trace.layers)
    predictor: Predictor = create("predictor", config.predictor, config.params)
    own = [trace.predictor] if isinstance(trace, FileTrace) and trace.predictor else []
    beside = list(trace.beside) if isinstance(trace, FileTrace) else []
    in_use = any(_is(config, one) for one in own)
    if in_use and (predictor.asks or (has_worker(type(predictor)) and not waited_for)):
        return Replayed(predictor.maps, None, predictor.priority)
    by = next((at for at, one in enumerate(beside) if _is(config, one)), None)
    if by is not None:
        return Replayed(predictor.maps, by, predictor.priority)
    if not predictor.asks:
        predictor.patient = True
        return predictor
    same = [one for one in (*own, *beside) if one[0] == config.predictor] or own
    had = " and ".join(f"{name} with {_words(params)}" for name, params in same) or ", ".join(
        name for name, _ in beside
    )
    raise TraceError(
        f"The prefetcher {config.predictor} looks at the model's hidden states. Without the model it "
        "can only be replayed from what it named, and this trace does not have that for these "
        f"settings: it has {f'those of {had}' if had else 'none'}. Record it: set Telemetry to “lab” (Advanced, "
        f"Measuring) and ask the model something; or chat --predictor {config.predictor} --record FILE --record-ranks."
    )


def _is(config: TimedConfig, recorded: tuple[str, Mapping[str, Value]]) -> bool:
    """Whether a recorded predictor is the one of a configuration, with the same parameters."""
    name, params = recorded
    if name != config.predictor:
        return False
    known = variant("predictor", name).params
    wanted, had = (
        {p.name: p.check(of.get(p.name, p.default)) for p in known}
        for of in (migrated_params(name, config.params), migrated_params(name, params))
    )
    return had == wanted


def follow(
    trace: Trace,
    config: TimedConfig,
    clock: Clock,
    blob_bytes: int,
    predictor: Predictor,
    *,
    start: str = "empty",
    profile: Gathered | None = None,
) -> TimedReplay:
    """A timed replay of a configuration, ready to run. Raises SettingError when the cache is too small."""
    cache = config.config
    need = trace.top_k * (trace.layers if cache.scope == "layer" else 1)
    if cache.slots < need:
        raise SettingError(f"{cache.slots} slots are too few: this cache needs at least {need}.")
    return TimedReplay(
        trace,
        cache,
        predictor,
        clock,
        blob_bytes,
        start=start,
        prefetch=PrefetchSettings(deadline=config.deadline, guard=config.guard, beside=config.beside),
        profile=profile,
    )


def _result(config: TimedConfig, sums: Sums, replay: TimedReplay, replayed: bool) -> TimedResult:
    recalls = tuple(_ratio(*pair) for pair in replay.recalled.T.tolist())
    waited_for = not replayed and has_worker(type(replay.predictor))
    return TimedResult(config, sums.figures(), recalls, replayed, waited_for, replay.blocks(), tuple(replay.decoded))


def _ratio(number: float, of: float) -> float | None:
    return number / of if of else None


def _words(params: Mapping[str, Value]) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items()) or "no parameters"
