"""bench expert_maps: do FineMoE's statements on expert maps hold for this model: figures 3, 4, 8, 9 and 16a?

The maps and embeddings of decoded tokens are recorded once; entropies, correlations and searches are computed on them,
so that all but the recall in time of a live search are counts. An iteration is one decoded token; the paper's figures 8
and 9 take one of each prompt, for which a few hundred prompts would have to be answered."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from bench.harness.engines import READ, divided, question_of
from bench.harness.report import headline
from bench.harness.run import RESIDENT, Result, Run, Suite
from bench.routing.map_figures import (
    DISTANCE,
    Iteration,
    by_answer,
    correlations,
    counted,
    covered,
    entropies,
    searched,
    stored_bytes,
)
from bench.routing.probe import listen
from core.engine import Engine
from core.engine.texts import Text, bundled
from core.measure.calibrate.gather import calibrate
from core.settings.sampling import Sampling
from core.system.wording import cell, grid

CAPACITIES = (10, 30, 100, 300, 1000, 3000)
CAPACITY = 1000  # where the distance is varied
ANSWER = 64  # most tokens of an answer
DISTANCES = 8  # most distances tried
COUNTS = "request counts"


def measure(run: Run, model: str = "demo", tokens: int = 1024) -> Result:
    """`tokens` = decoded tokens."""
    engine = run.engine(model, RESIDENT)
    known, held_out = divided(bundled(model))
    layers, k = engine.shape.layers, engine.shape.top_k
    run.say("calibrating")
    profile = calibrate(engine, known, parts={"maps"}, limit=600 if run.small else READ)
    assert profile.maps is not None and profile.map_keys is not None
    before = list(zip(profile.map_keys, profile.maps, strict=True))
    run.say("recording maps")
    maps = iterations(engine, held_out, tokens)
    distances = [int(d) for d in np.unique(np.linspace(1, layers, min(layers, DISTANCES)).round())]
    run.say("searching")
    by_distance = {str(d): searched(maps, before, d, CAPACITY) for d in distances}
    by_capacity = {str(c): searched(maps, before, DISTANCE, c) for c in CAPACITIES}
    engine.use_profile(profile)
    in_time = {}
    for d in distances:
        run.say(f"searching in the engine, {d} layers ahead")
        probe = listen(engine, "expert_map", {"distance": d}, held_out, tokens, ANSWER, patient=False)
        in_time[str(d)] = fmean(probe.recall(layers, k))
    counts = counted(maps).mean(1)
    found: dict[str, Any] = {
        "entropy": entropies(maps),
        "correlation": correlations(maps),
        "distance": {
            d: {**one._asdict(), "recall_at_k": fmean(one.recall), "recall_in_time": in_time[d]}
            for d, one in by_distance.items()
        },
        "capacity": {
            c: {**one._asdict(), "recall_at_k": fmean(one.recall), "bytes": stored_bytes(int(c), maps)}
            for c, one in by_capacity.items()
        },
        "request_counts": float(counts.mean()),
    }
    return {
        **found,
        "blocks": {
            "distance": {
                **{d: one.blocks["recall"] for d, one in by_distance.items()},
                COUNTS: by_answer(maps, counts),
            },
            "capacity": {
                of: {c: one.blocks[of] for c, one in by_capacity.items()} for of in ("semantic", "trajectory")
            },
            "bounds": {
                name: covered(maps, before, round(capacity), least)
                for name, capacity, least in bounds(layers, engine.shape.experts)
            },
        },
        "tokens": len(maps),
        "maps_before": len(before),
        "profile_tokens": profile.tokens,
    }


def iterations(engine: Engine, texts: Sequence[Text], tokens: int) -> list[Iteration]:
    """Asks the texts' questions until enough tokens were decoded."""
    found: list[Iteration] = []
    engine.keep(probs=True, ranks=False, tokens=True)
    asked = 0
    while len(found) < tokens and asked < tokens:
        question = question_of(texts[asked % len(texts)])
        sampling = Sampling(temperature=0.7, seed=asked, max_new_tokens=min(tokens - len(found), ANSWER) + 1)
        asked += 1
        for piece in engine.generate(question, sampling):
            step = piece.step
            if step is not None and piece.kind != "end" and step.phase == "decode" and step.probs is not None:
                assert step.tok is not None
                key = engine.predictor_host.embed(step.tok.tolist()).detach().float().mean(0).cpu().numpy()
                one = step.probs[:, 0].astype(np.float32)
                found.append(Iteration(asked, key, one, step.ids[:, 0].astype(np.int64)))
    engine.keep(probs=False, ranks=False, tokens=False)
    return found


def bounds(layers: int, experts: int) -> tuple[tuple[str, float, float], ...]:
    """Name, maps, and the similarity that section 4.4 says a store of so many has for every new iteration."""
    size = layers * experts
    return ("2LJ", 2 * size, 0.75), ("LJ ln(LJ) / 2", size * math.log(size) / 2, 0.98)


def table(r: Result) -> list[str]:
    entropy = r["entropy"]
    bits = []
    for name in ("probabilities", "activations"):
        one = entropy[name]
        together = "  ".join(f"{n}: {bits:.2f}" for n, bits in one["together"].items())
        bits.append((name, f"{one['fine']:.2f}", f"{one['coarse']:.2f}", together))
    alike = [
        (name, f"{one['pearson'] or 0.0:.2f}", *(cell(share, ".0%") for share in one["bins"]))
        for name, one in r["correlation"].items()
    ]
    near = [(d, f"{one['recall_at_k']:.1%}", f"{one['recall_in_time']:.1%}") for d, one in r["distance"].items()]
    kept = [
        (
            c,
            f"{one['recall_at_k']:.1%}",
            *(f"{one[of]:.3f}" for of in ("semantic", "trajectory")),
            f"{one['bytes'] / 1e6:.1f}",
        )
        for c, one in r["capacity"].items()
    ]
    return [
        f"{headline(r)}; {r['tokens']} decoded tokens of {entropy['answers']} answers, {r['maps_before']} maps of a "
        "profile",
        f"Bits of entropy, mean over layers (most: {entropy['most']:.2f}):",
        *grid(("", "a token", "an answer", "its first n tokens"), bits),
        "Pearson's r of similarity with experts in common; their share in pairs by similarity, in tenths:",
        *grid(("", *[""] * len(alike[0][1:])), alike),
        f"Recall@{r['top_k']} of map search (request counts: {r['request_counts']:.1%}):",
        *grid(("layers ahead", "waited for", "in time"), near),
        f"By capacity, {DISTANCE} layers ahead; scores are means:",
        *grid(("maps", "recall", "embeddings", "trajectories", "MB"), kept),
    ]


SUITE = Suite(measure, table, small={"tokens": 12})
