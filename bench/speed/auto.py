"""bench auto: is the preset that chooses for itself ever slower than settings chosen by hand?

At each budget and link the same prompts are answered with fixed settings and with the preset `auto`, by turns, each
from a cache as after the load. An answer of `auto` begins anew, so it contains the tokens in which it compares ways;
`settled` are those of its second half, `tokens_until` those after which it compared nothing more. Links are emulated,
as multiples of balance: the one that copies an expert in the time of a layer with everything resident; own is the
machine's. Held-out combinations are drawn anew in every run, so that no constant can have been chosen for them; their
figures stand apart.

Cells are kept as they are measured. A run goes on from those of earlier ones over the same model, rounds and tokens,
whichever budgets these had, until one has had all of them: so it can be made in parts.

The best fixed setting of a round is the one that the other rounds show: of several that are equally good the one that
happened to be the fastest in a round would be faster than any of them is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random, SystemRandom
from statistics import fmean, median
from typing import Any, NamedTuple

from bench.harness.engines import model_of, stats_of, token_stream
from bench.harness.figures import ratio, spread
from bench.harness.resume import KeptRows
from bench.harness.run import LATENCY_US, Result, Run, Suite
from core.engine import Engine
from core.settings.presets import preset
from core.settings.sampling import Sampling
from core.system.wording import grid
from core.types import Ids

PROMPT = 24  # tokens
BUDGETS = "15%,30%,50%,75%"
LINKS = (0.05, 0.25, 1.0, 5.0, 0.0)  # times balance; 0 = the machine's own
SMALL_LINKS = (0.25,)
SHARES, TIMES = (15, 90), (0.03, 8.0)  # per cent of the experts and times balance, of held-out combinations
WAIT = "lru"
FIXED: Mapping[str, Mapping[str, object]] = {
    WAIT: {"eviction": "lru", "predictor": "none"},
    "lcp": {"eviction": "lcp", "predictor": "none"},
    "lfru": {"eviction": "lfru", "predictor": "none"},
    "gate": {"eviction": "lfru", "predictor": "gate", "prefetch_deadline": True},
    "transitions": {"eviction": "lfru", "predictor": "transitions"},
    "host": {"eviction": "lfru", "predictor": "none", "miss_placement": "host"},
    "in place": {"eviction": "lfru", "predictor": "none", "miss_placement": "host", "host_threads": 0},
    "measured": {"eviction": "lfru", "predictor": "none", "miss_placement": "measured"},
}
WORST, MEDIAN, OVER_WAIT = 1.15, 1.05, 1.03  # goals: over the best fixed settings, and over LRU without prefetching


class Combination(NamedTuple):
    """A budget, and a link as a multiple of balance; 0 = the machine's own."""

    budget: str
    times: float

    def __str__(self) -> str:
        return f"{self.budget}, {f'{self.times:.3g} of balance' if self.times else 'own link'}"


def measure(
    run: Run,
    model: str = "demo",
    budgets: str = BUDGETS,
    rounds: int = 5,
    tokens: int = 192,
    drawn: int = 4,
) -> Result:
    """`tokens` = decoded ones of an answer; `drawn` = held-out combinations, at random."""
    settings = {"budget": "100%", "link": "own", "predictor": "none"}
    engine = run.engine(model_of(run, model), settings, endless=True, context=PROMPT + tokens + 8)
    stream = token_stream(engine)
    prompts = [list(islice(stream, PROMPT)) for _ in range(rounds + 1)]
    small = "-small" if run.small else ""
    of = {"model": engine.model_hash, "sizes": [rounds, tokens], "versions": run.about["versions"]}
    kept = KeptRows(run.folder() / "auto" / f"{engine.model_hash[:16]}{small}.jsonl", of)
    run.say(f"{len(kept.rows)} cells are there already")

    def balance_gbps() -> float:
        layer_s = min(stats_of(engine, prompts[0], 32).tpot_ms for _ in range(3)) / 1e3 / engine.shape.layers
        return engine.sizes.blob / layer_s / 1e9

    balance = kept.note("balance_gbps", balance_gbps, anew=not kept.rows)
    seed = kept.note("held_out_seed", lambda: SystemRandom().randrange(1 << 32), anew=not kept.rows)

    def cell(one: Combination) -> Result:
        for row in kept.rows:
            if row["cell"] == str(one):
                return dict(row["figures"])
        link: dict[str, object] = {"link": "own"}
        if one.times:
            gbps = min(100.0, max(0.001, one.times * balance))
            link = {"link": "emulated", "link_gbps": gbps, "link_latency_us": LATENCY_US}

        def answered(kind: str, number: int) -> Answer:
            return _answer(engine, kind, {"budget": one.budget, **link}, prompts[number], tokens)

        figures = _figures(run.by_turns((*FIXED, "auto"), answered, rounds, what=str(one)))
        kept.add({"cell": str(one), "figures": figures})
        return figures

    every = [Combination(budget, times) for budget in budgets.split(",") for times in LINKS]
    cells = {str(one): cell(one) for one in ([Combination("30%", *SMALL_LINKS)] if run.small else every)}
    apart = {str(one): cell(one) for one in _drawn(seed, drawn)}
    if budgets == BUDGETS:
        kept.done()
    return {
        "cells": cells,
        "balance_gbps": balance,
        **_summary(cells),
        "held_out_cells": apart,
        "held_out_seed": seed,
        "held_out_summary": _summary(apart),
        "goals": {"worst": WORST, "median": MEDIAN, "over_wait": OVER_WAIT},
    }


def _drawn(seed: int, count: int) -> Iterator[Combination]:
    draw, (low, high) = Random(seed), map(math.log, TIMES)
    for _ in range(count):
        yield Combination(f"{draw.randint(*SHARES)}%", math.exp(draw.uniform(low, high)))


def _summary(cells: Mapping[str, Any]) -> Result:
    if not cells:
        return {}
    over = [one["over_best"] for one in cells.values()]
    return {
        "worst": max(over),
        "median": median(over),
        "settled_worst": max(one["settled_over_best"] for one in cells.values()),
        "over_wait": max(one["over_wait"] for one in cells.values()),
    }


class Answer(NamedTuple):
    """Milliseconds of each decoded token, and after how many of them no ways were compared any more."""

    ms: list[float]
    until: int


def _answer(engine: Engine, kind: str, where: Mapping[str, object], prompt: list[int], tokens: int) -> Answer:
    plain = preset("on_demand").values  # of everything that presets set
    chosen = preset("auto").values if kind == "auto" else {**plain, **FIXED[kind]}
    engine.change({**plain, **FIXED[WAIT], "budget": where["budget"], "link": "own", "host_threads": 1})
    engine.expert_cache.start_over()  # filled, as a policy keeps what it is given
    engine.change({**chosen, **where})
    throttles, ms, until = (engine.parts.host.throttle, engine.parts.prediction.throttle), list[float](), 0
    for piece in engine.generate(Ids(prompt), Sampling(temperature=0.0, max_new_tokens=tokens + 1)):
        if piece.step is not None and piece.step.phase == "decode":
            ms += [piece.step.total_ms / piece.step.tokens] * piece.step.tokens
            if any(one.comparing for one in throttles):
                until = len(ms)
    return Answer(ms, until)


def _figures(found: dict[str, list[Answer]]) -> Result:
    whole = {kind: [fmean(answer.ms) for answer in answers] for kind, answers in found.items()}
    settled = {kind: [fmean(one.ms[len(one.ms) // 2 :]) for one in answers] for kind, answers in found.items()}
    return {
        **{kind: spread(values) for kind, values in whole.items()},
        "best": min(FIXED, key=lambda kind: median(whole[kind])),
        "tokens_until": median(answer.until for answer in found["auto"]),
        "over_best": ratio(whole["auto"], best_of_others(whole)),
        "settled_over_best": ratio(settled["auto"], best_of_others(settled)),
        "over_wait": ratio(whole["auto"], whole[WAIT]),
    }


def best_of_others(times: Mapping[str, Sequence[float]]) -> list[float]:
    """Of each round the time of the fixed setting that is the fastest in the median of the other rounds, where there
    are any."""

    def without(number: int, kind: str) -> float:
        others = [*times[kind][:number], *times[kind][number + 1 :]]
        return median(others or times[kind])

    return [times[min(FIXED, key=lambda kind: without(number, kind))][number] for number in range(len(times[WAIT]))]


def table(r: Result) -> list[str]:
    apart = r["held_out_cells"]
    return [
        f"{r['model']}: ms a decoded token, medians of {r['rounds']} answers of {r['tokens']} tokens; balance is "
        f"{r['balance_gbps']:.3g} GB/s; links EMULATED but the machine's own; until: tokens after which Auto compared "
        "nothing more",
        *_part(r["cells"], r, r["goals"]),
        *([f"Held-out combinations, drawn from the seed {r['held_out_seed']}"] if apart else []),
        *(_part(apart, r["held_out_summary"], r["goals"]) if apart else []),
    ]


def _part(cells: Mapping[str, Any], summary: Mapping[str, Any], goals: Mapping[str, Any]) -> list[str]:
    kinds = (*FIXED, "auto")
    rows = [
        (
            name,
            *(f"{one[kind]['median']:.2f}" for kind in kinds),
            *(f"{one[figure]:.2f}" for figure in ("over_best", "settled_over_best", "over_wait")),
            f"{one['tokens_until']:.0f}",
        )
        for name, one in cells.items()
    ]
    return [
        *grid(("", *kinds, "over the best", "settled", "over lru", "until"), rows),
        f"  over the best fixed: worst {summary['worst']:.2f} (goal {goals['worst']}), median {summary['median']:.2f} "
        f"(goal {goals['median']}), settled worst {summary['settled_worst']:.2f}; over LRU without prefetching, worst "
        f"{summary['over_wait']:.2f} (goal {goals['over_wait']})",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 12, "drawn": 1})
