"""bench predictors: recall of each predictor, layer by layer, and its cost on the computing thread.

Recall is measured on a model whose profile comes from other texts than those asked about; predictors with background
work are waited for, so that their recall is the method's. Cost is measured without waiting. The cost in a large model
is measured on one of 48 layers of 128 experts with random weights: only the time counts there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.predictor_probe import PredictorProbe, until_ready
from bench.skeleton import LARGE, TINY, Sizes, measure
from core.calibrate.gather import calibrate
from core.calibrate.texts import Text, bundled
from core.engine import Engine
from core.session.manifest import device_name, versions
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.param import Value
from core.settings.registry import variant, variants
from core.settings.sampling import Sampling

VARIED: dict[str, tuple[str, dict[str, Value]]] = {  # besides every predictor with its defaults
    "gate, 4 layers": ("gate", {"distance": 4}),
    "expert_map, trajectory alone": ("expert_map", {"semantic": False, "dynamic": False}),
    "expert_map, always k": ("expert_map", {"dynamic": False}),
}
HELD_OUT = 64  # most texts asked about, which the profile has not seen: so many that few are asked again, since a
# predictor that learns knows a second answer from the first
READ = 20_000  # tokens of the profile
ANSWER = 48  # most tokens of an answer


def run(
    model: str = "demo", tokens: int = 256, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens per predictor."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": "all", "link": "own"})))
    try:
        known, held_out = divided(bundled(model))
        say("calibrating")
        profile = calibrate(engine, known, limit=600 if small else READ)
        engine.use_profile(profile)
        tokens, answer = (6, 6) if small else (tokens, ANSWER)
        found = {}
        for name, (predictor, params) in subjects().items():
            say(name)
            patient = listen(engine, predictor, params, held_out, tokens, answer, patient=True)
            quick = listen(engine, predictor, params, held_out, tokens, answer, patient=False)
            by_layer = patient.recall(engine.shape.layers, engine.shape.top_k)
            found[name] = {
                "recall_at_k": statistics.fmean(by_layer),
                "recall_by_layer": by_layer,
                "recall_by_rank": patient.recall_by_rank(engine.shape.layers, engine.shape.top_k),
                "recall_of_all_named": statistics.fmean(patient.recall(engine.shape.layers)),
                "recall_in_time": statistics.fmean(quick.recall(engine.shape.layers, engine.shape.top_k)),
                "named": patient.named(),
                "ms_per_token": quick.ms_per_token(),
            }
        shape, device = engine.shape, device_name(engine.device)
        manifest = {
            "model": engine.model_name,
            "model_hash": engine.model_hash,
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "profile_tokens": profile.tokens,
            "decode_threads": engine.manifest()["decode_threads"],
        }
    finally:
        engine.unload()
    sizes = TINY if small else LARGE
    return {
        **manifest,
        "tokens": tokens,
        "predictors": found,
        "large": cost(sizes, 4 if small else 24, say),
        "large_layers": sizes.layers,
        "large_experts": sizes.experts,
        "large_top_k": sizes.top_k,
        "large_hidden": sizes.hidden,
        "device": device,
        "versions": versions(),
    }


def divided(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """(texts for the profile, texts that it does not see, evenly spread over all: HELD_OUT, or a quarter of few)."""
    every = max(4, len(texts) // HELD_OUT)
    asked = texts[every // 2 :: every][:HELD_OUT]
    return [text for at, text in enumerate(texts) if at % every != every // 2], asked


def subjects() -> dict[str, tuple[str, dict[str, Value]]]:
    """Every predictor that makes predictions, with its defaults, and some with other parameters: title ->
    (name, params)."""
    plain = {
        v.name: (v.name, {p.name: p.default for p in v.params})
        for v in variants("predictor")
        if getattr(v.make, "looks", True)
    }
    return plain | {title: (name, {**plain[name][1], **params}) for title, (name, params) in VARIED.items()}


def cost(sizes: Sizes, tokens: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Milliseconds per decoded token on the computing thread, by predictor: wall and cpu."""
    say(f"a model of {sizes.layers} layers of {sizes.experts} experts")
    return measure(sizes, subjects(), tokens, say)


def listen(
    engine: Engine,
    predictor: str,
    params: Mapping[str, Value],
    texts: list[Text],
    tokens: int,
    answer: int,
    patient: bool,
) -> PredictorProbe:
    """Asks the held-out questions until enough tokens were decoded."""
    engine.change({"predictor": "none"})
    engine.change({"predictor": predictor, **variant("predictor", predictor).full_names(params)})
    until_ready(engine.predictor_host.predictor)
    probe = engine.predictor_host.predictor = PredictorProbe(engine.predictor_host.predictor, patient)
    left = tokens
    while left > 0:
        before = left
        for text in texts:
            question: Any = text if isinstance(text, str) else text[:1]
            if left > 0:
                pieces = engine.generate(question, Sampling(max_new_tokens=min(left, answer) + 1))
                left -= sum(piece.kind == "token" for piece in pieces) - 1
        if left == before:
            break  # the model gives no answer
    return probe


def table(result: dict[str, object]) -> str:
    """The result as text."""
    found: Any = result["predictors"]
    large: Any = result["large"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"recall@{result['top_k']} of {result['tokens']} decoded tokens, ms per token on the computing thread "
        f"(its own work / with waits), there and with {result['large_layers']} layers of "
        f"{result['large_experts']}",
        f"  {'predictor':30s} recall  all named  named  in time  {'ms':>15s}  {'ms large':>17s}",
    ]
    for name, one in sorted(found.items(), key=lambda pair: -pair[1]["recall_at_k"]):
        ms, more = one["ms_per_token"], large[name]
        lines.append(
            f"  {name:30s} {one['recall_at_k']:6.1%} {one['recall_of_all_named']:10.1%} {one['named']:6.1f} "
            f"{one['recall_in_time']:8.1%} {ms['cpu']:7.3f} /{ms['wall']:7.3f} {more['cpu']:9.3f} /"
            f"{more['wall']:8.3f}"
        )
    lines += ["  recall by layer:"]
    lines += [
        f"  {name:30s} " + " ".join(f"{rate:4.0%}" for rate in one["recall_by_layer"]) for name, one in found.items()
    ]
    lines += ["  recall by the chosen expert's weight, heaviest first, mean of the layers:"]
    lines += [
        f"  {name:30s} "
        + " ".join(f"{statistics.fmean(rank):4.0%}" for rank in zip(*one["recall_by_rank"], strict=True))
        for name, one in found.items()
    ]
    return "\n".join(lines)
