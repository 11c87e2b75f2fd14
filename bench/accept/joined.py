"""Check of `launch.py accept`: missing experts that the host computes within tokens that the GPU leads, in the fast
arithmetic: the bits of tokens led by the host, milliseconds a token, and that a silent host ends an answer in words."""

import ctypes
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from bench.accept.drawn import Subject, dense_only, one_expert
from bench.accept.engines import Text, drawn, load, talk
from bench.accept.link import Wrong
from bench.models.generate import checkpoint
from core.engine import Engine
from core.errors import BudgetError, HostError
from core.memory.codec.fast.background import most_threads
from core.settings.sampling import Sampling
from core.types import Ids

WAYS: Mapping[str, Mapping[str, object]] = {
    "host": {"gpu_decode": "host", "miss_placement": "wait"},
    "host_beside": {"gpu_decode": "host", "miss_placement": "host"},
    "graph": {"gpu_decode": "graph", "miss_placement": "wait"},
    "device_joined": {"gpu_decode": "device", "miss_placement": "host"},
    "graph_joined": {"gpu_decode": "graph", "miss_placement": "host"},
}
JOINED = "graph_joined"
BUDGETS = ("50%", "35%", "15%")
SETTINGS: dict[str, object] = {"budget": "20%", "eviction": "lru", "predictor": "none", **WAYS["host"]}
THREADS = 8  # of the host, at most
ROUNDS = 3  # in which the ways take turns
SILENT_NS = 200_000_000  # that the GPU waits for a host that is silent
LATE_S = 10.0  # until an answer has ended for that


def joined_by_the_host(subject: Subject) -> dict[str, Any]:
    """Bits with few slots, a silent host, and milliseconds a token."""
    engine = _engine(subject, str(checkpoint(subject.folder / "different", subject.different)), 512)
    try:
        if engine.arithmetic.name != "fast":
            return {"left_out": engine.arithmetic.fallback}
        if reason := _turned(engine, JOINED):
            return {"left_out": reason}
        found = subject.report()
        found.add(_bits(engine, subject))
        found.add({"silent_s": _silent(engine, subject)})
    finally:
        engine.unload()
    return {**found, **_speed(subject)}


def _engine(subject: Subject, model: str, context: int) -> Engine:
    settings = {**SETTINGS, "host_threads": max(1, min(THREADS, most_threads()))}
    return load(model, subject.device, context, settings, arithmetic="fast")


def _turned(engine: Engine, way: str) -> str:
    """Have tokens computed like this -> why they cannot be."""
    engine.change(WAYS[way])
    return engine.parts.device_decode.reason


def _bits(engine: Engine, subject: Subject) -> dict[str, Any]:
    """Logits of one text in each way, all of which have to be the same. Raises Wrong."""
    vocab, length = subject.different.vocab, 6 if subject.small else 200
    ids, said, logits = drawn(2 if subject.small else 40, vocab, 3), drawn(length, vocab, 4), dict[str, torch.Tensor]()
    hosted, refused, replayed = 0, dict[str, str](), 0
    for way in WAYS:
        if reason := _turned(engine, way):
            refused[way] = reason
            continue
        text = Text(said, keep=True)
        pieces = list(engine.generate(Ids(ids), Sampling(max_new_tokens=length), draw=text))
        logits[way] = torch.stack(text.logits)
        engine.expert_cache.check_integrity()
        if not torch.equal(logits[way], logits["host"]):
            first = int((logits[way] != logits["host"]).any(1).nonzero()[0])
            raise Wrong(f"computed as {way}, logits are others from token {first} on")
        if way == JOINED:
            hosted = sum(piece.step.host_computed for piece in pieces if piece.step is not None)
            graphs = engine.parts.device_decode.graphs
            replayed = graphs.replays if graphs is not None else 0
    if not hosted:
        raise Wrong("the host has computed no expert")
    return {"passes": length, "same_bits": [*logits], "hosted": hosted, "replayed": replayed, "refused": refused}


def _silent(engine: Engine, subject: Subject) -> float:
    """Seconds until an answer whose host says nothing has ended with an error; the next one goes on. Raises Wrong."""
    _turned(engine, "device_joined")
    step = engine.parts.device_decode.step
    assert step is not None and step.join is not None
    nothing = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(lambda *given: None)
    step.join._function = nothing
    step.join.mail = step.join.mail._replace(limit_ns=SILENT_NS)
    count, began_s = 4 if subject.small else 100, time.perf_counter()
    try:
        talk(engine, subject.different.vocab, count, count)
    except HostError:
        took_s = time.perf_counter() - began_s
    else:
        raise Wrong("the host was silent, and nobody missed it")
    if took_s > LATE_S and not subject.small:
        raise Wrong(f"the host was silent, and the answer ended after {took_s:.1f} s")
    talk(engine, subject.different.vocab, 2, 2)
    engine.expert_cache.check_integrity()
    return took_s


def _speed(subject: Subject, tokens: int = 48) -> dict[str, Any]:
    """Milliseconds a token by budget, the median of rounds in which the ways take turns."""
    if subject.small:
        return {}
    sizes, found = subject.sizes, subject.report("by_budget")
    with one_expert(sizes):
        engine = _engine(subject, str(dense_only(subject.folder / "large", sizes)), 1024)
    try:
        for budget in found.in_time(BUDGETS):
            try:
                engine.change({"budget": budget})
            except BudgetError as error:
                found[budget] = {"left_out": str(error)}
                continue
            talk(engine, sizes.vocab, tokens, 8)  # what there is room for comes to be where it is used
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(ROUNDS):
                for way in WAYS:
                    if not _turned(engine, way):
                        steps = talk(engine, sizes.vocab, tokens, 8)[tokens // 4 :]  # the first ones capture
                        times[way] += [step.total_ms for step in steps]
            found[budget] = {way: {"ms": statistics.median(each)} for way, each in times.items() if each}
    finally:
        engine.unload()
    return {"model": sizes.name, "by_budget": found}
