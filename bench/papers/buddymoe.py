"""BuddyMoE: what it proposes, where it is here, and its tables and figures."""

from bench.papers.parts import DRAWING, Ask, Pair, Paper, Part, Row, above, chain, never
from bench.routing.buddy_figures import BUSY, COMPACT, COVERED, MOST, OFTEN

REGIME = (
    "--questions 48 --tokens 256 --modes paper_exact,paper_random,paper_75_4,paper_99_2,paper_95_16,paper_95_16_rho3,"
    "paper_95_16_rho4 --save"
)
GATES = "--questions 48 --tokens 256 --modes exact,buddy_rho3,buddy_rho3_tae --save"
BETA = "--questions 48 --tokens 256 --modes paper_exact,paper_95_16_rho3,paper_95_16_rho3_beta --save"
BEST, LIMIT4, LIMITLESS, RANDOM = "paper_95_16_rho3", "paper_95_16_rho4", "paper_95_16", "paper_random"
ALIKE = 0.5  # cosine from which on two experts are called alike; ours, the paper draws a map without a number
LAYERS = "Blocks are the layers; the bound is ours, as the paper draws a picture without a number."
SPEED = "eval runs each mode once, so that its times have no rounds to compare: there is no bench for this row yet."


def of_text(pairs: tuple[Pair, ...], figure: str, options: str, residency: str = "") -> Ask:
    """Modes of an evaluation at one residency, or at all of them."""
    blocks = {"exact_match": "match", "kl": "kl", "link_bytes": "link_bytes"}
    return Ask(
        "eval lossy",
        f"rows/{{}}/{{at}}/blocks/{figure}",
        pairs,
        blocks[figure],
        (residency,) if residency else (),
        learned=True,
        options=options,
    )


def accuracy(residency: str, *more: Pair) -> Ask:
    """The orderings that tables 2 to 4 have in common, and those of one table."""
    return of_text(
        (("paper_exact", BEST), *above(BEST, LIMIT4, LIMITLESS, RANDOM), *more), "exact_match", REGIME, residency
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
    "not stated",
    (
        Row("Figures 1-3, 5", "Sizes of models and memories, the architecture, the pipeline, the system.", DRAWING),
        Row(
            "Table 1",
            "A replaced miss takes no time, a miss that is waited for does.",
            never(
                "A replaced miss is not copied, so that it waits for nothing, by construction; python launch.py eval "
                "prints the stall of each mode."
            ),
        ),
        Row(
            "Figure 4",
            "Many pairs of experts work alike.",
            Ask(
                "lossy",
                "{}",
                (("redundancy", ALIKE),),
                "cosine",
                learned=True,
                controls=f"Mean cosine with an expert's most similar one. {LAYERS}",
                options="--questions 48 --tokens 256",
            ),
        ),
        Row(
            "Figure 6",
            "A few experts of a layer are active far more often than the others.",
            Ask(
                "buddies",
                "{}",
                (("busiest", OFTEN / BUSY),),
                "share",
                learned=True,
                controls=f"Share of choices that the busiest 1/{BUSY} takes, against {OFTEN:g} times that. {LAYERS}",
            ),
        ),
        Row(
            "Figures 7, 9",
            "Which experts are active together is sparse: few pairs, often.",
            Ask(
                "buddies",
                "{}",
                (("few_cover", MOST), ("few_cover", "few_popular_cover")),
                "share",
                learned=True,
                controls="Share of co-activations that an expert's first quarter of peers covers; the second "
                f"comparison is with peers chosen independently, each as often. {LAYERS}",
            ),
        ),
        Row(
            "Section 3.3, lists",
            "Buddy lists are compact: 2 to 16 of 64 experts.",
            Ask(
                "buddies",
                "{}",
                (("list_shares", 1 / COMPACT),),
                "list_share",
                learned=True,
                controls=f"Median length at alpha {COVERED} as a share of the experts, against 1/{COMPACT}. {LAYERS}",
            ),
        ),
        Row(
            "Section 3.2, layers",
            "Early layers have more diffuse co-activations, so longer lists, than late ones.",
            Ask(
                "buddies",
                "halves/{}",
                (("early", "late"),),
                "list_length",
                learned=True,
                controls=f"Median length at alpha {COVERED}, the n-th layer of the first half with that of the last.",
            ),
        ),
        Row(
            "Table 2, accuracy",
            "Three quarters resident: exact above rho 3 of 6, that above rho 4, no limit, random, and lists of 4.",
            accuracy("0.75", (BEST, "paper_75_4"), ("paper_75_4", LIMITLESS)),
            ("rho", "residents"),
        ),
        Row(
            "Table 3, accuracy",
            "Half resident: the same; lists of 2 between rho 3 and no limit.",
            accuracy("0.5", (BEST, "paper_99_2"), ("paper_99_2", LIMITLESS)),
            ("rho", "residents"),
        ),
        Row(
            "Table 4, accuracy",
            "Three eighths resident: rho 3 above rho 4 above no limit above random.",
            accuracy("0.375", *chain(LIMIT4, LIMITLESS, RANDOM)),
            ("rho", "residents"),
        ),
        Row(
            "Tables 2-4, divergence",
            "The same orderings in the divergence from the exact model, over a text (not in the paper).",
            of_text(chain(BEST, LIMIT4, LIMITLESS, RANDOM), "kl", REGIME),
            ("rho", "residents"),
        ),
        Row("Tables 2-4, speed", "The more is replaced, the faster: random, rho 3 of 6, exact.", never(SPEED)),
        Row(
            "Section 3.1, tokens",
            "Leaving peaked tokens alone keeps answers, at rho 3.",
            of_text((("buddy_rho3_tae", "buddy_rho3"),), "kl", GATES),
            ("rho",),
        ),
        Row(
            "Section 3.1, beta",
            "Replacing nothing where many of a layer's experts are missing keeps answers: a low beta above a high one.",
            of_text((("paper_95_16_rho3_beta", BEST),), "kl", BETA),
            ("rho", "residents"),
        ),
        Row(
            "Figure 8",
            "Less goes over the link (there a fifth).",
            of_text(((BEST, "paper_exact"),), "link_bytes", REGIME),
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
