"""bench methods: every eviction policy and predictor of the five papers on the same tokens of one model.

The model answers questions that its profile has not seen; its routing is recorded, and the predictions of every
predictor, each in the layer in which it arrived (bench.routing.recordings). The rest is simulated on that
(core.simulate), from filled caches: hit rates by policy, slots and layer with Belady's, LCP by its settings, and every
predictor with an LRU cache over the demo model's emulated link, with perfect prefetching as the bound. Predictors with
a worker have two rows: as in the engine, where an answer that comes late is used late, and waited for, which is a
bound. Policies are compared behind one predictor as the presets of their systems have it: a prefetch takes the slot
that the policy names, and no guard keeps residents. So is FineMoE by prefetch distance."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from bench.harness.engines import READ, divided, emulated_link
from bench.harness.paired import ratios, stretches, token_ratios
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.harness.workload import usual
from bench.routing.methods_result import WAITED, table
from bench.routing.probe import Predictors, subjects
from bench.routing.recordings import Recordings
from core.engine.texts import bundled
from core.measure.calibrate.gather import calibrate
from core.policy.predict.base import has_worker
from core.profile import Profile
from core.profile.trace import FileTrace
from core.settings.param import Value
from core.settings.registry import variant, variants
from core.simulate import BELADY, BELADY_BYPASS, Clock, Config, simulate
from core.simulate.prefetchers import ORACLE, TimedConfig, TimedResult, timed

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  # slots as a share of all experts
AHEAD = (0.25, 0.5)  # ... where prefetching is compared
HEEDING = ("lru", "lfu", "plec", "finemoe")  # policies compared with the same predictor
AHEAD_OF_ALL = "expert_map"  # ... which is this one
PLEC_BEHIND = ("routing_path", ORACLE)  # PLEC and others are compared behind its own predictor, and behind perfect ones
BESIDE_PLEC = (("plec", "global"), ("lru", "layer"), ("lfu", "layer"))  # the paper's LRU is each layer's own
COUNTS = ("hits", "recalled", "requests")  # of a decoded token
NONE = "none"
DISTANCES = (1, 2, 3, 5)  # layers ahead that expert maps are recorded with, where the model has as many
DISTANCE_SHARE = 0.5  # share of the experts in slots then; one of AHEAD, so that the default is recorded once
# (rho, omega): MoEpic's default, and four around it that are ours (its own stand in a picture alone).
LCP_SETTINGS = ((0.25, 128), (0.1, 128), (0.5, 128), (0.25, 64), (0.25, 256))


def measure(run: Run, model: str = "demo", tokens: int = 1024) -> Result:
    """`tokens` = decoded tokens of each trace. Recordings stay in the run's folder until all are made and simulated:
    the same command continues after an interruption."""
    engine = run.engine(model, RESIDENT)
    known, held_out = divided(bundled(model))
    asked = {NONE: (NONE, dict[str, Value]()), **subjects()}
    measured = {"model": engine.model_hash, "tokens": tokens, "small": run.small, "asked": asked}
    kept = Recordings(run.folder() / "methods", measured, engine, held_out, tokens, run.say)
    run.say(f"recordings are kept in {kept.folder}")
    profile = kept.profile(lambda: calibrate(engine, known, limit=600 if run.small else READ))
    engine.use_profile(profile)
    blob = engine.sizes.blob
    plain = kept.of(NONE, {}, RESIDENT)
    live, waited = recorded(kept, asked, {share: live_settings(profile, blob, share) for share in AHEAD})
    apart = at_distances(kept, live_settings(profile, blob, DISTANCE_SHARE), engine.shape.layers)
    resident = clock_of(profile, blob)
    clocks = {share: with_misses(resident, kept.lived(live[share][NONE])) for share in AHEAD}
    run.say("simulating")
    replays = Replays(kept, profile, clocks, blob)
    found = {
        **hit_rates(plain, profile),
        "lcp_settings": (settings := lcp_settings(plain, profile, clocks)),
        "lcp_shares": lcp_shares(settings),
        "distance": replays.by_distance(apart),
        **replays.prefetching(plain, live, waited),
    }
    kept.done()
    return {
        **found,
        "profile_tokens": profile.tokens,
        "clock": {f"{share:.1%}": asdict(clock) for share, clock in clocks.items()},
        "simulated": "hit rates, times and bytes are simulated on recorded routing, with predictions where the "
        "engine had them; 'engine' = what the engine itself did while recording; the link is emulated",
    }


def link_of(profile: Profile, blob: int) -> dict[str, Any]:
    """The link emulated for the demo model: as slow for it as PCIe is for a large model."""
    assert profile.times is not None
    return emulated_link(profile.times["att"] + profile.times["moe"], blob)


def clock_of(profile: Profile, blob: int) -> Clock:
    """The model's own times, and that link."""
    assert profile.times is not None
    times, link = profile.times, link_of(profile, blob)
    return Clock(
        compute_ms=profile.layers * (times["att"] + times["moe"]) + times["head"],
        load_ms=blob / link["link_gbps"] / 1e6 + link["link_latency_us"] / 1e3,
        expert_ms=times["moe"] / profile.top_k,
        head_ms=times["head"],
    )


def with_misses(clock: Clock, lived: Mapping[str, float]) -> Clock:
    """The same clock, with what a miss costs the computing thread in addition to its wait, from the engine's own
    answers without a predictor."""
    more_ms = lived["busy_ms"] - clock.compute_ms
    return replace(clock, miss_ms=max(0.0, more_ms / lived["misses"]) if lived["misses"] else 0.0)


def live_settings(profile: Profile, blob: int, share: float) -> dict[str, object]:
    """The engine's settings while a predictor works ahead of an LRU cache of that size, over that link."""
    return {"budget": f"{share * 100:g}%", "eviction": "lru", "scope": "layer", **link_of(profile, blob)}


def recorded(
    kept: Recordings, asked: Predictors, settings: Mapping[float, dict[str, object]]
) -> tuple[dict[float, dict[str, FileTrace]], dict[str, FileTrace]]:
    """(share -> title -> its recording in the engine at that share, title -> its recording waited for). When an answer
    comes depends on how fast the layers go by, so the former is made for each share; the latter are those of
    predictors with a worker."""
    live = {
        share: {title: kept.of(name, params, those) for title, (name, params) in asked.items()}
        for share, those in settings.items()
    }
    waited = {
        title: kept.of(name, params, RESIDENT, waited_for=True)
        for title, (name, params) in asked.items()
        if has_worker(variant("predictor", name).make)
    }
    return live, waited


def at_distances(kept: Recordings, settings: Mapping[str, object], layers: int) -> dict[int, FileTrace]:
    """Prefetch distance -> expert maps recorded in the engine with it."""
    params = subjects()[AHEAD_OF_ALL][1]
    return {
        distance: kept.of(AHEAD_OF_ALL, {**params, "distance": distance}, settings)
        for distance in DISTANCES
        if distance <= layers
    }


def hit_rates(trace: FileTrace, profile: Profile) -> dict[str, Any]:
    """Without prefetching. "hit_rate": scope -> slots -> policy -> hit rate; Belady's with bypass where the slots
    suffice for it, and not in one pool for all layers, where it could not do better. "hit_blocks": the same by parts of
    the routing. "hit_rate_by_layer": slots -> policy -> [layers], where every layer has as many slots."""
    total, counts = trace.layers * trace.experts, usual(profile)
    grid: list[tuple[float, Config]] = []
    for scope in ("layer", "global"):
        for share in SHARES:
            slots = int(share * total)
            policies = [BELADY, *(v.name for v in variants("eviction"))]
            grid += [(share, Config(policy, slots, scope, usual=counts)) for policy in policies]
            if scope == "layer" and slots - trace.top_k >= trace.layers * trace.top_k:
                grid.append((share, Config(BELADY_BYPASS, slots, scope, usual=counts, transit=trace.top_k)))
    hits: dict[str, dict[str, dict[str, float | None]]] = {}
    blocks: dict[str, dict[str, dict[str, list[float]]]] = {}
    asked = trace.layers * trace.top_k  # requests of a token
    by_layer: dict[str, dict[str, tuple[float | None, ...]]] = {}
    results = simulate(trace, [config for _, config in grid], start="filled")
    for (share, config), one in zip(grid, results, strict=True):
        hits.setdefault(config.scope, {}).setdefault(f"{share:.1%}", {})[config.policy] = one.hit_rate
        tokens = [block.tokens for block in one.blocks if block.tokens]
        hit = [block.tokens * (asked - block.cost) for block in one.blocks if block.tokens]
        of = blocks.setdefault(config.scope, {}).setdefault(f"{share:.1%}", {})
        of[config.policy] = ratios(hit, [asked * one for one in tokens])
        if config.scope == "layer":
            by_layer.setdefault(f"{share:.1%}", {})[config.policy] = one.layer_hit_rate
    return {"hit_rate": hits, "hit_blocks": blocks, "hit_rate_by_layer": by_layer}


def lcp_settings(trace: FileTrace, profile: Profile, clocks: Mapping[float, Clock]) -> dict[str, list[dict[str, Any]]]:
    """Slots -> LCP's hit rate and simulated time per token by rho and omega, slots of each layer, no prefetching."""
    counts, total = usual(profile), trace.layers * trace.experts
    found: dict[str, list[dict[str, Any]]] = {}
    for share in AHEAD:
        configs = [
            Config("lcp", int(share * total), "layer", {"rho": rho, "omega": omega}, usual=counts)
            for rho, omega in LCP_SETTINGS
        ]
        found[f"{share:.1%}"] = [
            {
                **one.config.params,
                "hit_rate": one.hit_rate,
                "tpot_ms": one.tpot_ms,
                "tpot_blocks": [block.cost for block in one.blocks if block.tokens],
                "default": at == 0,
            }
            for at, one in enumerate(simulate(trace, configs, start="filled", clock=clocks[share]))
        ]
    return found


def lcp_shares(settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """Slots -> setting of LCP -> by parts of the routing how far its time is from the default's, either way."""
    found: dict[str, dict[str, list[float]]] = {}
    for share, rows in settings.items():
        default = next(row["tpot_blocks"] for row in rows if row["default"])
        found[share] = {
            f"rho {row['rho']:g} omega {row['omega']}": [
                abs(a / b - 1) for a, b in zip(row["tpot_blocks"], default, strict=True)
            ]
            for row in rows
            if not row["default"]
        }
    return found


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of recordings, at each share of the experts in slots with the speed that the engine had there."""

    kept: Recordings
    profile: Profile
    clocks: Mapping[float, Clock]
    blob: int

    def at(
        self,
        trace: FileTrace,
        share: float,
        policy: str = "lru",
        scope: str = "layer",
        *,
        guard: bool = True,
        oracle: bool = False,
    ) -> dict[str, Any]:
        """The figures of a policy with the trace's predictor, or with one that is always right."""
        name, params = (ORACLE, {}) if oracle else trace.predictor or (NONE, {})
        slots = int(share * trace.layers * trace.experts)
        config = TimedConfig(Config(policy, slots, scope, usual=usual(self.profile)), name, params, guard=guard)
        clock = self.clocks[share]
        (one,) = timed(trace, [config], clock, self.blob, profile=self.profile, start="filled", processes=1)
        return figures(one)

    def live(self, trace: FileTrace, *at: Any, **more: Any) -> dict[str, Any]:
        """The same, and what the engine itself did while it was recorded, with LRU."""
        return {**self.at(trace, *at, **more), "engine": self.kept.lived(trace)}

    def by_distance(self, traces: Mapping[int, FileTrace]) -> dict[str, Any]:
        """FineMoE's eviction in one cache for all layers, without the prefetch guard, behind expert maps by
        distance."""
        rows = {
            str(distance): self.live(trace, DISTANCE_SHARE, "finemoe", "global", guard=False)
            for distance, trace in traces.items()
        }
        return {"share": f"{DISTANCE_SHARE:.1%}", "rows": rows}

    def prefetching(
        self, plain: FileTrace, live: Mapping[float, Mapping[str, FileTrace]], waited: Mapping[str, FileTrace]
    ) -> dict[str, Any]:
        """Predictors with an LRU cache, and policies with one predictor, without the prefetch guard: as in the engine,
        and waited for."""
        ahead, behind, plec = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for share, traces in live.items():
            ahead[f"{share:.1%}"] = {
                **{title: self.live(trace, share) for title, trace in traces.items()},
                **{title + WAITED: self.at(trace, share) for title, trace in waited.items()},
                ORACLE: self.at(plain, share, oracle=True),
            }
            if AHEAD_OF_ALL in waited:
                behind[f"{share:.1%}"] = {
                    policy + how: self.at(trace, share, policy, "global", guard=False)
                    for how, trace in (("", traces[AHEAD_OF_ALL]), (WAITED, waited[AHEAD_OF_ALL]))
                    for policy in HEEDING
                }
            plec[f"{share:.1%}"] = {
                f"{policy}, {name}{how}": self.at(one[name], share, policy, scope, oracle=name == ORACLE, guard=False)
                for name in PLEC_BEHIND
                for how, one in (("", {**traces, ORACLE: plain}), (WAITED, waited))
                if name in one
                for policy, scope in BESIDE_PLEC
            }
        return {"prefetchers": ahead, "behind": behind, "behind_predictor": AHEAD_OF_ALL, "plec": plec}


def figures(one: TimedResult) -> dict[str, Any]:
    """A replay's figures, of decoded tokens, and some by stretches of them. Recall counts what was there in time."""
    recalls = [rate for rate in one.recall_by_layer if rate is not None]
    hits, recalled, requests = ([getattr(token, name) for token in one.decoded] for name in COUNTS)
    return {
        "hit_blocks": token_ratios(hits, requests),
        "recall_blocks": token_ratios(recalled, requests) if recalls else [],
        "tpot_blocks": stretches([token.ms for token in one.decoded]),
        "hit_rate": one.hit_rate,
        "late_rate": one.rate("late"),
        "tpot_ms": one.tpot_ms,
        "stall_ms": one.per_token("stall_ms"),
        "net_ms": one.per_token("net_ms"),
        "demand_mb": one.figures["demand_bytes"] / 1e6,
        "prefetch_mb": one.figures["prefetch_bytes"] / 1e6,
        "wasted_mb": one.figures["wasted_bytes"] / 1e6,
        "recall_at_k": fmean(recalls) if recalls else None,
        "recall_by_layer": one.recall_by_layer,
    }


SUITE = Suite(measure, table, small={"tokens": 12})
