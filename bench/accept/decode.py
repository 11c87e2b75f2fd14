"""Check of `launch.py accept`: tokens led by the GPU (the setting gpu_decode), against those led by the host."""

import statistics
from typing import Any

import torch

from bench.accept.drawn import Subject, dense_only, one_expert
from bench.accept.engines import Text, drawn, load, talk
from bench.accept.link import Wrong
from bench.models.generate import checkpoint
from core.engine import Engine
from core.errors import BudgetError, SettingError
from core.settings.sampling import Sampling
from core.types import Ids

WAYS = ("host", "device", "graph")
BUDGETS = ("all", "35%", "15%")
SETTINGS: dict[str, object] = {"budget": "20%", "eviction": "lru", "predictor": "none"}
OFF = 0.03  # of logits of a graph, relative: attention over masked positions is summed in another order
ROUNDS = 3  # in which the ways take turns


def led_by_the_gpu(subject: Subject) -> dict[str, Any]:
    """The same bits with few slots, and milliseconds a token."""
    engine = load(str(checkpoint(subject.folder / "different", subject.different)), subject.device, 512, dict(SETTINGS))
    try:
        if reason := _turned(engine, "device"):
            return {"left_out": reason}
        found = subject.report()
        found.add(_bits(engine, subject))
    finally:
        engine.unload()
    return {**found, **_speed(subject)}


def _turned(engine: Engine, way: str) -> str:
    """Have tokens led like this -> why that cannot be."""
    try:
        engine.change({"gpu_decode": way})
    except SettingError as error:
        return str(error)
    return engine.parts.device_decode.reason


def _uncaptured(engine: Engine) -> str:
    graphs = engine.parts.device_decode.graphs
    return graphs.reason if graphs is not None else ""


def _bits(engine: Engine, subject: Subject) -> dict[str, Any]:
    """Logits of one text, led in each way. Raises Wrong where those of the GPU are others."""
    vocab, length = subject.different.vocab, 24 if subject.small else 200
    ids, said, logits = drawn(40, vocab, 3), drawn(length, vocab, 4), dict[str, torch.Tensor]()
    for way in WAYS:
        _turned(engine, way)
        text = Text(said, keep=True)
        list(engine.generate(Ids(ids), Sampling(max_new_tokens=length), draw=text))
        logits[way] = torch.stack(text.logits)
        engine.expert_cache.check_integrity()
    graphs, host = engine.parts.device_decode.graphs, logits["host"]
    if not torch.equal(logits["device"], host):
        first = int((logits["device"] != host).any(1).nonzero()[0])
        raise Wrong(f"led by the GPU, logits are others from token {first} on")
    off = float(((logits["graph"] - host).norm(dim=1) / host.norm(dim=1)).median())
    if off > OFF:
        raise Wrong(f"as graphs, logits are {off:.1%} off in the middle of all tokens")
    return {
        "passes": len(host),
        "replayed": graphs.replays if graphs is not None else 0,
        "not_captured": _uncaptured(engine),
        "graph_off": off,
        "graph_same_bits": int((logits["graph"] == host).all(1).sum()),
        "graph_same_likeliest": float((logits["graph"].argmax(1) == host.argmax(1)).float().mean()),
    }


def _speed(subject: Subject, tokens: int = 48) -> dict[str, Any]:
    """Milliseconds a token by budget, the median of rounds in which the ways take turns."""
    count, sizes, found = 8 if subject.small else tokens, subject.sizes, subject.report("by_budget")
    with one_expert(sizes):
        engine = load(str(dense_only(subject.folder / "large", sizes)), subject.device, 1024, dict(SETTINGS))
    try:
        for budget in found.in_time(BUDGETS):
            try:
                engine.change({"budget": budget})
            except BudgetError as error:
                found[budget] = {"left_out": str(error)}
                continue
            talk(engine, sizes.vocab, count)  # what there is room for comes to be where it is used
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(1 if subject.small else ROUNDS):
                for way in WAYS:
                    if reason := _turned(engine, way):
                        raise Wrong(f"{way} with {budget}: {reason}")
                    steps = talk(engine, sizes.vocab, count)[count // 4 :]  # the first ones capture
                    times[way] += [step.total_ms for step in steps]
            medians = {way: {"ms": statistics.median(times[way])} for way in WAYS}
            found[budget] = {**medians, "not_captured": _uncaptured(engine)}
    finally:
        engine.unload()
    verdicts = {budget: _verdict(one) for budget, one in found.items() if "left_out" not in one}
    return {"model": sizes.name, "by_budget": found, "verdict": verdicts}


def _verdict(times: dict[str, Any]) -> str:
    best = min(WAYS, key=lambda way: float(times[way]["ms"]))
    return f"{best}: {times['host']['ms'] / times[best]['ms']:.2f} times the tokens a second of host"
