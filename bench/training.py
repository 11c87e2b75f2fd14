"""bench training: recall of predictors that learn from a profile, over the tokens it was made from.

One profile for each number of tokens, from the same texts; recall of each on answers to questions that none of them has
seen. The routing path learns from as many tokens that the model wrote itself, and beside that from the texts as they
are. Predictors with background work are waited for, so that the figures are counts that no load changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench.claims import verdict
from bench.predictors import divided, listen
from bench.subject import subject
from core.calibrate.gather import calibrate
from core.calibrate.texts import bundled
from core.engine import Engine
from core.settings.calibration import CalibrationSettings
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.param import Value
from core.settings.registry import variants

READS = (500, 2000, 8000, 32000)  # tokens of a profile; the last ones as far as the texts go
ANSWER = 48  # most tokens of an answer
MAPS: dict[str, Value] = {"learn": False}  # only the profile's are searched
PATH, READ_PATH = "routing_path", "routing_path, texts as they are"


def subjects() -> dict[str, tuple[str, dict[str, Value]]]:
    """Title -> (predictor, parameters): all that need a part of the profile, maps alone, the path that read its texts
    last, as it has a profile of its own, and the next gate beside them, which needs nothing."""
    needy = {one.name: (one.name, dict[str, Value]()) for one in variants("predictor") if one.needs}
    return {"gate": ("gate", {}), **needy, "expert_map, not learning": ("expert_map", MAPS), READ_PATH: (PATH, {})}


def run(
    model: str = "demo", tokens: int = 512, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens per predictor."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": "all", "link": "own"})))
    try:
        known, held_out = divided(bundled(model))
        reads, tokens, answer = ((60, 200), 6, 6) if small else (READS, tokens, ANSWER)
        asked, shape = subjects(), engine.shape
        parts = {part for one in variants("predictor") for part in one.needs} | {"maps"}
        by_tokens: dict[str, dict[str, Any]] = {}
        for limit in reads:
            say(f"calibrating on {limit} tokens")
            generated, as_read = (_path(kind, limit) for kind in ("generated", "read"))
            profile = calibrate(engine, known, parts=parts, limit=limit, settings=generated)
            if str(profile.tokens) in by_tokens:
                break  # the texts have no more
            engine.use_profile(profile)
            found = {}
            for title, (name, params) in asked.items():
                if title == READ_PATH:
                    engine.change({"predictor": "none"})
                    engine.use_profile(calibrate(engine, known, parts={"path"}, limit=limit, settings=as_read))
                say(f"{profile.tokens} tokens: {title}")
                by_layer = listen(engine, name, params, held_out, tokens, answer, patient=True).recall(
                    shape.layers, shape.top_k
                )
                found[title] = {"recall_at_k": statistics.fmean(by_layer), "recall_by_layer": by_layer}
            by_tokens[str(profile.tokens)] = found
            engine.change({"predictor": "none"})
        return {
            "recall": by_tokens,
            "orderings": orderings(by_tokens),
            "tokens": tokens,
            **subject(engine),
        }
    finally:
        engine.unload()


def _path(texts: str, tokens: int) -> CalibrationSettings:
    return CalibrationSettings.checked(path_texts=texts, path_tokens=tokens)


def orderings(by_tokens: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether more tokens always help, predictor by predictor, and the paper's way of training the path."""
    titles = [title for title in next(iter(by_tokens.values()), {}) if title != "gate"]
    rows = {title: [one[title]["recall_at_k"] for one in by_tokens.values()][::-1] for title in titles}
    more = [
        {"claim": f"{title}: the more tokens, the better", "values": [row], "holds": verdict([row])}
        for title, row in rows.items()
    ]
    if not {PATH, READ_PATH} <= rows.keys():
        return more
    pairs = [list(pair) for pair in zip(rows[PATH], rows[READ_PATH], strict=True)][::-1]
    return [*more, {"claim": f"{PATH}: generated texts above those read", "values": pairs, "holds": verdict(pairs)}]


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    found = result["recall"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"recall@{result['top_k']} of {result['tokens']} decoded tokens, waited for, by tokens of the profile",
        f"  {'':26s}" + "".join(f"{tokens:>9s}" for tokens in found),
    ]
    lines += [
        f"  {title:26s}" + "".join(f"{one[title]['recall_at_k']:9.1%}" for one in found.values())
        for title in next(iter(found.values()), {})
    ]
    return "\n".join([*lines, *(f"  {one['holds']:13s}{one['claim']}" for one in result["orderings"])])
