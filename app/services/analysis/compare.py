"""Turns a question and a trace into simulation runs (policies, prefetchers, sizes) in other processes, and collects
them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.services.analysis import lab, whatif
from app.services.analysis.lab import Lab, Run
from app.services.analysis.question import Question, clock_of
from app.services.analysis.sources import Routing
from app.services.analysis.whatif import AUTO, NONE, About, Table, less
from core.errors import MoestroError, SettingError
from core.profile import Profile
from core.profile.trace import FileTrace
from core.settings.registry import variant, variants
from core.simulate import BELADY, BELADY_BYPASS, Clock, Config, Result, simulate
from core.simulate.prefetchers import ORACLE, TimedConfig, TimedResult, timed
from core.system.tasks import Task

UNIT = 1000  # assumed expert size where it is not known; only ratios are used then
Work = Callable[[Sequence[Task]], list[Any]]
"""Does all tasks and returns their results in order."""


def compare(question: Question, routing: Routing, work: Work) -> Table:
    """Simulate the policies at all budgets together, then each prefetcher separately."""
    clock, about = _begin(question, routing)
    slots = whatif.sizes(
        question.budgets,
        routing.layers,
        routing.experts,
        routing.top_k,
        question.scope,
        question.in_force(routing),
        bypass=question.bypass,
    )
    names = [v.name for v in variants("eviction") if v.name in {*question.policies, "lru", about.chosen[0]}]
    groups = [[question.cache(routing, name, n) for n in slots] for name in names]
    bounds = [[_best(question, routing, names[0], n, BELADY) for n in slots]]
    if question.scope == "layer":  # in one pool for all layers bypass could not do better
        bounds.append([])
        least = whatif.sizes(AUTO, routing.layers, routing.experts, routing.top_k, question.scope, bypass=True)[0]
        for n in (n for n in slots if n >= least):
            with suppress(SettingError):  # the pinned experts leave too few slots to set any aside
                bounds[1].append(_best(question, routing, names[0], n, BELADY_BYPASS))
    caches = [*groups, *bounds]
    profile, size, notes = question.profile_of(routing), about.expert_bytes or UNIT, list(about.notes)
    ahead, rules = list[TimedConfig](), question.settings.prefetch
    for predictor in (name for name in question.predictors if name != NONE):
        if problem := lab.obstacle(predictor, profile) if clock else "Times are needed to simulate prefetching.":
            notes.append(f"{lab.named(predictor)} is left out: {problem}")
        else:
            own = question.own("predictor", predictor)
            ahead += [
                TimedConfig(config, predictor, own, rules.deadline, rules.guard, rules.beside)
                for group in groups
                for config in group
            ]
    tasks = [Task(_caches, (routing.path, group, question.start, clock)) for group in caches]
    tasks += [Task(_ahead, (routing.path, one, clock, size, question.start, _light(one, profile))) for one in ahead]
    found = work(tasks)
    rows = [row for at in range(len(names)) for row in whatif.rows(found[at])]
    plain = {(row.policy, row.slots): row for row in rows}
    refused: dict[str, str] = {}
    for one, result in zip(ahead, found[len(caches) :], strict=True):
        if isinstance(result, str):
            refused[one.predictor] = result
        else:
            rows.append(
                whatif.prefetched(
                    result, size, plain.get((one.config.policy, one.config.slots)), sized=bool(about.expert_bytes)
                )
            )
    notes += [f"{lab.named(name)} is left out: {why}" for name, why in refused.items()]
    best = [result for some in found[len(groups) : len(caches)] for result in some]
    limits = whatif.bounds(best, clock, bypass=question.bypass)
    return Table(replace(about, notes=tuple(notes)), tuple(rows), tuple(limits))


def test(question: Question, routing: Routing, work: Work) -> Lab:
    """Test every prefetcher over one cache: the policy in use, with the current slots or the first budget given."""
    clock, about = _begin(question, routing)
    sizes = whatif.sizes(
        question.budgets, routing.layers, routing.experts, routing.top_k, question.scope, bypass=question.bypass
    )
    policy, predictor, now = about.chosen
    if question.budgets.strip().lower() in ("", whatif.AUTO):
        slots = min(max(now, sizes[0]), sizes[-1]) if now else sizes[len(sizes) // 2]
    else:
        slots = sizes[0]
    cache, profile = question.cache(routing, policy, slots), question.profile_of(routing)
    most = question.most or min(routing.experts, 2 * routing.top_k)
    rules = question.settings.prefetch
    refused = {name: lab.obstacle(name, profile) for name in question.predictors}
    names = [name for name in question.predictors if not refused[name] and name != NONE]
    trials = [TimedConfig(cache, NONE)]
    trials += [
        TimedConfig(cache, name, question.own("predictor", name), rules.deadline, rules.guard, rules.beside)
        for name in names
    ]
    trials += [TimedConfig(cache, ORACLE)] if clock else []
    tasks = [
        Task(lab.run_one, (routing.path, one, most, clock, about.expert_bytes, question.start, _light(one, profile)))
        for one in trials
    ]
    runs: list[Run] = work(tasks)
    base = runs[0].tpot_ms
    runs = [replace(run, saved_ms=less(base, run.tpot_ms)) for run in runs]
    runs += [Run(name, problem=why) for name, why in refused.items() if why]
    return Lab(replace(about, chosen=(policy, predictor, slots)), most, tuple(runs))


def _begin(question: Question, routing: Routing) -> tuple[Clock | None, About]:
    """The clock, and the description of what the figures apply to."""
    clock, link = clock_of(question, routing)
    settings = question.settings
    return clock, About(
        routing.name,
        routing.model,
        routing.tokens,
        routing.layers,
        routing.experts,
        routing.top_k,
        question.scope,
        question.start,
        question.expert_bytes or routing.expert_bytes,
        None if clock is None else {name: getattr(clock, name) for name in Clock.__slots__},
        link,
        routing.notes,
        (settings.cache.eviction.name, settings.prefetch.predictor.name, question.in_force(routing)),
        datetime.now(UTC).isoformat(timespec="milliseconds"),
        question.bypass,
    )


def _best(question: Question, routing: Routing, policy: str, slots: int, bound: str) -> Config:
    """The cache of a bound: without pins, which could only cost hits."""
    config = question.cache(routing, policy, slots, bypass=bound == BELADY_BYPASS)
    return replace(config, policy=bound, params={}, pinned=(), usual=())


def _caches(path: str, configs: list[Config], start: str, clock: Clock | None) -> list[Result]:
    """Runs in another process: one policy at all sizes."""
    return simulate(FileTrace(Path(path)), configs, start=start, clock=clock, processes=1)


def _ahead(
    path: str, config: TimedConfig, clock: Clock, size: int, start: str, profile: Profile | None
) -> TimedResult | str:
    """Runs in another process: one policy, prefetcher and size; or the reason why it cannot be simulated."""
    try:
        return timed(FileTrace(Path(path)), [config], clock, size, profile=profile, start=start, processes=1)[0]
    except MoestroError as error:
        return str(error)


def _light(config: TimedConfig, profile: Profile | None) -> Profile | None:
    """The profile for a predictor that needs it, without the trained networks, which need the loaded model."""
    needed = config.predictor != ORACLE and bool(variant("predictor", config.predictor).needs)
    return replace(profile, nets={}) if needed and profile is not None else None
