"""Speculating Experts: what it proposes, where it is here, and its tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from bench.papers.parts import HOLDS, NO, PART, Paper, Part, Row
from bench.papers.sources import DRAWING, Claims, First, Keeps, Reading, Systems, never, of

EXECUTED = (
    "eval --questions 48 --tokens 256 --residency .75 --modes exact,execute_default_vectors,execute_estimator,"
    "execute_hybrid --save"
)


def copying(result: Mapping[str, Any]) -> tuple[str, str]:
    """The parts of a token's time on demand, at each length of context."""
    rows = {at: row["systems"]["on demand"] for at, row in result["speculating"]["tpot"].items()}
    text = "; ".join(
        f"behind {at} tokens compute {row['compute_ms']:.1f}, stall {row['stall_ms']:.1f}, idle {row['idle_ms']:.1f} ms"
        for at, row in rows.items()
    )
    copies = [row["stall_ms"] > row["compute_ms"] for row in rows.values()]
    return of(copies), f"On demand, emulated link: {text}."


def grows(result: Mapping[str, Any]) -> tuple[str, str]:
    """The share of a token that prefetching gains, over the length of context."""
    rows = result["speculating"]["tpot"]
    gains = [
        row["systems"]["prefetch, default vectors"]["gained_ms"] / row["systems"]["on demand"]["tpot_ms"]
        for row in rows.values()
    ]
    text = ", ".join(f"behind {at} tokens {gain:.0%}" for at, gain in zip(rows, gains, strict=True))
    return of([a < b for a, b in pairwise(gains)]), f"Less time than on demand: {text}."


def bounded(result: Mapping[str, Any]) -> tuple[str, str]:
    """What prefetching gains, and its bound."""
    rows = result["speculating"]["tpot"]
    pairs = {
        at: (row["systems"]["prefetch, default vectors"]["gained_ms"], row["bound_ms"]) for at, row in rows.items()
    }
    text = ", ".join(f"behind {at} tokens {gained:.1f} of {bound:.1f} ms" for at, (gained, bound) in pairs.items())
    return of([gained <= bound for gained, bound in pairs.values()]), f"Gained, of at most: {text}."


def more_tokens(result: Mapping[str, Any]) -> tuple[str, str]:
    """The estimator's recall over the tokens it was trained on, of the widest range measured at one width and input."""
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for row in result["estimators"]:
        key = row["estimator_input"], row["estimator_width"]
        groups.setdefault(key, {})[row["trained"]] = row["recall"]
    most = max(len(one) for one in groups.values())
    curves = {key: sorted(one.items()) for key, one in groups.items() if len(one) == most}
    text = "; ".join(
        f"from {'router inputs' if kind == 'hidden' else 'quasi-hidden states'}, width {width}: "
        + ", ".join(f"{tokens:,} tokens {recall:.1%}" for tokens, recall in curve)
        for (kind, width), curve in curves.items()
    )
    grows = [a < b for curve in curves.values() for (_, a), (_, b) in pairwise(curve)]
    return of(grows), f"Mean recall@k of the layers but the first, {text}; the paper's range is millions."


def early_layers(result: Mapping[str, Any]) -> tuple[str, str]:
    """Recall by layer of the best estimator and of the routers given quasi-hidden states."""
    best = max(result["estimators"], key=lambda row: float(row["recall"]))
    pairs = list(
        zip(best["recall_by_layer"][1:], result["untrained"]["default_vectors"]["recall_by_layer"][1:], strict=True)
    )
    text = ", ".join(f"{a:.0%} / {b:.0%}" for a, b in pairs)
    return of([a > b for a, b in pairs]), f"Best estimator / routers with default vectors, by layer: {text}."


def default_layers(result: Mapping[str, Any]) -> tuple[str, str]:
    """The same of the estimator as it is by default, against default vectors."""
    rows = result["predictors"]
    pairs = list(
        zip(rows["estimator"]["recall_by_layer"][1:], rows["default_vectors"]["recall_by_layer"][1:], strict=True)
    )
    text = ", ".join(f"{a:.0%} / {b:.0%}" for a, b in pairs)
    return of([a > b for a, b in pairs]), f"Estimator / routers with default vectors, by layer: {text}."


def heaviest_best(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Recall of default vectors by the rank of the chosen expert's weight; the first layer has none before it."""
    row = result["predictors"].get("default_vectors", {})
    if not (layers := row.get("recall_by_rank")):
        return None
    ranks = [statistics.fmean(rates) for rates in zip(*layers[1:], strict=True)]
    falls = all(a > b for a, b in pairwise(ranks))
    first, last = ([rates[at] for rates in layers[1:]] for at in (0, -1))
    verdict = HOLDS if falls else PART if ranks[0] > ranks[-1] else NO
    return verdict, (
        "Recall@k of default vectors by rank, heaviest first, mean of the layers but the first: "
        f"{', '.join(f'{rate:.1%}' for rate in ranks)}. By layer, heaviest / lightest: "
        + ", ".join(f"{a:.0%} / {b:.0%}" for a, b in zip(first, last, strict=True))
        + "."
    )


PAPER = Paper(
    "speculating",
    "Speculating Experts",
    "Estimate the next layer's router input from this layer's state and the mean outputs of its experts (default "
    "vectors), fetch what its router then chooses while this layer computes, and compute that choice, right or wrong, "
    "instead of fetching twice; where routers predict badly, a trained estimator does.",
    (
        Part(
            "Default vectors and quasi-hidden states",
            "core/policy/predict/default_vectors.py",
            ("predictor=default_vectors",),
        ),
        Part(
            "The estimator, alone and for the layers that need it",
            "core/policy/predict/estimator.py",
            ("predictor=estimator", "predictor=hybrid", "predictor.hybrid.threshold"),
        ),
        Part("Its network", "core/policy/predict/nets/estimator.py"),
        Part(
            "Executing predictions",
            "core/runtime/prediction/speculation.py",
            ("execute=always", "execute_weights", "execute_prefill"),
        ),
        Part("The next layer's gate, the control", "core/policy/predict/gate.py", ("predictor=gate",)),
    ),
    ("speculating", "speculating_execute"),
    "Attention kernels, graphs and several batches of its engine.",
    (
        Row("Figures 1, 6, 11", "How prefetching works, its code in short, the estimator's network.", DRAWING),
        Row("Figure 2", "A trace of a GPU with copies during computing.", never("It shows a GPU's own trace.")),
        Row(
            "Figure 3",
            "Quasi-hidden states are nearer to the next layer's state than this layer's.",
            Claims(
                "lossy",
                "Speculating Experts figure 3: quasi-hidden states nearer than the states before",
                ("quasi-hidden states", "states before"),
            ),
        ),
        Row(
            "Figure 4",
            "Default vectors recall more than the next gate.",
            Claims(
                "lossy",
                "Speculating Experts figure 4: default vectors above the next gate",
                ("default vectors", "next gate"),
            ),
        ),
        Row("Figure 5", "The experts of most weight are recalled best.", Reading("predictors", heaviest_best)),
        Row(
            "Table 1, routers",
            "Executing default vectors' choice keeps answers (of two of their three models).",
            Keeps("execute_default_vectors", "exact", command=EXECUTED),
            ("execute",),
        ),
        Row(
            "Table 1, Est-PF",
            "The estimator's choice keeps more than default vectors'.",
            Claims(
                "lossy",
                "Speculating Experts table 1: executing the estimator's choice above default vectors'",
                ("estimator", "default vectors"),
            ),
            ("execute", "estimator"),
        ),
        Row(
            "Table 1, Hybrid-PF",
            "So does the estimator for the layers that need it.",
            Claims(
                "lossy",
                "Speculating Experts table 1: executing the hybrid's choice above default vectors'",
                ("hybrid", "default vectors"),
            ),
            ("execute", "estimator"),
        ),
        Row(
            "Tables 2, 3",
            "The models and the machines.",
            never("A description of what they used: nothing was measured."),
        ),
        Row(
            "Figure 7",
            "On demand, copying takes most of a token (84 to 88 %), at every length of context.",
            Reading("lossy", copying),
        ),
        Row(
            "Figure 8, speed",
            "Prefetching is faster than fetching on demand.",
            Claims(
                "lossy", "Speculating Experts figure 8: prefetching faster than on demand", ("prefetching", "on demand")
            ),
            ("residents",),
        ),
        Row(
            "Figure 8, contexts", "The longer the context, the more it gains.", Reading("lossy", grows), ("residents",)
        ),
        Row(
            "Figure 8, executed",
            "Executing predictions is faster than fetching on demand, at every budget.",
            Systems("speculating_execute", ("on_demand",)),
            ("execute",),
        ),
        Row(
            "Equation 1",
            "It gains at most what computing and copying have in common.",
            Reading("lossy", bounded),
            ("residents",),
        ),
        Row("Figure 9", "The estimator's recall grows over its training tokens.", Reading("estimator", more_tokens)),
        Row(
            "Figure 10",
            "The estimator recalls more than the routers, above all in early layers.",
            First((Reading("estimator", early_layers), Reading("predictors", default_layers))),
            ("estimator",),
        ),
    ),
)
