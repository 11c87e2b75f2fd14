"""bench super_experts: does a model have super experts, and what becomes of its answers without them?

Three questions. Which experts are super (core.policy.substitute.super_experts), by a calibration of this run. What it
costs to leave them out at all times, compared with as many others of the same layers, the busiest ones and random ones,
as in section 4 of Su et al. 2025, on held-out text. What protecting them from lossy misses gains: the same modes with
and without, on questions and that text. Where there is none, the expert that stands out most takes its place, and the
result says so.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.harness.report import cells, grid, headline
from bench.harness.run import Result, Run, Suite
from core.engine import Engine
from core.engine.texts import bundled
from core.measure.calibrate.gather import calibrate
from core.measure.evaluate.calibrated import READ
from core.measure.evaluate.modes import UNLIMITED, Mode
from core.measure.evaluate.passages import Heard, reference
from core.measure.evaluate.rows import perplexity_of, to_json
from core.measure.evaluate.run import evaluate, gather
from core.policy.substitute.super_experts import SuperExpert, outstanding, super_experts
from core.profile import Profile
from core.settings.param import Value

RESIDENCY = 0.5  # share of the experts in slots while misses are dropped or substituted
WAYS: Mapping[str, Mapping[str, Value]] = {
    "drop": {"miss": "drop", "rho": UNLIMITED},
    "random": {"miss": "substitute", "substitute": "random", "rho": UNLIMITED},
    "buddy": {"miss": "substitute", "substitute": "buddy", "rho": UNLIMITED},
}
Place = tuple[int, int]  # layer, expert


def measure(run: Run, model: str = "demo", questions: int = 24, tokens: int = 256, rounds: int = 5) -> Result:
    """`rounds` = draws of random experts to leave out."""
    engine = run.engine(model, {})
    material = gather(engine, questions, tokens)
    run.say("calibrating")
    texts = [text for text in bundled(engine.model_name) if not isinstance(text, str)]
    profile = calibrate(engine, texts, parts={"counts", "pairs", "peaks"}, limit=200 if run.small else READ)
    engine.use_profile(profile)
    assert profile.peaks is not None
    found, most = super_experts(profile.peaks), outstanding(profile.peaks)
    assert most is not None, "something was read, so that some expert was chosen"
    asked = [(one.layer, one.expert) for one in found or [most]]
    out = left_out_rows(engine, profile, asked, material.pieces, rounds, run.say)
    modes = [mode for name in WAYS for mode in modes_of(name, asked, found)]
    rows = evaluate(engine, modes, (RESIDENCY,), material, on_row=lambda row: run.say(f"{row.title}: done"))
    return {
        "calibrated_tokens": profile.tokens,
        "questions": len(material.questions),
        "tokens": material.tokens,
        "super_experts": [one._asdict() for one in found],
        "by_the_papers_rule_alone": [one._asdict() for one in super_experts(profile.peaks, 0.0)],
        "outstanding": most._asdict(),
        "largest_by_layer": [float(row.max()) for row in profile.peaks],
        "median_by_layer": [median([v for v in row.tolist() if v > 0] or [0.0]) for row in profile.peaks],
        "left_out": out,
        "residency": RESIDENCY,
        "rows": [to_json(row) for row in rows],
    }


def left_out_rows(
    engine: Engine,
    profile: Profile,
    asked: Sequence[Place],
    pieces: Sequence[Sequence[int]],
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The text read by the exact model without some experts: none, the chosen ones, the busiest others of their
    layers, and `rounds` draws of others."""
    assert profile.counts is not None
    draw, whole = random.Random(0), profile.counts
    others = {layer: [e for e in range(profile.experts) if (layer, e) not in asked] for layer, _ in asked}
    used = {layer: [e for e in names if whole[layer, e]] or names for layer, names in others.items()}
    busiest = {layer: sorted(names, key=lambda e: (-int(whole[layer, e]), e)) for layer, names in used.items()}
    cases: list[tuple[str, list[Place]]] = [("none", []), ("asked", list(asked))]
    cases.append(("busiest", _others(asked, lambda layer, n: busiest[layer][:n])))
    drawn = (_others(asked, lambda layer, n: draw.sample(used[layer], min(n, len(used[layer])))) for _ in range(rounds))
    cases += [("random", one) for one in drawn]
    exact = reference(engine, pieces, threading.Event())
    rows: list[dict[str, Any]] = []
    for name, gone in cases:
        say(f"without {', '.join(f'{layer}:{expert}' for layer, expert in gone) or 'none'} ({name})")
        scores = read_without(engine, gone, pieces, exact)
        rows.append(
            {
                "name": name,
                "experts": [list(place) for place in gone],
                "chosen": [int(whole[place]) / max(1, profile.tokens) for place in gone],
                "perplexity": perplexity_of(scores)[0],
                "kl": scores.kl / max(1, scores.tokens),
                "agreement": scores.agreed / max(1, scores.tokens),
            }
        )
    return rows


def _others(asked: Sequence[Place], choose: Callable[[int, int], Sequence[int]]) -> list[Place]:
    """In each layer as many as are chosen there."""
    layers = [layer for layer, _ in asked]
    return [(layer, e) for layer in dict.fromkeys(layers) for e in choose(layer, layers.count(layer))]


def read_without(
    engine: Engine, gone: Collection[Place], pieces: Sequence[Sequence[int]], exact: Sequence[torch.Tensor]
) -> Heard:
    """The pieces read with these experts left out, against the exact model's log-probabilities [n, V] of each."""
    with left_out(engine, gone):
        rows = reference(engine, pieces, threading.Event())
    scores = Heard()
    for ids, mine, theirs in zip(pieces, rows, exact, strict=True):
        for at, target in enumerate(ids[1:]):
            scores.add(target, mine[at], theirs[at])
    return scores


@contextmanager
def left_out(engine: Engine, gone: Collection[Place]) -> Iterator[None]:
    """Inside, these experts count nothing when they are chosen: their gate weights are 0, and those of a token's other
    experts stay as they are."""
    hooks = []
    for site in engine.loaded.sites:
        here = [expert for layer, expert in gone if layer == site.index]
        if here:
            ids = torch.tensor(here, device=engine.device)
            hooks.append(site.module.register_forward_pre_hook(partial(_without, ids)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without(gone: torch.Tensor, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, ids, weights, *rest = args
    return hidden, ids, weights.masked_fill(torch.isin(ids, gone), 0.0), *rest


def modes_of(way: str, asked: Sequence[Place], found: Sequence[SuperExpert]) -> list[Mode]:
    """One way of not waiting for a miss, without and with protection: by the setting where there are super experts,
    else by naming the chosen experts."""
    names = ", ".join(f"{layer}:{expert}" for layer, expert in asked)
    protecting: Mapping[str, Value] = {"protect_super": True} if found else {"protect_super": False, "protect": names}
    return [
        Mode(way, way, "", {**WAYS[way], "protect_super": False}),
        Mode(f"{way}_protected", f"{way}, {names} protected", "", {**WAYS[way], **protecting}),
    ]


# ---------------------------------------------------------------------- the result

FORMS = {"exact_match": ".1%", "perplexity": ".2f", "kl": ".4f", "agreement": ".1%", "substituted_rate": ".1%"}
HEADS = ("match", "perpl.", "KL", "agree", "changed")


def table(r: Result) -> list[str]:
    found, most = r["super_experts"], r["outstanding"]
    alone = ", ".join(f"{one['layer']}:{one['expert']}" for one in r["by_the_papers_rule_alone"])
    named = ", ".join(map(_stands_out, found)) or (
        f"none; what stands out most, and is examined instead, is {_stands_out(most)}"
    )
    by_layer = [(name, *(f"{value:.3g}" for value in r[f"{name}_by_layer"])) for name in ("largest", "median")]
    out = [
        (
            row["name"],
            f"{row['perplexity']:.2f}",
            f"{max(0.0, row['kl']):.4f}",
            f"{row['agreement']:.1%}",
            ", ".join(
                f"{layer}:{expert} ({share:.1%})"
                for (layer, expert), share in zip(row["experts"], row["chosen"], strict=True)
            ),
        )
        for row in r["left_out"]
    ]
    return [
        f"{headline(r)}; largest outputs on {r['calibrated_tokens']} tokens",
        f"Super experts: {named}",
        f"By the percentile and a tenth of the largest alone, which some expert of any model is above: {alone}",
        *grid(("layer", *map(str, range(r["layers"]))), by_layer),
        f"Left out at all times, the rest exact, over {r['tokens']} tokens of text:",
        *grid(("", "perpl.", "KL", "agree", "experts (chosen by so many of the tokens)"), out),
        f"Lossy misses at residency {r['residency']:g}, {r['questions']} questions and the same text:",
        *grid(("", *HEADS, ""), [(row["title"], *cells(row, FORMS), row["problem"]) for row in r["rows"]]),
    ]


def _stands_out(one: Mapping[str, Any]) -> str:
    return f"{one['layer']}:{one['expert']} ({one['ratio']:.3g} times its layer's median)"


SUITE = Suite(measure, table, small={"questions": 2, "tokens": 8, "rounds": 1})
