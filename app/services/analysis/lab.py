"""The predictor lab: per prefetcher, recall on the same tokens, time saved, and wasted copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.services.analysis.whatif import About, title
from core.errors import MoestroError
from core.profile import Profile
from core.profile.summary import TITLES
from core.profile.trace import FileTrace
from core.settings.registry import variant
from core.simulate import Clock
from core.simulate.blocks import Block
from core.simulate.prefetchers import ORACLE, TimedConfig, TimedResult, timed
from core.simulate.recall import recall


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one prefetcher. `problem`: why it could not be run, "" = it was. Bytes and times are per token; None =
    unknown."""

    predictor: str
    problem: str = ""
    recall: tuple[float | None, ...] = ()  # [L] at k
    recall_most: tuple[float | None, ...] = ()  # [L] at the chosen m
    hit_rate: float | None = None
    tpot_ms: float | None = None
    saved_ms: float | None = None  # TPOT without a prefetcher minus TPOT with this one
    prefetch_bytes: float | None = None
    wasted_bytes: float | None = None
    late_rate: float | None = None
    replayed: bool = False  # from predictions recorded with the trace
    waited_for: bool = False  # its worker was, as nothing does in the engine: a bound
    more: Mapping[str, float] = field(default_factory=dict)  # other metrics by name
    blocks: tuple[Block, ...] = ()  # milliseconds per token in each part of the routing


@dataclass(frozen=True, slots=True)
class Lab:
    """Results of all prefetchers with one cache: the policy and slots of `about.chosen`."""

    about: About
    most: int  # m of recall@m
    runs: tuple[Run, ...]

    def ran(self) -> list[Run]:
        """The prefetchers that could be run."""
        return [run for run in self.runs if not run.problem]


def obstacle(predictor: str, profile: Profile | None) -> str:
    """Why a predictor cannot be run without the model, as far as its class declares; "" = no obstacle known."""
    chosen = variant("predictor", predictor)
    if missing := [part for part in chosen.needs if profile is None or not profile.has(part)]:
        named = ", ".join(f"“{TITLES[part]}”" for part in missing)
        return f"It needs a profile of this model with {named}. Calibrate the model in the tab Calibrate."
    return ""


def run_one(
    path: str, config: TimedConfig, most: int, clock: Clock | None, blob_bytes: int, start: str, profile: Profile | None
) -> Run:
    """Runs in another process: one prefetcher. Without a clock only its recall is computed."""
    trace = FileTrace(Path(path))
    try:
        wide = () if config.predictor in (ORACLE, "none") else recall(trace, config, most, profile)
        if clock is None:
            short = () if config.predictor in (ORACLE, "none") else recall(trace, config, trace.top_k, profile)
            return Run(config.predictor, recall=short, recall_most=wide)
        [found] = timed(trace, [config], clock, blob_bytes or 1, profile=profile, start=start, processes=1)
    except MoestroError as error:
        return Run(config.predictor, problem=str(error))
    return _run(found, wide, bool(blob_bytes))


def _run(found: TimedResult, wide: tuple[float | None, ...], sized: bool) -> Run:
    return Run(
        found.timed.predictor,
        "",
        found.recall_by_layer if wide else (),
        wide,
        found.hit_rate,
        found.tpot_ms,
        None,
        found.per_token("prefetch_bytes") if sized else None,
        found.per_token("wasted_bytes") if sized else None,
        found.rate("late"),
        found.replayed,
        found.waited_for,
        found.more(SHOWN, sized=sized),
        found.blocks,
    )


def named(predictor: str) -> str:
    """The display name of a prefetcher in the lab."""
    return "Oracle (knows the future)" if predictor == ORACLE else title("predictor", predictor)


SHOWN = ("total_ms", "prefetch_bytes", "wasted_bytes", "late")  # metrics that have a column of their own
