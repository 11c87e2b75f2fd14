"""bench quick: is the engine as fast as transformers with everything resident, and what does a cache gain otherwise?

Every round runs every configuration once on the same prompt. Figures are medians over the rounds' passes, ratios are
medians of the rounds' own ratios. Beside the demo model in bf16, ik_llama.cpp and llama.cpp decode as many tokens of
the same weights; `bench peers` compares at a size where speed matters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.harness.engines import QUESTION, decode_steps, emulated_link, random_tokens
from bench.harness.figures import belady_misses_per_token, overlapped_ms, ratio
from bench.harness.paired import times
from bench.harness.report import interval
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.models.peers import Peer, peers_of
from bench.speed.fidelity import HEADS, Fidelity, shown
from bench.speed.plain import IMPLEMENTATIONS, Plain
from core.capacity.plan import Plan, plan
from core.engine import Engine
from core.memory.link import REFERENCE
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.system.wording import cell, grid
from core.types import StepRecord

EVERYTHING = {**RESIDENT, "eviction": "lru", "predictor": "none"}
OURS: dict[str, dict[str, object]] = {
    "resident": {**EVERYTHING, "telemetry": "on"},
    "telemetry_off": {**EVERYTHING, "telemetry": "off"},
}
LINKED = {
    "ondemand": {"eviction": "none", "predictor": "none"},
    "lru": {"eviction": "lru", "predictor": "none"},
    "lru_gate": {"eviction": "lru", "predictor": "gate"},
}
RATIO, TELEMETRY = 1.0, 1.02  # goals


class Passes(NamedTuple):
    """One round of one configuration: milliseconds of each decode pass, and of the engine the records."""

    ms: list[float]
    steps: Sequence[StepRecord] = ()


def measure(
    run: Run,
    model: str = "demo",
    budget: str = "50%",
    rounds: int = 5,
    tokens: int = 48,
    dtype: str = "auto",
    peers: str = "",
) -> Result:
    """`tokens` = decode passes a round; `peers`: as `bench.models.peers.agreed`."""
    planned = plan(LoadSpec.checked(model, Settings(dict(RESIDENT)), dtype=dtype))
    engine = run.engine(model, RESIDENT, endless=True, dtype=dtype)
    plain, ids = Plain(planned.files.path, planned.dtype, planned.device), engine.prompt.tokens(QUESTION)
    most = torch.get_num_threads()
    plains = {f"{name}, {n} thread{'s'[: n > 1]}": (name, n) for name in IMPLEMENTATIONS for n in sorted({1, most})}
    link: dict[str, Any] = {}
    others = _peers(run, peers, planned) if model == "demo" and planned.dtype == torch.bfloat16 else {}
    about = _fidelity(engine, plain, planned, others) if others else {}
    sessions = {name: run.open(peer.opened(**peer.fastest(run.say))) for name, peer in others.items()}

    def one(name: str, number: int) -> Passes:
        if name in sessions:
            answer = sessions[name].ask(prompt=ids, tokens=random_tokens(tokens, number))
            return Passes([1e3 * seconds for seconds in answer["token_s"]])
        if name in plains:
            implementation, threads = plains[name]
            try:
                return Passes(plain.decode(ids, tokens, implementation, threads))
            finally:
                torch.set_num_threads(most)
        engine.change(OURS[name] if name in OURS else {**LINKED[name], "budget": budget, "telemetry": "on", **link})
        steps = decode_steps(engine, tokens)
        if name == "resident":
            layer_ms = median(step.total_ms for step in steps) / engine.shape.layers
            link.update(emulated_link(layer_ms, engine.sizes.blob))
        return Passes([step.total_ms for step in steps], steps)

    # in this order, as the link follows from the time of a layer with everything resident
    found = run.by_turns([*plains, *sessions, *OURS, *LINKED], one, rounds, alternate=False)
    return {**_figures(engine, found, list(plains), list(sessions)), **link, "about": about}


def _figures(engine: Engine, found: Mapping[str, list[Passes]], plains: Sequence[str], peers: Sequence[str]) -> Result:
    tpot = {name: median(ms for passes in of for ms in passes.ms) for name, of in found.items()}
    each = {name: [median(passes.ms) for passes in of] for name, of in found.items()}
    fastest, pace, size = min(plains, key=tpot.__getitem__), engine.transfers.pace, engine.sizes.blob
    bound = partial(overlapped_ms, tpot["resident"], size_bytes=size, pace=pace)
    table = {name: {"tpot_ms": tpot[name], **_linked(found[name], size, bound)} for name in LINKED}
    routed = np.concatenate([step.ids for step in found["lru"][-1].steps], axis=1)
    belady = belady_misses_per_token(routed, engine.shape.experts, engine.expert_cache.slots)
    return {
        "resident_ratio": ratio(each["resident"], each[fastest]),
        "telemetry_ratio": ratio(each["resident"], each["telemetry_off"]),
        **{f"{name}_tpot_ms": one["tpot_ms"] for name, one in table.items()},
        "bound_tpot_ms": bound(belady),
        "link_scaled_like": REFERENCE,
        "resident_tpot_ms": tpot["resident"],
        "telemetry_off_tpot_ms": tpot["telemetry_off"],
        "plain_tpot_ms": {name: tpot[name] for name in plains},
        "plain_fastest": fastest,
        "peers_tpot_ms": {name: tpot[name] for name in peers},
        "peers_over": {name: times(each[name], each["resident"])._asdict() for name in peers},
        "belady_misses_per_token": belady,
        "systems": table,
        "slots": engine.expert_cache.slots,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
    }


def _peers(run: Run, agreed: str, planned: Plan) -> dict[str, Peer]:
    """Other engines with the same weights, by title."""
    files = peers_of(run, agreed, planned.files.path, ["bf16"], run.folder(stays=False))
    return {peer.title: peer for peer in files["bf16"]}


def _fidelity(engine: Engine, plain: Plain, planned: Plan, others: Mapping[str, Peer]) -> dict[str, Any]:
    fidelity = Fidelity(planned.files.path, plain)
    about = {"Moestro": fidelity.of_engine(engine, "checkpoint")}
    return about | {name: fidelity.of_peer(peer) for name, peer in others.items()}


def _linked(found: Sequence[Passes], size: int, bound: Callable[[float], float]) -> dict[str, float]:
    """The figures of a cache over the link; `size` = bytes of a copy."""
    steps = [step for passes in found for step in passes.steps]
    copies = _mean(steps, lambda step: (step.demand_bytes + step.prefetch_bytes) / size)
    return {
        "bound_tpot_ms": bound(copies),
        "copies_per_token": copies,
        "hit_rate": sum(step.hits for step in steps) / sum(step.requests for step in steps),
        "stall_ms": _mean(steps, lambda step: step.stall_ms),
    }


def _mean(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    return sum(map(value, steps)) / len(steps)


def table(r: Result) -> list[str]:
    ours = f"Moestro, {r['decode_threads']} decode thread(s)"
    tpot = [(f"transformers {name}", ms) for name, ms in r["plain_tpot_ms"].items()]
    tpot += r["peers_tpot_ms"].items()
    tpot += [(ours, r["resident_tpot_ms"]), ("  the same, telemetry off", r["telemetry_off_tpot_ms"])]
    systems = [
        (
            name,
            *(cell(one[figure], ".3f") for figure in ("tpot_ms", "bound_tpot_ms")),
            f"{one['hit_rate']:.1%}",
            cell(one["copies_per_token"]),
            cell(one["stall_ms"], ".3f"),
        )
        for name, one in r["systems"].items()
    ]
    return [
        f"Everything resident, {r['dtype']}, TPOT in ms (medians):",
        *grid(("", ""), [(name, cell(ms, ".3f")) for name, ms in tpot]),
        f"  Moestro / fastest transformers ({r['plain_fastest']}): {r['resident_ratio']:.3f}, goal <= {RATIO:g}",
        *(f"  tokens a second over {name}: {interval(one)}" for name, one in r["peers_over"].items()),
        *grid(("", *HEADS), [(name, *shown(about)) for name, about in r["about"].items()]),
        f"  telemetry on / off: {r['telemetry_ratio']:.3f}, goal <= {TELEMETRY}",
        f"Budget {r['budget']} ({r['slots']} slots), EMULATED link of {r['link_gbps']} GB/s + "
        f"{r['link_latency_us']} us, scaled like {r['link_scaled_like']}:",
        *grid(("system", "TPOT ms", "bound ms", "hit rate", "copies/token", "stall ms"), systems),
        "  (bound: the same copies, hidden behind computing as far as the link allows)",
        f"  any cache of this size, perfectly prefetched: bound {r['bound_tpot_ms']:.3f} ms "
        f"({r['belady_misses_per_token']:.2f} Belady misses a token, first ones left out)",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 8, "peers": "none"})
