"""bench overhead: the total cost of each predictor per token of the loaded model, not only its own time.

Everything is resident and the link is not emulated, so nothing is fetched and nothing gained; all that a predictor
changes is its cost: its time on the computing thread (`predict`, which the engine counts), what capturing router inputs
adds to a pass, and what its background work takes from the computing. Recording for the lab, which asks several at
once, is one more subject (`record`). Rounds run in pairs, with the predictor and without one, alternating which is
first; the added time is the median over the pairs of the difference of their medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.predictor_probe import until_ready
from core.calibrate.gather import calibrate
from core.calibrate.texts import bundled
from core.engine import Engine
from core.session.manifest import device_name, versions
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.param import Value
from core.settings.registry import variants
from core.settings.sampling import Sampling

QUESTION = "What does heapq.heappush do?"
READ = 2000  # tokens of the profile
GOAL = 0.05  # goal for the time added beyond the predictor's own, as a share of a token without a predictor
FIGURES = ("total_ms", "compute_ms", "stall_ms", "predict_ms", "record_ms")
OFF: dict[str, Value] = {"predictor": "none", "record_lab": False}


def run(
    model: str = "demo", rounds: int = 7, tokens: int = 128, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens a round."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": "all", "link": "own"})))
    engine.prompt.ends = set()  # every round decodes the same number of tokens
    try:
        say("calibrating")
        engine.use_profile(calibrate(engine, bundled(model), limit=600 if small else READ))
        rounds, tokens = (1, 8) if small else (rounds, tokens)
        found = {}
        for name, changes in subjects().items():
            say(name)
            found[name] = _pairs(engine, changes, rounds, tokens)
        engine.change(OFF)
        shape = engine.shape
        return {
            "model": model,
            "goal": GOAL,
            "rounds": rounds,
            "tokens": tokens,
            "predictors": found,
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "decode_threads": engine.manifest()["decode_threads"],
            "device": device_name(engine.device),
            "versions": versions(),
        }
    finally:
        engine.unload()


def subjects() -> dict[str, dict[str, Value]]:
    """Every predictor that makes predictions, and recording for the lab without one: name -> settings."""
    looking = [v.name for v in variants("predictor") if getattr(v.make, "looks", True)]
    return {**{name: {"predictor": name} for name in looking}, "record_lab": {"record_lab": True}}


def _pairs(engine: Engine, changes: Mapping[str, Value], rounds: int, tokens: int) -> dict[str, Any]:
    """Pair 0 is warm-up and discarded."""
    with_it: list[dict[str, float]] = []
    without: list[dict[str, float]] = []
    for pair in range(rounds + 1):
        for on in (True, False) if pair % 2 else (False, True):
            engine.change({**OFF, **(changes if on else {})})
            for predictor in (engine.predictor_host.predictor, *engine.parts.prediction.capture.shadows.predictors):
                until_ready(predictor)
            figures = _round(engine, tokens)
            if pair:
                (with_it if on else without).append(figures)
    return judged(with_it, without)


def judged(with_it: Sequence[dict[str, float]], without: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rounds with the predictor, and what it adds to a token: `beyond` its own time in milliseconds, and
    as a share of a token without it."""
    of = {name: statistics.median(one[name] for one in with_it) for name in FIGURES}
    none_ms = statistics.median(one["total_ms"] for one in without)
    added_ms = statistics.median(a["total_ms"] - b["total_ms"] for a, b in zip(with_it, without, strict=True))
    share = statistics.median(
        (a["total_ms"] - a["predict_ms"] - a["record_ms"]) / b["total_ms"] - 1.0
        for a, b in zip(with_it, without, strict=True)
    )
    return {
        **of,
        "none_ms": none_ms,
        "added_ms": added_ms,
        "beyond": share,
        "kept": share <= GOAL,
        "blocks": of["stall_ms"] > 0.0,
    }


def _round(engine: Engine, tokens: int) -> dict[str, float]:
    """Medians over the decoded tokens of one answer."""
    pieces = engine.generate([{"role": "user", "content": QUESTION}], Sampling(max_new_tokens=tokens + 1))
    steps = [
        piece.step
        for piece in pieces
        if piece.kind == "token" and piece.step is not None and piece.step.phase == "decode"
    ]
    return {name: statistics.median(getattr(step, name) for step in steps) for name in FIGURES}


def table(result: dict[str, object]) -> str:
    """The result as text."""
    found: Any = result["predictors"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active, "
        f"all resident; ms a token, medians of {result['rounds']} rounds of {result['tokens']} tokens beside as "
        "many without a predictor:",
        f"  {'predictor':18s}  total  compute  stall  predict  record   none  added  beyond both",
    ]
    for name, one in sorted(found.items(), key=lambda pair: -pair[1]["added_ms"]):
        lines.append(
            f"  {name:18s} {one['total_ms']:6.2f} {one['compute_ms']:8.2f} {one['stall_ms']:6.2f} "
            f"{one['predict_ms']:8.2f} {one['record_ms']:7.2f} {one['none_ms']:6.2f} {one['added_ms']:6.2f} "
            f"{one['beyond']:10.1%}"
            f"{'' if one['kept'] else '  above the goal'}{'  blocks' if one['blocks'] else ''}"
        )
    worst = max((one["beyond"] for one in found.values()), default=0.0)
    blocking = sum(one["blocks"] for one in found.values())
    return "\n".join(
        [
            *lines,
            f"  goal: at most {result['goal']:.0%} of a token beyond the predictor's own time (worst "
            f"{worst:.1%}); {'none blocks' if not blocking else f'{blocking} block'} the compute path",
        ]
    )
