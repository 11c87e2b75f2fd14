"""bench overhead: the total cost of each predictor per token of the loaded model, not only its own time.

Everything is resident and the link is not emulated, so nothing is fetched and nothing gained; all that a predictor
changes is its cost: its time on the computing thread (`predict`, which the engine counts), what capturing router inputs
adds to a pass, and what its background work takes from the computing. Two more rows: recording for the lab, which runs
several predictors at once, and the live comparison of cache policies. Rounds run in pairs, with the subject and without
it; what it adds is the median over the pairs of the difference of their medians, with the mean's interval."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from app.services.regret import Regret
from bench.harness.engines import QUESTION, READ, decode_steps, until_ready
from bench.harness.figures import medians
from bench.harness.paired import difference
from bench.harness.report import goal, goal_lines, headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from core.engine import Engine
from core.engine.texts import bundled
from core.errors import MoestroError
from core.measure.calibrate.gather import calibrate
from core.settings.param import Value
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.system.wording import cells, grid

LIMIT = READ // 10  # tokens of the profile
GOAL = 0.05  # for the time added beyond the subject's own, as a share of a token without it
FIGURES = ("total_ms", "compute_ms", "stall_ms", "predict_ms", "record_ms")
OFF: dict[str, Value] = {"predictor": "none", "telemetry": "on"}
LIVE = "live comparison of policies"
BEGIN, READY_S = 64, 30.0  # tokens that start the comparison before it is measured; seconds that it may take


def measure(run: Run, model: str = "demo", rounds: int = 7, tokens: int = 128) -> Result:
    """`tokens` = decoded tokens a round."""
    engine = run.engine(model, RESIDENT, endless=True)
    run.say("calibrating")
    engine.use_profile(calibrate(engine, bundled(model), limit=600 if run.small else LIMIT))
    found = {}
    for name, changes in subjects().items():

        def one(on: bool, number: int, changes: Mapping[str, Value] = changes) -> dict[str, float]:
            engine.change({**OFF, **(changes if on else {})})
            for predictor in (engine.predictor_host.predictor, *engine.parts.prediction.capture.shadows.predictors):
                until_ready(predictor)
            return _figures(engine, tokens)

        pairs = run.by_turns((True, False), one, rounds, what=name)
        found[name] = judged(pairs[True], pairs[False])
    engine.change(OFF)
    with comparison(engine) as compare:
        pairs = run.by_turns((True, False), lambda on, number: compare(on, tokens), rounds, what=LIVE)
    return {"goal": GOAL, "predictors": found, "comparison": judged(pairs[True], pairs[False])}


def subjects() -> dict[str, dict[str, Value]]:
    """Every predictor that makes predictions, and recording for the lab without one: name -> settings."""
    looking = [v.name for v in variants("predictor") if getattr(v.make, "looks", True)]
    return {**{name: {"predictor": name} for name in looking}, "lab": {"telemetry": "lab"}}


@contextmanager
def comparison(engine: Engine) -> Iterator[Any]:
    """A function (whether the live comparison of cache policies runs, tokens) -> figures of an answer."""
    meter = Regret()

    def fed(tokens: int) -> list[Any]:
        steps = []
        for piece in engine.generate(QUESTION, Sampling(max_new_tokens=tokens + 1)):
            if piece.step is not None:
                meter.add(0, engine.shape, engine.settings, piece.step)
                steps.append(piece.step)
        return [step for step in steps if step.phase == "decode"]

    def compare(on: bool, tokens: int) -> dict[str, float]:
        meter.switch(on)
        if not on:
            return _figures(engine, tokens)
        fed(BEGIN)
        version = -1
        while (meter.view(0, engine.settings) or {}).get("state") != "ready":
            before, version = version, meter.wait(version, READY_S)
            if version == before:
                raise MoestroError("The comparison gave no figures. The reason is above, or in the log.")
        steps = fed(tokens)
        return {name: median(getattr(step, name) for step in steps) for name in FIGURES}

    try:
        yield compare
    finally:
        meter.close()


def _figures(engine: Engine, tokens: int) -> dict[str, float]:
    """Medians over the decoded tokens of one answer."""
    steps = decode_steps(engine, tokens)
    return {name: median(getattr(step, name) for step in steps) for name in FIGURES}


def judged(with_it: Sequence[dict[str, float]], without: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rounds with the subject, and what it adds to a token: in milliseconds, and `beyond` its own time
    as a share of a token without it."""
    of, pairs = medians(with_it), [*zip(with_it, without, strict=True)]
    some, none = ([one["total_ms"] for one in rows] for rows in (with_it, without))
    added = difference(some, none)
    beyond = median((a["total_ms"] - a["predict_ms"] - a["record_ms"]) / b["total_ms"] - 1.0 for a, b in pairs)
    return {
        **of,
        "none_ms": median(none),
        "added_ms": median(a["total_ms"] - b["total_ms"] for a, b in pairs),
        "added_interval_ms": None if added is None else [added.low, added.high],
        "shares": {  # of a token without it, in each pair of rounds
            "added": [a["total_ms"] / b["total_ms"] - 1.0 for a, b in pairs],
            "own": [a["predict_ms"] / b["total_ms"] for a, b in pairs],
            "stall": [a["stall_ms"] / b["total_ms"] for a, b in pairs],
        },
        "beyond": beyond,
        "kept": beyond <= GOAL,
        "blocks": of["stall_ms"] > 0.0,
    }


def table(r: Result) -> list[str]:
    forms = dict.fromkeys((*FIGURES, "none_ms", "added_ms"), ".2f")
    found = {**r["predictors"], LIVE: r["comparison"]}
    rows = [
        (
            name,
            *cells(one, forms),
            "-" if one["added_interval_ms"] is None else "{:.2f} to {:.2f}".format(*one["added_interval_ms"]),
            f"{one['beyond']:.1%}",
            ("" if one["kept"] else "above the goal ") + ("blocks" if one["blocks"] else ""),
        )
        for name, one in sorted(found.items(), key=lambda pair: -float(pair[1]["added_ms"]))
    ]
    heads = [name.removesuffix("_ms") for name in forms]
    worst = max((one["beyond"] for one in found.values()), default=0.0)
    blocking = sum(one["blocks"] for one in found.values())
    return [
        f"{headline(r)}, all resident; ms a token, medians of {r['rounds']} rounds of {r['tokens']} tokens and of "
        "as many without",
        *grid(("", *heads, "95 %", "beyond both", ""), rows),
        *goal_lines([goal("a token's share beyond the subject's own time, the worst", "<=", r["goal"], worst)]),
        f"  {'none blocks' if not blocking else f'{blocking} block'} the compute path",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 8})
