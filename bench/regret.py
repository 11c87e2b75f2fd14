"""bench regret: what does the live comparison of eviction policies cost per token?

Rounds run in pairs in one process, with the comparison on and off, alternating which is first. TPOT is the mean time
between tokens as a chat receives them, so that it includes the comparison's work on the computing thread and beside it.
The figure is the median over the pairs of (TPOT with / TPOT without).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from core.engine import Engine
from core.errors import MoestroError
from core.session.manifest import device_name, versions
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import ModelShape, StepRecord

QUESTION = "What does heapq.heappush do?"
SCOPES = ("layer", "global")
GOAL = 1.03
BEGIN = 64  # tokens that start the comparison before it is measured
READY_S = 30.0


class Meter(Protocol):
    """The object under test: `app.services.regret.Regret`."""

    def add(self, load: int, shape: ModelShape, settings: Mapping[str, Any], step: StepRecord) -> None: ...
    def switch(self, on: bool) -> None: ...
    def view(self, load: int | None, settings: Mapping[str, Any]) -> dict[str, Any] | None: ...
    def wait(self, version: int, timeout: float | None = None) -> int: ...
    def close(self) -> None: ...


def run(
    meter: Callable[[], Meter],
    model: str = "demo",
    budget: str = "50%",
    rounds: int = 9,
    tokens: int = 320,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens a round."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": budget, "eviction": "lru"})))
    engine.prompt.ends = set()  # every round decodes the same number of tokens
    try:
        scopes = {}
        for scope in SCOPES:
            engine.change({"scope": scope})
            watched = meter()
            try:
                scopes[scope] = _pairs(engine, watched, rounds, tokens, partial(_say_of, say, scope))
            finally:
                watched.close()
        return {
            "ratio": max(found["ratio"] for found in scopes.values()),
            "goal": GOAL,
            "rounds": rounds,
            "tokens": tokens,
            "scopes": scopes,
            "model": model,
            "budget": budget,
            "slots": engine.expert_cache.slots,
            "layers": engine.shape.layers,
            "experts": engine.shape.experts,
            "top_k": engine.shape.top_k,
            "device": device_name(engine.device),
            "decode_threads": engine.manifest()["decode_threads"],
            "emulated": engine.transfers.pace.gbps > 0,
            "versions": versions(),
        }
    finally:
        engine.unload()


def _say_of(say: Callable[[str], None], scope: str, text: str) -> None:
    say(f"{scope}: {text}")


def _pairs(engine: Engine, meter: Meter, rounds: int, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Pair 0 is warm-up and discarded."""
    ratios, ms = [], dict[bool, list[float]]({True: [], False: []})
    view: dict[str, Any] | None = None
    for pair in range(rounds + 1):
        found = {}
        for on in (True, False) if pair % 2 else (False, True):
            meter.switch(on)
            if on:
                _tpot_ms(engine, meter, BEGIN)
                _ready(engine, meter)
            found[on] = _tpot_ms(engine, meter if on else None, tokens)
            if on:
                view = meter.view(0, engine.settings)
        if pair:
            ratios.append(found[True] / found[False])
            for on in found:
                ms[on].append(found[on])
            say(f"round {pair} of {rounds}: {ratios[-1]:.3f}")
        else:
            say("warming up")
    assert view is not None
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "on_ms": statistics.median(ms[True]),
        "off_ms": statistics.median(ms[False]),
        "told": view,
    }


def _tpot_ms(engine: Engine, meter: Meter | None, tokens: int) -> float:
    """Mean milliseconds from one token to the next."""
    times = []
    for piece in engine.generate([{"role": "user", "content": QUESTION}], Sampling(max_new_tokens=tokens + 1)):
        if piece.step is not None and meter is not None:
            meter.add(0, engine.shape, engine.settings, piece.step)
        if piece.kind == "token":
            times.append(time.perf_counter())
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def _ready(engine: Engine, meter: Meter) -> None:
    """Waits until there are figures: the process has started."""
    version = -1
    while (meter.view(0, engine.settings) or {}).get("state") != "ready":
        before, version = version, meter.wait(version, READY_S)
        if version == before:
            raise MoestroError("The comparison gave no figures. What went wrong stands above, or in the log.")


def table(result: dict[str, object]) -> str:
    """The result as text."""
    scopes: dict[str, dict[str, Any]] = dict(result["scopes"])  # type: ignore[call-overload]
    lines = [
        f"Comparing the cache policies live: {result['model']}, {result['layers']} layers x {result['experts']} "
        f"experts, budget {result['budget']}{', emulated link' if result['emulated'] else ''}, TPOT in ms:",
        "  slots of      on ms   off ms   on / off   (lowest ... highest)",
    ]
    lines += [
        f"  {'each layer' if scope == 'layer' else 'all layers'} {s['on_ms']:10.3f} {s['off_ms']:8.3f} "
        f"{s['ratio']:10.3f}   ({s['lowest']:.3f} ... {s['highest']:.3f})"
        for scope, s in scopes.items()
    ]
    return "\n".join([*lines, f"  goal <= {result['goal']}"])
