"""Runs many cache configurations over one trace, in parallel processes: every policy on the same tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from core.errors import SettingError
from core.policy.allocation.slot_allocation import AllocationProfile, Placement, place
from core.policy.eviction import Belady, ExpertIndex, MakePolicy, policy_maker
from core.policy.hints import Hints
from core.profile.trace import Trace
from core.settings.config import Settings
from core.settings.param import Choice, Value
from core.settings.registry import variant
from core.simulate.blocks import Block
from core.simulate.cache import Cache
from core.simulate.clock import Clock
from core.simulate.processes import run as run_jobs
from core.simulate.replay import Replay, Tally

BELADY = "belady"  # the best there is where every missing expert takes a slot of its pool
BELADY_BYPASS = "belady_bypass"  # the best there is where some slots are set aside for bypass
SMALL = 20_000  # tokens x configurations; fewer are finished before a second process would have started


@dataclass(frozen=True, slots=True)
class Config:
    """One cache: an eviction policy, BELADY or BELADY_BYPASS, with its parameters, and its slots in all."""

    policy: str
    slots: int
    scope: str = "layer"
    params: Mapping[str, Value] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()  # slots of each layer, with `transit` `slots` in all; () = the same for every layer
    pinned: tuple[int, ...] = ()  # eids that are never evicted
    usual: tuple[float, ...] = ()  # how often a profile saw each expert, by eid; () = no profile
    transit: int = 0  # of the slots, those set aside for bypass

    @classmethod
    def of(
        cls,
        settings: Settings,
        slots: int,
        layers: int,
        experts: int,
        top_k: int,
        profile: AllocationProfile | None = None,
    ) -> Config:
        """The cache that the engine makes from these settings. Raises SettingError as the engine does."""
        placed = place(settings.cache, layers, experts, top_k, profile)
        if problem := placed.problem(slots):
            raise SettingError(problem)
        name, own = settings.cache.eviction
        scope = settings.cache.scope
        return cls(
            name,
            slots,
            scope,
            own,
            tuple(placed.sizes(slots)) if scope == "layer" else (),
            tuple(sorted(placed.pinned)),
            tuple(placed.usual.tolist()) if placed.usual.any() else (),
            placed.aside(slots),
        )

    def placement(self, layers: int, experts: int, top_k: int) -> Placement:
        """What the engine's cache is built from."""
        even = Placement.even(layers, experts, top_k, self.scope)
        return replace(
            even,
            divide=(lambda slots: list(self.sizes)) if self.sizes else even.divide,
            pinned=frozenset(self.pinned),
            usual=np.asarray(self.usual) if self.usual else even.usual,
            transit=self.transit,
        )

    @property
    def capacity(self) -> int | tuple[int, ...]:
        """The slots in the form that `core.simulate.cache.Cache` takes."""
        return self.sizes or self.slots - self.transit

    def hints(self, layers: int, experts: int) -> Hints:
        """What policies know of experts from the start."""
        hints = Hints(layers, experts)
        hints.profile(self.usual or 0.0, self.pinned)
        return hints


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one configuration. Rates are of decode requests unless named prefill; None = no requests."""

    config: Config
    requests: int
    hits: int
    compulsory: int  # of the misses: first requests of an expert in the trace
    hit_rate: float | None
    prefill_hit_rate: float | None
    misses_per_token: float | None
    layer_hit_rate: tuple[float | None, ...]
    tpot_ms: float | None = None  # predicted, when a clock was given
    rank_hit_rate: tuple[float | None, ...] = ()  # of the router's first choice, its second ...
    blocks: tuple[Block, ...] = ()  # of each part of the trace: milliseconds per token, without a clock misses


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """Configurations that differ in slots alone, computed together. `at` = their indices in the list."""

    configs: tuple[Config, ...]
    at: tuple[int, ...]
    start: str

    def run(self, trace: Trace) -> Tally:
        """Runs it in this process."""
        first = self.configs[0]
        return Replay(
            trace,
            maker(first),
            [c.capacity for c in self.configs],
            first.scope,
            self.start,
            first.hints(trace.layers, trace.experts),
            first.transit,
        ).run()


def simulate(
    trace: Trace,
    configs: Sequence[Config],
    *,
    start: str = "empty",
    clock: Clock | None = None,
    processes: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Replays `trace` through every configuration; results in their order. Raises SettingError or TraceError.

    `start`: "empty" caches, or "filled" as the engine's are after a load. `processes`: 0 = one per CPU core."""
    if start not in ("empty", "filled"):
        raise SettingError(f"A cache starts empty or filled, not {start!r}.")
    for config in configs:  # raise errors of any configuration before the first runs
        Cache(
            maker(config),
            trace.layers,
            trace.experts,
            trace.top_k,
            config.scope,
            [config.capacity],
            config.hints(trace.layers, trace.experts),
            config.transit,
        )
    processes = processes or os.cpu_count() or 1
    jobs = _jobs(configs, start, processes)
    found: dict[int, Result] = {}
    for number, tally in run_jobs(jobs, trace, 1 if trace.tokens * len(configs) <= SMALL else processes):
        job = jobs[number]
        found |= {
            at: _result(config, tally, copy, clock)
            for copy, (at, config) in enumerate(zip(job.at, job.configs, strict=True))
        }
        say(f"{len(found)} of {len(configs)}: {job.configs[0].policy}")
    return [found[at] for at in range(len(configs))]


def maker(config: Config) -> MakePolicy:
    """The factory of a configuration's policy. Raises SettingError for an unknown name."""
    if config.policy in (BELADY, BELADY_BYPASS):
        return Belady
    variant("eviction", config.policy)
    return policy_maker(Choice(config.policy, config.params))


def _jobs(configs: Sequence[Config], start: str, processes: int) -> list[ReplayJob]:
    """As few jobs as the policies allow, but enough to give each process one; the slowest first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for at, config in enumerate(configs):
        key = config.policy, config.scope, config.pinned, config.usual, config.transit, *sorted(config.params.items())
        groups.setdefault(key, []).append(at)
    parts = max(1, -(-min(processes, len(configs)) // max(1, len(groups))))
    cut = [group[i::parts] for group in groups.values() for i in range(min(parts, len(group)))]
    jobs = [ReplayJob(tuple(configs[at] for at in part), tuple(part), start) for part in cut]
    return sorted(jobs, key=lambda job: (job.configs[0].scope == "layer", not _slow(job.configs[0])))


def _slow(config: Config) -> bool:
    return maker(config)(ExpertIndex(1, 1)).time_dependent


def _result(config: Config, tally: Tally, copy: int, clock: Clock | None) -> Result:
    requests, misses = tally.requests[:, copy], tally.misses[:, copy]
    by_misses = tally.by_misses[copy]
    tokens = int(by_misses[0].sum())
    return Result(
        config,
        int(requests[1].sum()),
        int((requests - misses)[1].sum()),
        int(tally.first[1].sum()),
        _rate(requests[1].sum(), misses[1].sum()),
        _rate(requests[0].sum(), misses[0].sum()),
        float((by_misses * range(by_misses.shape[1])).sum()) / tokens if tokens else None,
        tuple(_rate(r, m) for r, m in zip(requests[1], misses[1], strict=True)),
        clock.tpot_ms(by_misses) if clock else None,
        tuple(_rate(tally.ranked * len(by_misses), m) for m in tally.by_rank[copy].sum(0)),
        tuple(_block(part, clock) for part in tally.by_block[:, copy]),
    )


def _block(by_misses: npt.NDArray[np.int64], clock: Clock | None) -> Block:
    """`by_misses` [layers, k + 1] of one part of the trace."""
    tokens = int(by_misses[0].sum())
    if clock is not None:
        return Block(tokens, clock.tpot_ms(by_misses))
    return Block(tokens, float((by_misses * range(by_misses.shape[1])).sum()) / tokens if tokens else 0.0)


def _rate(requests: int, misses: int) -> float | None:
    return float(requests - misses) / float(requests) if requests else None
