"""bench quick: is the engine as fast as transformers with everything resident, and what does a cache gain otherwise?

Every round runs every configuration once, in turn, on the same prompt; figures are medians over the rounds' passes and
ratios are medians of the rounds' own ratios, so that a slowdown of the machine affects both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.bounds import belady_misses_per_token, overlapped_ms
from bench.plain import IMPLEMENTATIONS, Plain
from core.capacity.plan import plan
from core.engine import Engine
from core.memory.link import REFERENCE, scaled_gbps
from core.session.manifest import device_name, versions
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import StepRecord

QUESTION = "What does heapq.heappush do?"
LATENCY_US = 10.0
LINKED = {
    "ondemand": {"eviction": "none", "predictor": "none"},
    "lru": {"eviction": "lru", "predictor": "none"},
    "lru_gate": {"eviction": "lru", "predictor": "gate"},
}


@dataclass
class Series:
    """All rounds of one configuration: milliseconds of every decode pass, and for the engine the records."""

    rounds: list[list[float]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float:
        return statistics.median(ms for passes in self.rounds for ms in passes)

    def ratio(self, other: Series) -> float:
        """Median over the rounds of (this one's median pass / the other's in the same round)."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)

    def per_token(self, value: Callable[[StepRecord], float]) -> float:
        return sum(map(value, self.steps)) / len(self.steps) if self.steps else 0.0


def run(
    model: str = "demo",
    budget: str = "50%",
    rounds: int = 5,
    tokens: int = 48,
    dtype: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decode passes a round."""
    spec = LoadSpec.checked(model, Settings({"budget": "all", "link": "own"}), dtype=dtype)
    planned = plan(spec)
    engine = Engine.load(spec)
    plain = Plain(planned.files.path, planned.dtype, planned.device)
    engine.prompt.ends = set()  # every run decodes the same number of tokens
    ids = engine.prompt.tokens([{"role": "user", "content": QUESTION}])
    most = torch.get_num_threads()
    plains = {f"{name}, {n} thread{'s'[: n > 1]}": (name, n) for name in IMPLEMENTATIONS for n in sorted({1, most})}
    series: dict[str, Series] = {}

    def ours(name: str, settings: dict[str, object]) -> None:
        engine.change(settings)
        steps = [
            p.step
            for p in engine.generate([{"role": "user", "content": QUESTION}], Sampling(max_new_tokens=tokens + 1))
            if p.step is not None
        ]
        decode = [s for s in steps if s.phase == "decode"]
        found = series.setdefault(name, Series())
        found.rounds.append([s.total_ms for s in decode])
        found.steps += decode

    try:
        for number in _warm(rounds, series):
            say(f"round {number} of {rounds}" if number else "warming up")
            for name, (implementation, threads) in plains.items():
                series.setdefault(name, Series()).rounds.append(plain.decode(ids, tokens, implementation, threads))
            torch.set_num_threads(most)
            resident = {"budget": "all", "link": "own", "eviction": "lru", "predictor": "none"}
            ours("resident", {**resident, "telemetry": True})
            ours("telemetry_off", {**resident, "telemetry": False})
            layer_ms = series["resident"].tpot_ms / engine.shape.layers
            gbps = scaled_gbps(layer_ms, engine.sizes.blob, LATENCY_US)
            for name, choice in LINKED.items():
                ours(
                    name,
                    {
                        **choice,
                        "budget": budget,
                        "telemetry": True,
                        "link": "emulated",
                        "link_gbps": gbps,
                        "link_latency_us": LATENCY_US,
                    },
                )
        return {"rounds": rounds, "tokens": tokens, **_result(engine, series, list(plains), budget, gbps, tokens)}
    finally:
        engine.unload()


def _warm(rounds: int, series: dict[str, Series]) -> Iterable[int]:
    """Round 0 is warm-up and then discarded."""
    yield 0
    series.clear()
    yield from range(1, rounds + 1)


def _result(
    engine: Engine, series: dict[str, Series], plains: list[str], budget: str, gbps: float, tokens: int
) -> dict[str, object]:
    fastest = min(plains, key=lambda name: series[name].tpot_ms)
    resident, pace, size = series["resident"].tpot_ms, engine.transfers.pace, engine.sizes.blob
    table = {}
    for name in LINKED:
        one = series[name]
        copies = one.per_token(lambda s: (s.demand_bytes + s.prefetch_bytes) / size)
        requests = sum(s.requests for s in one.steps)
        table[name] = {
            "tpot_ms": one.tpot_ms,
            "bound_tpot_ms": overlapped_ms(resident, copies, size, pace),
            "copies_per_token": copies,
            "hit_rate": sum(s.hits for s in one.steps) / requests,
            "stall_ms": one.per_token(lambda s: s.stall_ms),
        }
    routed = np.concatenate([s.ids for s in series["lru"].steps[-tokens:]], axis=1)
    belady = belady_misses_per_token(routed, engine.shape.experts, engine.expert_cache.slots)
    return {
        "resident_ratio": series["resident"].ratio(series[fastest]),
        "telemetry_ratio": series["resident"].ratio(series["telemetry_off"]),
        "ondemand_tpot_ms": table["ondemand"]["tpot_ms"],
        "lru_tpot_ms": table["lru"]["tpot_ms"],
        "lru_gate_tpot_ms": table["lru_gate"]["tpot_ms"],
        "bound_tpot_ms": overlapped_ms(resident, belady, size, pace),
        "link": "emulated",
        "link_gbps": gbps,
        "link_latency_us": LATENCY_US,
        "link_scaled_like": REFERENCE,
        "device": device_name(engine.device),
        "versions": versions(),
        "resident_tpot_ms": resident,
        "telemetry_off_tpot_ms": series["telemetry_off"].tpot_ms,
        "plain_tpot_ms": {name: series[name].tpot_ms for name in plains},
        "plain_fastest": fastest,
        "belady_misses_per_token": belady,
        "systems": table,
        "budget": budget,
        "slots": engine.expert_cache.slots,
        "decode_threads": engine.manifest()["decode_threads"],
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "model": engine.model_name,
        "model_hash": engine.model_hash,
    }


def table(result: dict[str, object]) -> str:
    """The result as text."""
    r, plain, systems = result, dict(result["plain_tpot_ms"]), dict(result["systems"])  # type: ignore[call-overload]
    ours = f"Moestro, {r['decode_threads']} decode thread(s)"
    lines = [f"Everything resident, {r['dtype']}, TPOT in ms (medians):"]
    lines += [f"  transformers {name:22s} {ms:8.3f}" for name, ms in plain.items()]
    lines += [
        f"  {ours:35s} {r['resident_tpot_ms']:8.3f}",
        f"  {'  the same, telemetry off':35s} {r['telemetry_off_tpot_ms']:8.3f}",
        f"  Moestro / fastest transformers ({r['plain_fastest']}): {r['resident_ratio']:.3f}, goal <= 1",
        f"  telemetry on / off: {r['telemetry_ratio']:.3f}, goal <= 1.02",
        f"Budget {r['budget']} ({r['slots']} slots), EMULATED link of {r['link_gbps']} GB/s + "
        f"{r['link_latency_us']} us, scaled like {r['link_scaled_like']}:",
        "  system       TPOT ms  bound ms  hit rate  copies/token  stall ms",
    ]
    lines += [
        f"  {name:10s} {s['tpot_ms']:9.3f} {s['bound_tpot_ms']:9.3f} {s['hit_rate']:9.1%} "
        f"{s['copies_per_token']:13.2f} {s['stall_ms']:9.3f}"
        for name, s in systems.items()
    ]
    lines += [
        "  (bound: the same copies, hidden behind computing as far as the link allows)",
        f"  any cache of this size, perfectly prefetched: bound {r['bound_tpot_ms']:.3f} ms "
        f"({r['belady_misses_per_token']:.2f} Belady misses a token, first ones left out)",
    ]
    return "\n".join(lines)
