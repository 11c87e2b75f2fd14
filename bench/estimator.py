"""bench estimator: recall of the trained estimator over its input, its width and the tokens it was trained on.

The estimator of before (router inputs, width 256, at most 8192 tokens or 256 MiB of states of all layers) is a row of
the same run, and so are the next router asked early and the same with default vectors, which need no training. Recall
is counted in the engine, over tokens decoded for questions that no profile has seen.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from typing import Any

from bench.predictors import listen
from bench.subject import subject
from core.calibrate.gather import calibrate
from core.calibrate.texts import ASSETS, Text, bundled
from core.engine import Engine
from core.settings.calibration import CalibrationSettings
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.types import ModelShape

INPUTS = ("hidden", "quasi")
WIDTHS = (64, 256)  # at as many tokens as before
TOKENS = (1024, 8192, 16384)
BEFORE_TOKENS, BEFORE_BYTES = 8192, 256 << 20  # as many as were kept once: the fewer of both
MIDDLE = 256  # width of the rows over tokens
ANSWER = 48  # most tokens of an answer
HELD_OUT = 128  # texts to ask about


def run(
    model: str = "demo", tokens: int = 512, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens that recall is counted over."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": "all", "link": "own"})))
    try:
        held_out, known = divided(every_text(model))
        decoded, answer = (6, 6) if small else (tokens, ANSWER)
        rows: list[dict[str, Any]] = []
        for chosen in CASES[:2] if small else cases(engine.shape):
            settings = CalibrationSettings.checked(**chosen)
            say(f"{settings.estimator_input}, width {settings.estimator_width}, {settings.estimator_tokens:,} tokens")
            limit = min(settings.estimator_tokens, 200) if small else settings.estimator_tokens
            profile = calibrate(engine, known, parts={"estimator"}, limit=limit, settings=settings)
            engine.use_profile(profile)
            gathered: Any = profile.settings["gathered"]
            sizes = [one.numel() for name, one in profile.nets.items() if name.startswith("estimator.")]
            rows.append(
                {
                    **chosen,
                    "trained": gathered["estimator"]["tokens"],
                    "parameters": sum(sizes),
                    "disk_bytes": settings.training_bytes(engine.shape, profile.tokens),
                    **counted(engine, "estimator", held_out, decoded, answer),
                }
            )
            engine.change({"predictor": "none"})
        engine.use_profile(calibrate(engine, known, parts={"defaults"}, limit=200 if small else BEFORE_TOKENS))
        untrained = {}
        for name in ("gate", "default_vectors"):
            say(name)
            untrained[name] = counted(engine, name, held_out, decoded, answer)
        measured_on, shape = subject(engine), engine.shape
    finally:
        engine.unload()
    return {
        **measured_on,
        "tokens": decoded,
        "before_tokens": before(shape),
        "estimators": rows,
        "untrained": untrained,
    }


def before(shape: ModelShape) -> int:
    """Tokens that the estimator of before was trained and tested on, at most."""
    return min(BEFORE_TOKENS, BEFORE_BYTES // (2 * shape.layers * (shape.experts + shape.hidden)))


def cases(shape: ModelShape) -> list[dict[str, Any]]:
    """The calibration settings to compare, the estimator of before first; each once."""
    found = [case("hidden", MIDDLE, before(shape))]
    found += [case(kind, MIDDLE, tokens) for kind in INPUTS for tokens in TOKENS]
    found += [case("quasi", width, BEFORE_TOKENS) for width in WIDTHS]
    return [one for at, one in enumerate(found) if one not in found[:at]]


def case(kind: str, width: int, tokens: int) -> dict[str, Any]:
    return {"estimator_input": kind, "estimator_width": width, "estimator_tokens": tokens}


CASES = [case(kind, 16, 200) for kind in INPUTS]  # of a smoke test


def every_text(model: str) -> list[Text]:
    """The bundled prompts in random order; for the demo model all of its questions."""
    if model != "demo":
        texts = bundled(model)
    else:
        rows = [json.loads(line) for line in (ASSETS / "demo" / "questions.jsonl").read_text("utf-8").splitlines()]
        texts = [
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            for row in rows
        ]
    random.Random(0).shuffle(texts)
    return texts


def divided(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """(HELD_OUT texts to ask about, or half of them if there are few; the others to read, without chats that have an
    answer in common with one of these)."""
    held_out = texts[: min(HELD_OUT, len(texts) // 2)]
    answers = {str(text[-1]) for text in held_out if not isinstance(text, str)}
    others = texts[len(held_out) :]
    return held_out, [text for text in others if isinstance(text, str) or str(text[-1]) not in answers]


def counted(engine: Engine, predictor: str, texts: list[Text], tokens: int, answer: int) -> dict[str, Any]:
    """Recall@k by layer of the running engine's predictor, and the mean over all layers but the first."""
    probe = listen(engine, predictor, {}, texts, tokens, answer, patient=True)
    by_layer = probe.recall(engine.shape.layers, engine.shape.top_k)
    return {"recall": statistics.fmean(by_layer[1:]), "recall_by_layer": by_layer}


def table(result: dict[str, object]) -> str:
    """The result as text."""
    rows: Any = result["estimators"]
    untrained: Any = result["untrained"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"recall@{result['top_k']} of {result['tokens']} decoded tokens, mean of the layers but the first; before: "
        f"hidden, width {MIDDLE}, {result['before_tokens']} tokens",
        "  input   width   tokens  trained on  parameters      disk  recall  by layer",
    ]
    for row in rows:
        was = row["estimator_tokens"] == result["before_tokens"] and row["estimator_width"] == MIDDLE
        lines.append(
            f"  {row['estimator_input']:6s} {row['estimator_width']:6d} {row['estimator_tokens']:8d} "
            f"{row['trained']:11d} {row['parameters']:11d} {row['disk_bytes'] / 1e6:6.1f} MB {row['recall']:7.1%}  "
            f"{_layers(row)}{'  (before)' if was and row['estimator_input'] == 'hidden' else ''}"
        )
    for name, row in untrained.items():
        lines.append(f"  {name + ', untrained':56s} {row['recall']:7.1%}  {_layers(row)}")
    return "\n".join(lines)


def _layers(row: dict[str, Any]) -> str:
    return " ".join(f"{rate:4.0%}" for rate in row["recall_by_layer"][1:])
