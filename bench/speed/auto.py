"""bench auto: is the preset that chooses for itself ever slower than settings chosen by hand?

At each budget and link the same prompts are answered with fixed settings and with the preset `auto`, by turns, each
from a cache as after the load. An answer of `auto` begins anew, so it contains the tokens in which it compares ways;
`settled` are those of its second half. Links are emulated, as multiples of balance: the one that copies an expert in
the time of a layer with everything resident; own is the machine's.
"""

from collections.abc import Mapping
from itertools import islice
from statistics import fmean, median
from typing import Any

from bench.harness.engines import model_of, stats_of, token_stream
from bench.harness.figures import ratio, spread
from bench.harness.report import grid
from bench.harness.run import LATENCY_US, Result, Run, Suite
from core.engine import Engine
from core.settings.presets import preset
from core.settings.sampling import Sampling
from core.types import Ids

PROMPT = 24  # tokens
LINKS = (0.05, 0.25, 1.0, 5.0, 0.0)  # times balance; 0 = the machine's own
SMALL_LINKS = (0.25,)
WAIT = "lru"
FIXED: Mapping[str, Mapping[str, object]] = {
    WAIT: {"eviction": "lru", "predictor": "none"},
    "lcp": {"eviction": "lcp", "predictor": "none"},
    "gate": {"eviction": "lcp", "predictor": "gate", "prefetch_deadline": True},
    "transitions": {"eviction": "lcp", "predictor": "transitions"},
    "host": {"eviction": "lcp", "predictor": "none", "miss_placement": "host"},
    "in place": {"eviction": "lcp", "predictor": "none", "miss_placement": "host", "host_threads": 0},
    "measured": {"eviction": "lcp", "predictor": "none", "miss_placement": "measured"},
}
WORST, MEDIAN, OVER_WAIT = 1.15, 1.05, 1.03  # goals: over the best fixed settings, and over LRU without prefetching


def measure(
    run: Run, model: str = "demo", budgets: str = "15%,30%,50%,75%", rounds: int = 3, tokens: int = 192
) -> Result:
    """`tokens` = decoded ones of an answer."""
    settings = {"budget": "100%", "link": "own", "predictor": "none"}
    engine = run.engine(model_of(run, model), settings, endless=True, context=PROMPT + tokens + 8)
    stream = token_stream(engine)
    prompts = [list(islice(stream, PROMPT)) for _ in range(rounds + 1)]
    layer_s = min(stats_of(engine, prompts[0], 32).tpot_ms for _ in range(3)) / 1e3 / engine.shape.layers
    balance, cells = engine.sizes.blob / layer_s / 1e9, dict[str, Any]()
    for budget in budgets.split(",")[: 1 if run.small else None]:
        for times in SMALL_LINKS if run.small else LINKS:
            link: dict[str, object] = {"link": "own"}
            if times:
                gbps = min(100.0, max(0.001, times * balance))
                link = {"link": "emulated", "link_gbps": gbps, "link_latency_us": LATENCY_US}
            where = {"budget": budget, **link}
            name = f"{budget}, {f'{times:g} of balance' if times else 'own link'}"

            def answered(kind: str, number: int, where: Mapping[str, object] = where) -> list[float]:
                return _token_ms(engine, kind, where, prompts[number], tokens)

            cells[name] = _figures(run.by_turns((*FIXED, "auto"), answered, rounds, what=name))
    over = [one["over_best"] for one in cells.values()]
    return {
        "cells": cells,
        "balance_gbps": balance,
        "worst": max(over),
        "median": median(over),
        "settled_worst": max(one["settled_over_best"] for one in cells.values()),
        "over_wait": max(one["over_wait"] for one in cells.values()),
        "goals": {"worst": WORST, "median": MEDIAN, "over_wait": OVER_WAIT},
    }


def _token_ms(engine: Engine, kind: str, where: Mapping[str, object], prompt: list[int], tokens: int) -> list[float]:
    """Milliseconds of each decoded token."""
    plain = preset("on_demand").values  # of everything that presets set
    chosen = preset("auto").values if kind == "auto" else {**plain, **FIXED[kind]}
    engine.change({**plain, "link": "own", "host_threads": 1})
    engine.expert_cache.start_over()
    engine.change({**chosen, **where})
    pieces = engine.generate(Ids(prompt), Sampling(temperature=0.0, max_new_tokens=tokens + 1))
    return [piece.step.total_ms for piece in pieces if piece.step is not None and piece.step.phase == "decode"]


def _figures(found: dict[str, list[list[float]]]) -> Result:
    whole = {kind: [fmean(answer) for answer in answers] for kind, answers in found.items()}
    settled = {kind: [fmean(answer[len(answer) // 2 :]) for answer in answers] for kind, answers in found.items()}
    best, late = (min(FIXED, key=lambda kind: median(of[kind])) for of in (whole, settled))
    return {
        **{kind: spread(values) for kind, values in whole.items()},
        "best": best,
        "over_best": ratio(whole["auto"], whole[best]),
        "settled_over_best": ratio(settled["auto"], settled[late]),
        "over_wait": ratio(whole["auto"], whole[WAIT]),
    }


def table(r: Result) -> list[str]:
    kinds = (*FIXED, "auto")
    rows = [
        (
            name,
            *(f"{one[kind]['median']:.2f}" for kind in kinds),
            *(f"{one[figure]:.2f}" for figure in ("over_best", "settled_over_best", "over_wait")),
        )
        for name, one in r["cells"].items()
    ]
    goals = r["goals"]
    return [
        f"{r['model']}: ms a decoded token, medians of {r['rounds']} answers of {r['tokens']} tokens; balance is "
        f"{r['balance_gbps']:.3g} GB/s; links EMULATED but the machine's own",
        *grid(("", *kinds, "over the best", "settled", "over lru"), rows),
        f"  over the best fixed: worst {r['worst']:.2f} (goal {goals['worst']}), median {r['median']:.2f} (goal "
        f"{goals['median']}), settled worst {r['settled_worst']:.2f}; over LRU without prefetching, worst "
        f"{r['over_wait']:.2f} (goal {goals['over_wait']})",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 12})
