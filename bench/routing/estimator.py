"""bench estimator: recall of the trained estimator over its input, its width and the tokens it was trained on.

The next gate and default vectors, which need no training, are rows of the same run. Recall is counted in the engine,
over tokens decoded for questions that no profile has seen."""

import json
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench.harness.report import headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.routing.probe import listen
from core.engine import Engine
from core.engine.texts import ASSETS, Text, bundled
from core.measure.calibrate.gather import calibrate
from core.settings.calibration import CalibrationSettings
from core.system.wording import grid

INPUTS = ("hidden", "quasi")
MIDDLE, WIDTHS = 256, (64, 256)  # width of the rows over tokens; widths at MIDDLE_TOKENS
MIDDLE_TOKENS, TOKENS = 8192, (1024, 8192, 16384)
HELD_OUT = 128  # texts to ask about


def measure(run: Run, model: str = "demo", tokens: int = 512, answer: int = 48) -> Result:
    """`tokens` = decoded tokens that recall is counted over, at most `answer` of each answer."""
    engine = run.engine(model, RESIDENT)
    held_out, known = divided(every_text(model))
    rows: list[dict[str, Any]] = []
    for chosen in [case(kind, 16, 200) for kind in INPUTS] if run.small else cases():
        settings = CalibrationSettings.checked(**chosen)
        run.say(f"{settings.estimator_input}, width {settings.estimator_width}, {settings.estimator_tokens:,} tokens")
        profile = calibrate(engine, known, parts={"estimator"}, limit=settings.estimator_tokens, settings=settings)
        engine.use_profile(profile)
        gathered: Any = profile.settings["gathered"]
        row = {
            **chosen,
            "trained": gathered["estimator"]["tokens"],
            "parameters": sum(one.numel() for name, one in profile.nets.items() if name.startswith("estimator.")),
            "disk_bytes": settings.training_bytes(engine.shape, profile.tokens),
            **counted(engine, "estimator", held_out, tokens, answer),
        }
        rows.append(row)
        engine.change({"predictor": "none"})
    engine.use_profile(calibrate(engine, known, parts={"defaults"}, limit=200 if run.small else MIDDLE_TOKENS))
    untrained = {}
    for name in ("gate", "default_vectors"):
        run.say(name)
        untrained[name] = counted(engine, name, held_out, tokens, answer)
    named = {f"{row['estimator_input']} {row['estimator_width']} {row['estimator_tokens']}": row for row in rows}
    best = max(named.values(), key=lambda row: float(row["recall"]))
    return {
        "estimators": rows,
        "untrained": untrained,
        "blocks": {name: row["blocks"] for name, row in {**named, **untrained, "best estimator": best}.items()},
    }


def cases() -> list[dict[str, Any]]:
    """The calibration settings to compare, each once."""
    found = [case(kind, MIDDLE, tokens) for kind in INPUTS for tokens in TOKENS]
    found += [case("quasi", width, MIDDLE_TOKENS) for width in WIDTHS]
    return [one for at, one in enumerate(found) if one not in found[:at]]


def case(kind: str, width: int, tokens: int) -> dict[str, Any]:
    return {"estimator_input": kind, "estimator_width": width, "estimator_tokens": tokens}


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


def divided(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(HELD_OUT texts to ask about, or half of them if there are few; the others to read, without chats that have an
    answer in common with one of these)."""
    held_out = list(texts[: min(HELD_OUT, len(texts) // 2)])
    answers = {str(text[-1]) for text in held_out if not isinstance(text, str)}
    others = texts[len(held_out) :]
    return held_out, [text for text in others if isinstance(text, str) or str(text[-1]) not in answers]


def counted(engine: Engine, predictor: str, texts: Sequence[Text], tokens: int, answer: int) -> dict[str, Any]:
    """Recall@k by layer of the running engine's predictor, and the mean over all layers but the first."""
    probe = listen(engine, predictor, {}, texts, tokens, answer, patient=True)
    by_layer = probe.recall(engine.shape.layers, engine.shape.top_k)
    blocks = probe.blocks(engine.shape.layers, engine.shape.top_k)
    return {"recall": fmean(by_layer[1:]), "recall_by_layer": by_layer, "blocks": blocks}


def table(r: Result) -> list[str]:
    rows = [
        (
            row["estimator_input"],
            *(str(row[name]) for name in ("estimator_width", "estimator_tokens", "trained", "parameters")),
            f"{row['disk_bytes'] / 1e6:.1f}",
            *_recalls(row),
        )
        for row in r["estimators"]
    ]
    rows += [(f"{name}, untrained", *[""] * 5, *_recalls(row)) for name, row in r["untrained"].items()]
    return [
        f"{headline(r)}; recall@{r['top_k']} of {r['tokens']} decoded tokens, mean of the layers but the first",
        *grid(("input", "width", "tokens", "trained on", "parameters", "disk MB", "recall", "by layer"), rows),
    ]


def _recalls(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['recall']:.1%}", " ".join(f"{rate:.0%}" for rate in row["recall_by_layer"][1:])


SUITE = Suite(measure, table, small={"tokens": 6, "answer": 6})
