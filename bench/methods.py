"""bench methods: every eviction policy and predictor of the five papers on the same tokens of one model.

The model answers questions that its profile has not seen; its routing is recorded, and the predictions of every
predictor. The rest is simulated (core.simulate) from cold but filled caches: hit rates by policy and slots beside
Belady's, and every predictor with an LRU cache over the demo model's emulated link, beside perfect prefetching.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.predictors import READ, divided, subjects
from core.calibrate.gather import calibrate
from core.calibrate.texts import Text, bundled
from core.engine import Engine
from core.memory.link import scaled_gbps
from core.profile import Profile
from core.session.manifest import device_name, versions
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.param import Value
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.simulate import BELADY, Clock, Config, simulate
from core.simulate.prefetchers import ORACLE, TimedConfig, TimedResult, timed
from core.trace import FileTrace
from core.trace.file import TraceWriter

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  # slots as a share of all experts
AHEAD = (0.25, 0.5)  # ... where prefetching is compared
LATENCY_US = 10.0
ANSWER = 64  # most tokens of an answer
HEEDING = ("lru", "lfu", "plec", "finemoe")  # policies compared with the same predictor
AHEAD_OF_ALL = "expert_map"  # ... which is this one

# Claim -> (figure, the better, the worse): what a paper reports of its own models.
ORDERINGS: dict[str, tuple[str, str, str]] = {
    "MoEpic table 1: LCP hits more than LRU": ("policy", "lcp", "lru"),
    "MoEpic table 1: LCP hits more than LFU": ("policy", "lcp", "lfu"),
    "MoEpic ablation: LCP hits more than random": ("policy", "lcp", "random"),
    "FineMoE figure 14a: full map search above trajectory alone": ("hit", "expert_map", "expert_map, trajectory alone"),
    "FineMoE figure 14a: dynamic selection above always k": ("hit", "expert_map", "expert_map, always k"),
    "FineMoE figure 14a: map search above request counts": ("hit", "expert_map", "request"),
    "FineMoE figure 14a: map search above the next gate": ("hit", "expert_map", "gate"),
    "FineMoE figure 14b: its eviction hits more than LRU": ("heed", "finemoe", "lru"),
    "FineMoE figure 14b: its eviction hits more than LFU": ("heed", "finemoe", "lfu"),
    "ExpertFlow: PLEC hits more than LRU": ("heed", "plec", "lru"),
    "ExpertFlow table 1: path predictor above temporal (TLP)": ("recall", "routing_path", "recent"),
    "ExpertFlow table 1: path predictor above spatial (SLP)": ("recall", "routing_path", "transitions"),
    "Speculating Experts figure 4: default vectors above the next gate": ("recall", "default_vectors", "gate"),
    "Speculating Experts figure 4: hybrid above the next gate": ("recall", "hybrid", "gate"),
}


def run(
    model: str = "demo", tokens: int = 1024, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens of the trace."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": "all", "link": "own"})))
    try:
        (known, held_out), tokens = divided(bundled(model)), 12 if small else tokens
        say("calibrating")
        profile = calibrate(engine, known, limit=600 if small else READ)
        engine.use_profile(profile)
        with tempfile.TemporaryDirectory() as folder:
            asked = [(title, *what) for title, what in {"none": ("none", {}), **subjects()}.items()]
            traces = {
                title: _record(engine, Path(folder) / f"{at}.trace", name, params, held_out, tokens, say)
                for at, (title, name, params) in enumerate(asked)
            }
            clock = clock_of(profile, engine.sizes.blob)
            found = _simulated(traces, profile, clock, engine.sizes.blob, say)
        shape = engine.shape
        return {
            **found,
            "orderings": orderings(found),
            "tokens": tokens,
            "profile_tokens": profile.tokens,
            "model": engine.model_name,
            "model_hash": engine.model_hash,
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "clock": {n: getattr(clock, n) for n in clock.__slots__},
            "simulated": "hit rates, times and bytes are simulated on recorded routing; the link is emulated",
            "device": device_name(engine.device),
            "versions": versions(),
        }
    finally:
        engine.unload()


def clock_of(profile: Profile, blob: int) -> Clock:
    """The model's own times, and the link emulated for the demo model: as slow for it as PCIe is for a large model."""
    assert profile.times is not None
    times, k = profile.times, profile.top_k
    layer_ms = times["att"] + times["moe"]
    gbps = scaled_gbps(layer_ms, blob, LATENCY_US)
    return Clock(
        compute_ms=profile.layers * layer_ms + times["head"],
        load_ms=blob / gbps / 1e6 + LATENCY_US / 1e3,
        expert_ms=times["moe"] / k,
        head_ms=times["head"],
    )


def _record(
    engine: Engine,
    path: Path,
    name: str,
    params: Mapping[str, Value],
    texts: Sequence[Text],
    tokens: int,
    say: Callable[[str], None],
) -> Path:
    """Asks the questions with one predictor on until enough tokens were decoded; its predictions go into the trace."""
    say(f"recording {name}")
    engine.change({"predictor": "none"})
    engine.change({"predictor": name, **{f"predictor.{name}.{key}": value for key, value in params.items()}})
    engine.predictor_host.predictor.patient = True
    engine.keep(probs=False, ranks=True, tokens=True)
    shape, left, asked = engine.shape, tokens, 0
    with TraceWriter(
        path,
        shape.layers,
        shape.experts,
        shape.top_k,
        model=engine.model_name,
        model_hash=engine.model_hash,
        predictor=(name, params),
    ) as trace:
        while left > 0:
            question: Any = texts[asked % len(texts)]
            sampling = Sampling(temperature=0.7, seed=asked, max_new_tokens=min(left, ANSWER) + 1)
            asked += 1
            for piece in engine.generate(question if isinstance(question, str) else question[:1], sampling):
                if piece.step is not None and piece.kind != "end":
                    trace.add(piece.step)
                    left -= piece.step.phase == "decode"
    engine.keep(probs=False, ranks=False, tokens=False)
    return path


def _simulated(
    traces: Mapping[str, Path], profile: Profile, clock: Clock, blob: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Policies without prefetching by scope and slots; predictors with an LRU cache; policies with one predictor."""
    say("simulating")
    plain, total = FileTrace(traces["none"]), profile.layers * profile.experts
    policies = [BELADY, *(v.name for v in variants("eviction"))]
    assert profile.counts is not None
    usual = tuple(map(float, profile.counts.ravel().tolist()))
    grid = [
        (scope, share, Config(policy, int(share * total), scope, usual=usual))
        for scope in ("layer", "global")
        for share in SHARES
        for policy in policies
    ]
    hits: dict[str, dict[str, dict[str, float | None]]] = {}
    for (scope, share, config), one in zip(grid, simulate(plain, [c for *_, c in grid], start="filled"), strict=True):
        hits.setdefault(scope, {}).setdefault(f"{share:.1%}", {})[config.policy] = one.hit_rate

    def ahead(title: str, share: float, policy: str = "lru", scope: str = "layer") -> dict[str, Any]:
        name, params = {"none": ("none", {}), ORACLE: (ORACLE, {}), **subjects()}[title]
        trace = plain if title == ORACLE else FileTrace(traces[title])
        config = TimedConfig(Config(policy, int(share * total), scope), name, params)
        (one,) = timed(trace, [config], clock, blob, profile=profile, start="filled", processes=1)
        return _figures(one)

    return {
        "hit_rate": hits,
        "prefetchers": {f"{share:.1%}": {title: ahead(title, share) for title in [*traces, ORACLE]} for share in AHEAD},
        "behind": {
            f"{share:.1%}": {policy: ahead(AHEAD_OF_ALL, share, policy, "global") for policy in HEEDING}
            for share in AHEAD
        },
        "behind_predictor": AHEAD_OF_ALL,
    }


def _figures(one: TimedResult) -> dict[str, Any]:
    recalls = [rate for rate in one.recall_by_layer if rate is not None]
    return {
        "hit_rate": one.hit_rate,
        "late_rate": one.rate("late"),
        "tpot_ms": one.tpot_ms,
        "stall_ms": one.per_token("stall_ms"),
        "net_ms": one.per_token("net_ms"),
        "demand_mb": one.figures["demand_bytes"] / 1e6,
        "prefetch_mb": one.figures["prefetch_bytes"] / 1e6,
        "wasted_mb": one.figures["wasted_bytes"] / 1e6,
        "recall_at_k": statistics.fmean(recalls) if recalls else None,
    }


def orderings(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which of the papers' orderings hold here, for every number of slots."""
    said = []
    for claim, (figure, better, worse) in ORDERINGS.items():
        table = {"policy": found["hit_rate"].get("layer", {}), "heed": found["behind"]}.get(
            figure, found["prefetchers"]
        )
        key = "recall_at_k" if figure == "recall" else "hit_rate"
        pairs = {
            share: [row[name][key] if figure != "policy" else row[name] for name in (better, worse)]
            for share, row in table.items()
        }
        holds = [a > b for a, b in pairs.values() if a is not None and b is not None]
        said.append(
            {
                "claim": claim,
                "figure": key,
                "pairs": pairs,
                "holds": "yes" if all(holds) else "in part" if any(holds) else "no",
            }
        )
    return said


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"{result['tokens']} decoded tokens, simulated."
    ]
    for scope, sizes in result["hit_rate"].items():
        names = sorted(next(iter(sizes.values())), key=lambda name: -(sizes["50.0%"][name] or 0.0))
        lines += [
            f"Hit rate by policy and slots, scope {scope}:",
            f"  {'':14s}" + "".join(f"{share:>8s}" for share in sizes),
        ]
        lines += [f"  {name:14s}" + "".join(f"{row[name]:8.1%}" for row in sizes.values()) for name in names]
    for title, rows in (("ahead of LRU", result["prefetchers"]), (f"policies behind {AHEAD_OF_ALL}", result["behind"])):
        for share, row in rows.items():
            lines += [
                f"With prefetching, {title}, {share} of the experts in slots:",
                f"  {'':30s}    hits  TPOT ms   net ms  link MB  wasted MB  recall",
            ]
            lines += [
                f"  {name:30s} {one['hit_rate']:7.1%} {one['tpot_ms']:8.2f} {one['net_ms'] or 0:8.2f} "
                f"{one['demand_mb'] + one['prefetch_mb']:8.1f} {one['wasted_mb']:10.1f} "
                f"{one['recall_at_k'] or 0:7.1%}"
                for name, one in row.items()
            ]
    lines += ["The papers' orderings here:", *(f"  {one['holds']:8s}{one['claim']}" for one in result["orderings"])]
    return "\n".join(lines)
