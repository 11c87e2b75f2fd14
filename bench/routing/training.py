"""bench training: recall of predictors that learn from a profile, over the tokens it was made from.

One profile for each number of tokens, from the same texts; recall of each on answers to questions that none of them has
seen. The routing path learns from as many tokens that the model wrote itself, and in a second row from the texts as
they are. Predictors with background work are waited for, so that the figures are counts that no load changes.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from bench.harness.engines import divided
from bench.harness.report import grid, headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.routing.probe import listen
from core.engine.texts import bundled
from core.measure.calibrate.gather import calibrate
from core.settings.calibration import CalibrationSettings
from core.settings.param import Value
from core.settings.registry import variants

READS = (500, 2000, 8000, 32000)  # tokens of a profile; the last ones as far as the texts go
MAPS: dict[str, Value] = {"learn": False}  # only the profile's are searched
PATH, READ_PATH = "routing_path", "routing_path, texts as they are"


def subjects() -> dict[str, tuple[str, dict[str, Value]]]:
    """All predictors that need a part of the profile, maps alone, the path that read its texts last, as it has a
    profile of its own, and the next gate, which needs nothing."""
    needy = {one.name: (one.name, dict[str, Value]()) for one in variants("predictor") if one.needs}
    return {"gate": ("gate", {}), **needy, "expert_map, not learning": ("expert_map", MAPS), READ_PATH: (PATH, {})}


def measure(run: Run, model: str = "demo", tokens: int = 512, answer: int = 48) -> Result:
    """`tokens` = decoded tokens per predictor, at most `answer` of each answer."""
    engine = run.engine(model, RESIDENT)
    known, held_out = divided(bundled(model))
    shape, parts = engine.shape, {part for one in variants("predictor") for part in one.needs} | {"maps"}
    by_tokens: dict[str, dict[str, Any]] = {}
    for limit in (60, 200) if run.small else READS:
        run.say(f"calibrating on {limit} tokens")
        generated, as_read = (
            CalibrationSettings.checked(path_texts=kind, path_tokens=limit) for kind in ("generated", "read")
        )
        profile = calibrate(engine, known, parts=parts, limit=limit, settings=generated)
        if str(profile.tokens) in by_tokens:
            break  # the texts have no more
        engine.use_profile(profile)
        found = by_tokens[str(profile.tokens)] = {}
        for title, (name, params) in subjects().items():
            if title == READ_PATH:
                engine.change({"predictor": "none"})
                engine.use_profile(calibrate(engine, known, parts={"path"}, limit=limit, settings=as_read))
            run.say(f"{profile.tokens} tokens: {title}")
            probe = listen(engine, name, params, held_out, tokens, answer, patient=True)
            by_layer = probe.recall(shape.layers, shape.top_k)
            found[title] = {"recall_at_k": fmean(by_layer), "recall_by_layer": by_layer}
        engine.change({"predictor": "none"})
    return {"recall": by_tokens}


def table(r: Result) -> list[str]:
    found = r["recall"]
    rows = [
        (title, *(f"{one[title]['recall_at_k']:.1%}" for one in found.values()))
        for title in next(iter(found.values()), {})
    ]
    return [
        f"{headline(r)}; recall@{r['top_k']} of {r['tokens']} decoded tokens, waited for, by tokens of the profile",
        *grid(("", *found), rows),
    ]


SUITE = Suite(measure, table, small={"tokens": 6, "answer": 6})
