"""BuddyMoE: what it proposes, where it is here, and its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.papers.parts import BY_CLAIM, HOLDS, NO, PART, Paper, Part, Row
from bench.papers.sources import DRAWING, Claims, Modes, Reading, never
from bench.routing.buddy_figures import BUSY, CLAIMS, COMPACT, COVERED, MOST, OFTEN

REGIME = (
    "eval --questions 48 --tokens 256 --modes paper_exact,paper_random,paper_75_4,paper_99_2,paper_95_16,"
    "paper_95_16_rho3,paper_95_16_rho4 --save"
)
NAMES = {
    "paper_exact": "exact",
    "paper_random": "random",
    "paper_75_4": "alpha .75 and lists of 4",
    "paper_99_2": "alpha .99 and lists of 2",
    "paper_95_16": "no limit",
    "paper_95_16_rho3": "rho 3 of 6",
    "paper_95_16_rho4": "rho 4 of 6",
}
ALIKE = 0.5  # cosine from which on two experts are called alike; ours, the paper draws a map without a number


def tables(residency: float, *more: tuple[str, str]) -> Modes:
    """The orderings that tables 2 to 4 have in common, in exact match, and those of one table."""
    best, rivals = "paper_95_16_rho3", ("paper_95_16_rho4", "paper_95_16", "paper_random")
    pairs = (("paper_exact", best), *((best, rival) for rival in rivals), *more)
    return Modes(pairs, "exact_match", residency, NAMES, REGIME)


def likeness(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """The cosine of an expert's outputs with its most similar expert's, by layer."""
    layers = result.get("redundancy")
    if not layers:
        return None
    alike = sum(cosine >= ALIKE for cosine in layers)
    verdict = HOLDS if alike == len(layers) else PART if alike else NO
    values = ", ".join(f"{cosine:.2f}" for cosine in layers)
    return verdict, f"Mean cosine with the most similar expert, by layer: {values}; called alike from {ALIKE:g} on."


def holds(result: Mapping[str, Any], name: str) -> str:
    """The verdict that `bench buddies` computed on one of its CLAIMS."""
    return BY_CLAIM[next(one["holds"] for one in result["orderings"] if one["claim"] == CLAIMS[name])]


def by_layer(values: Sequence[float], form: str = "{:.0%}") -> str:
    """Values of layers, first to last."""
    return ", ".join(form.format(value) for value in values).replace("%", " %")


def uneven(result: Mapping[str, Any]) -> tuple[str, str]:
    """The share of choices that the busiest experts take."""
    return holds(result, "uneven"), (
        f"Share of choices that the busiest 1/{BUSY} of the experts takes, by layer: {by_layer(result['busiest'])}; "
        f"called far more often from {OFTEN:g} times 1/{BUSY} on. Tab Calibrate draws it."
    )


def sparse(result: Mapping[str, Any]) -> tuple[str, str]:
    """How few peers cover most of an expert's co-activations, against what popularity alone would make of it."""
    return holds(result, "sparse"), (
        f"Share of an expert's co-activations that first {result['few_peers']} of {result['experts'] - 1} peers "
        f"cover, by layer: {by_layer(result['few_cover'])}; called sparse above {by_layer([MOST])}; were they chosen "
        f"independently, each as often: {by_layer(result['few_popular_cover'])}. Tab Calibrate draws the pairs."
    )


def compact(result: Mapping[str, Any]) -> tuple[str, str]:
    """Lengths of lists at the paper's alpha."""
    rows = result["lists"][COVERED]
    medians, longest = [row["median"] for row in rows], [row["longest"] for row in rows]
    return holds(result, "compact"), (
        f"At alpha {COVERED} half of the lists have up to {by_layer(medians, '{:g}')} of {result['experts'] - 1} "
        f"peers, by layer, the longest {by_layer(longest, '{:g}')}; called compact below 1/{COMPACT} of the experts. "
        f"A limit of {result['k_max']} leaves {by_layer([row['covered'] for row in rows])} covered."
    )


def early(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Lengths of lists of the first and of the last half of the layers."""
    rows = next(one["values"] for one in result["orderings"] if one["claim"] == CLAIMS["early"])
    if not rows:
        return None
    first, last = rows[0]
    return holds(result, "early"), (
        f"Mean of the layers' median length at alpha {COVERED}: {first:.1f} in the first half of the layers, "
        f"{last:.1f} in the last."
    )


PAPER = Paper(
    "buddymoe",
    "BuddyMoE",
    "Where a prefetch missed, compute a resident expert that is often active together with the missing one, instead of "
    "waiting for the copy.",
    (
        Part("Co-activations, counted or weighted, and buddy lists", "core/policy/substitute/buddies.py"),
        Part("Lengths of buddy lists over coverage", "core/policy/substitute/list_lengths.py"),
        Part(
            "The choice among an expert's buddies",
            "core/policy/substitute/buddy.py",
            ("substitute=buddy", "substitute.buddy.alpha", "substitute.buddy.k_max", "substitute.buddy.weighted"),
        ),
        Part("The gate of peaked tokens (TAE)", "core/policy/substitute/entropy.py", ("gate", "gate_percentile")),
        Part(
            "The gates at run time, of a token and of a batch", "core/runtime/gates.py", ("gate", "batch_gate", "beta")
        ),
        Part("Algorithm 1 for one token, with rho", "core/policy/substitute/plain.py", ("rho", "rho_order")),
        Part("The same for many tokens", "core/policy/substitute/batch.py"),
        Part("What is done about a missing expert", "core/runtime/miss.py", ("miss=substitute",)),
    ),
    ("buddymoe",),
    "Prefetching across several GPUs (hops), as there is one device.",
    (
        Row("Figures 1-3, 5", "Sizes of models and memories, the architecture, the pipeline, the system.", DRAWING),
        Row(
            "Table 1",
            "A replaced miss takes no time, a miss that is waited for does.",
            Modes((("buddy_unlimited", "exact"),), "stall_ms"),
        ),
        Row("Figure 4", "Many pairs of experts work alike.", Reading("lossy", likeness)),
        Row(
            "Figure 6",
            "A few experts of a layer are active far more often than the others.",
            Reading("buddies", uneven),
        ),
        Row(
            "Figures 7, 9", "Which experts are active together is sparse: few pairs, often.", Reading("buddies", sparse)
        ),
        Row("Section 3.3, lists", "Buddy lists are compact: 2 to 16 of 64 experts.", Reading("buddies", compact)),
        Row(
            "Section 3.2, layers",
            "Early layers have more diffuse co-activations, so longer lists, than late ones.",
            Reading("buddies", early),
        ),
        Row(
            "Table 2, accuracy",
            "Three quarters resident: exact above rho 3 of 6, that above rho 4, no limit, random, and lists of 4.",
            tables(0.75, ("paper_95_16_rho3", "paper_75_4"), ("paper_75_4", "paper_95_16")),
            ("rho", "residents"),
        ),
        Row(
            "Table 3, accuracy",
            "Half resident: the same; lists of 2 between rho 3 and no limit.",
            tables(0.5, ("paper_95_16_rho3", "paper_99_2"), ("paper_99_2", "paper_95_16")),
            ("rho", "residents"),
        ),
        Row(
            "Table 4, accuracy",
            "Three eighths resident: rho 3 above rho 4 above no limit above random.",
            tables(0.375, ("paper_95_16_rho4", "paper_95_16"), ("paper_95_16", "paper_random")),
            ("rho", "residents"),
        ),
        Row(
            "Tables 2-4, speed",
            "The more is replaced, the faster: random, rho 3 of 6, exact.",
            Modes(
                (("paper_random", "paper_95_16_rho3"), ("paper_95_16_rho3", "paper_exact")),
                "tok_s",
                names=NAMES,
                command=REGIME,
            ),
            ("rho", "residents"),
        ),
        Row(
            "Tables 2-4, nothing prefetched",
            "The same orderings where every miss is left to substitution (harsher than the paper).",
            Claims(
                "lossy",
                "BuddyMoE tables 2-4: exact above buddies with rho 3 above buddies without limit above random",
                ("exact", "rho 3, no limit, random"),
            ),
            ("rho",),
        ),
        Row(
            "Section 3.1",
            "Leaving peaked tokens alone keeps answers.",
            Modes(
                (("buddy_rho1_tae", "buddy_rho1"),),
                "exact_match",
                command="eval --questions 48 --tokens 256 --modes exact,buddy_rho1,buddy_rho1_tae,buddy_rho1_heaviest,"
                "buddy_rho1_tae_heaviest --save",
            ),
            ("rho",),
        ),
        Row(
            "Figure 8",
            "A fifth less goes over the link.",
            Modes((("paper_95_16_rho3", "paper_exact"),), "link_bytes", names=NAMES, command=REGIME),
            ("rho", "residents"),
        ),
        Row(
            "ARC-Easy and ARC-Challenge",
            "Accuracy on these questions, of DeepSeek-V2-Lite.",
            never(
                "The demo model cannot answer them; eval --tasks asks them of a model that can, where "
                "lm-evaluation-harness is installed."
            ),
        ),
    ),
)
