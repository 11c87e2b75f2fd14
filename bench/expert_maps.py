"""bench expert_maps: what FineMoE says of expert maps, asked of this model: figures 3, 4, 8, 9 and 16a.

The maps and embeddings of decoded tokens are recorded once; entropies, correlations and searches are computed on them,
so that all but the recall in time of a live search are counts. An iteration is one decoded token; the paper's figures
8 and 9 take one of each prompt, for which a few hundred prompts would have to be answered.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.claims import verdict
from bench.map_figures import DISTANCE, Iteration, correlations, counted, entropies, searched, stored_bytes
from bench.predictors import READ, divided, listen
from bench.subject import subject
from core.calibrate.gather import calibrate
from core.calibrate.texts import Text, bundled
from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling

CAPACITIES = (10, 30, 100, 300, 1000, 3000)
CAPACITY = 1000  # where the distance is varied
ANSWER = 64  # most tokens of an answer
DISTANCES = 8  # most distances tried


def run(
    model: str = "demo", tokens: int = 1024, small: bool = False, say: Callable[[str], None] = print
) -> dict[str, object]:
    """Measures; returns the result as plain data. `tokens` = decoded tokens."""
    engine = Engine.load(LoadSpec.checked(model, Settings({"budget": "all", "link": "own"})))
    try:
        (known, held_out), tokens = divided(bundled(model)), 12 if small else tokens
        shape = engine.shape
        say("calibrating")
        profile = calibrate(engine, known, parts={"maps"}, limit=600 if small else READ)
        assert profile.maps is not None and profile.map_keys is not None
        before = list(zip(profile.map_keys, profile.maps, strict=True))
        say("recording maps")
        maps = iterations(engine, held_out, tokens)
        distances = [int(d) for d in np.unique(np.linspace(1, shape.layers, min(shape.layers, DISTANCES)).round())]
        say("searching")
        by_distance = {str(d): searched(maps, before, d, CAPACITY) for d in distances}
        by_capacity = {str(c): searched(maps, before, DISTANCE, c) for c in CAPACITIES}
        engine.use_profile(profile)
        in_time = {}
        for d in distances:
            say(f"searching in the engine, {d} layers ahead")
            probe = listen(engine, "expert_map", {"distance": d}, held_out, tokens, ANSWER, patient=False)
            in_time[str(d)] = statistics.fmean(probe.recall(shape.layers, shape.top_k))
        found: dict[str, Any] = {
            "entropy": entropies(maps),
            "correlation": correlations(maps),
            "distance": {
                d: {**one._asdict(), "recall_at_k": statistics.fmean(one.recall), "recall_in_time": in_time[d]}
                for d, one in by_distance.items()
            },
            "capacity": {
                c: {**one._asdict(), "recall_at_k": statistics.fmean(one.recall), "bytes": stored_bytes(int(c), maps)}
                for c, one in by_capacity.items()
            },
            "request_counts": statistics.fmean(counted(maps)),
        }
        return {
            **found,
            "orderings": orderings(found),
            "tokens": len(maps),
            "maps_before": len(before),
            "profile_tokens": profile.tokens,
            **subject(engine),
        }
    finally:
        engine.unload()


def iterations(engine: Engine, texts: Sequence[Text], tokens: int) -> list[Iteration]:
    """Asks the texts' questions until enough tokens were decoded."""
    found: list[Iteration] = []
    engine.keep(probs=True, ranks=False, tokens=True)
    asked = 0
    while len(found) < tokens and asked < tokens:
        text: Any = texts[asked % len(texts)]
        sampling = Sampling(temperature=0.7, seed=asked, max_new_tokens=min(tokens - len(found), ANSWER) + 1)
        asked += 1
        for piece in engine.generate(text if isinstance(text, str) else text[:1], sampling):
            step = piece.step
            if step is not None and piece.kind != "end" and step.phase == "decode" and step.probs is not None:
                assert step.tok is not None
                key = engine.predictor_host.embed(step.tok.tolist()).detach().float().mean(0).cpu().numpy()
                one = step.probs[:, 0].astype(np.float32)
                found.append(Iteration(asked, key, one, step.ids[:, 0].astype(np.int64)))
    engine.keep(probs=False, ranks=False, tokens=False)
    return found


def orderings(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which of the paper's statements hold here."""
    entropy, correlation = found["entropy"], found["correlation"]
    by_distance = [one["recall_at_k"] for one in found["distance"].values()]
    said = {
        "FineMoE figure 3b: fine-grained entropy below coarse-grained": (
            [[entropy[of]["coarse"], entropy[of]["fine"]] for of in ("probabilities", "activations")]
        ),
        "FineMoE figure 3c: entropy rises with the iterations aggregated": (
            [[*entropy[of]["together"].values()][::-1] for of in ("probabilities", "activations")]
        ),
        "FineMoE figure 4: recall falls with the distance": [by_distance],
        "FineMoE figure 4: map search above request counts, at every distance": (
            [[one, found["request_counts"]] for one in by_distance]
        ),
        "FineMoE figure 9: semantic and trajectory scores correlate with hits": (
            [[correlation[of]["pearson"], 0.0] for of in ("semantic", "trajectory")]
        ),
        "FineMoE figure 16a: scores rise with the store's capacity": (
            [[one[of] for one in found["capacity"].values()][::-1] for of in ("semantic", "trajectory")]
        ),
    }
    return [{"claim": claim, "values": rows, "holds": verdict(rows)} for claim, rows in said.items()]


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    entropy, correlation = result["entropy"], result["correlation"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"{result['tokens']} decoded tokens of {entropy['answers']} answers, {result['maps_before']} maps of a profile "
        "before them",
        f"Bits of entropy, mean over layers (most: {entropy['most']:.2f}): a token, an answer, its first n tokens",
    ]
    for name in ("probabilities", "activations"):
        one = entropy[name]
        together = "  ".join(f"{n}: {bits:.2f}" for n, bits in one["together"].items())
        lines.append(f"  {name:14s} {one['fine']:5.2f} {one['coarse']:5.2f}   {together}")
    lines.append("Pearson's r of similarity with experts in common; their share in pairs by similarity, in tenths:")
    for name, one in correlation.items():
        shares = " ".join("  - " if share is None else f"{share:4.0%}" for share in one["bins"])
        lines.append(f"  {name:14s} {one['pearson'] or 0.0:5.2f}   {shares}")
    lines.append(
        f"Recall@{result['top_k']} of map search by distance, waited for and in time (request counts: "
        f"{result['request_counts']:.1%}):"
    )
    lines += [
        f"  {d:>4s} layers ahead {one['recall_at_k']:7.1%} {one['recall_in_time']:7.1%}"
        for d, one in result["distance"].items()
    ]
    lines.append(f"By capacity, {DISTANCE} layers ahead: recall, mean score of embeddings and trajectories, MB")
    lines += [
        f"  {c:>5s} maps {one['recall_at_k']:7.1%} {one['semantic']:6.3f} {one['trajectory']:6.3f} "
        f"{one['bytes'] / 1e6:8.1f}"
        for c, one in result["capacity"].items()
    ]
    lines += ["The paper's statements here:", *(f"  {one['holds']:13s}{one['claim']}" for one in result["orderings"])]
    return "\n".join(lines)
