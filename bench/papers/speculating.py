"""Speculating Experts: what it proposes, where it is here, and its tables and figures."""

from bench.papers.parts import DRAWING, Ask, Pair, Paper, Part, Row, above, chain, never

EXECUTED = (
    "--questions 48 --tokens 256 --residency .75 --modes exact,execute_default_vectors,execute_estimator,"
    "execute_hybrid --save"
)
LOSSY = "--questions 48 --tokens 256"
AS_GOOD = 0.05  # of exact match: what answers are kept within; the paper's own losses on GPT-OSS are of that size
COPIED = 0.84  # of a token: the least that the paper finds
DOMINATES = 3.0  # copying over computing of a token on demand: less is another regime than the paper's


def timed(blocks: str, pairs: tuple[Pair, ...], figure: str, at: tuple[str, ...] = (), controls: str = "") -> Ask:
    """Systems of the second part of bench lossy behind contexts of several lengths; blocks are rounds."""
    return Ask(
        "lossy", f"speculating/tpot/{blocks}", pairs, figure, at, copies=DOMINATES, controls=controls, options=LOSSY
    )


def executed(better: str, figure: str, margin: float = 0.0, than: str = "execute_default_vectors") -> Ask:
    """Executed predictions at every residency that was evaluated."""
    kind = "match" if figure == "exact_match" else figure
    return Ask(
        "eval lossy",
        f"rows/{{}}/{{at}}/blocks/{figure}",
        ((better, than),),
        kind,
        margin=margin,
        learned=True,
        options=EXECUTED,
        controls=f"As good: at most {margin:.0%} less." if margin else "",
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
    "7 to 10 (84 to 88 % of a token copying, 8 to 13 % computing)",
    (
        Row("Figures 1, 6, 11", "How prefetching works, its code in short, the estimator's network.", DRAWING),
        Row("Figure 2", "A trace of a GPU with copies during computing.", never("It shows a GPU's own trace.")),
        Row(
            "Figure 3",
            "Quasi-hidden states are nearer to the next layer's state than this layer's.",
            Ask(
                "lossy",
                "speculating/cosine_blocks/{}",
                (("quasi", "before"),),
                "cosine",
                learned=True,
                options=LOSSY,
                controls="Mean over the layers.",
            ),
        ),
        Row(
            "Figure 4",
            "Default vectors recall more than the next gate.",
            Ask(
                "predictors",
                "predictors/{}/blocks/{at}",
                (("default_vectors", "gate"),),
                "recall",
                ("mean",),
                learned=True,
                controls="Mean over the layers but the first; blocks are stretches of decoded tokens.",
            ),
        ),
        Row(
            "Figure 5",
            "The experts of most weight are recalled best.",
            Ask(
                "predictors",
                "predictors/{at}/rank_blocks/{}",
                chain("1", "2", "3", "4"),
                "recall",
                ("default_vectors",),
                learned=True,
                controls="By the rank of the chosen expert's weight, mean over the layers but the first.",
            ),
        ),
        Row(
            "Table 1, routers",
            "Executing default vectors' choice keeps answers (of two of their three models).",
            executed("execute_default_vectors", "exact_match", AS_GOOD, "exact"),
            ("execute",),
        ),
        Row(
            "Table 1, Est-PF",
            "The estimator's choice keeps more than default vectors' (of one of their three models).",
            executed("execute_estimator", "kl"),
            ("execute", "estimator"),
        ),
        Row(
            "Table 1, Hybrid-PF",
            "So does the estimator for the layers that need it.",
            executed("execute_hybrid", "kl"),
            ("execute", "estimator"),
        ),
        Row(
            "Tables 2, 3",
            "The models and the machines.",
            never("A description of what they used: nothing was measured."),
        ),
        Row(
            "Figure 7",
            f"On demand, copying takes most of a token, {COPIED:.0%} and more, at every length of context.",
            timed(
                "{at}/systems/{}/copy_shares", (("on demand", COPIED),), "share", controls="Copy time, not the wait."
            ),
        ),
        Row(
            "Figure 8, speed",
            "Prefetching is faster than fetching on demand.",
            Ask(
                "lossy",
                "speculating/tpot/{at}/systems/{}/tpot_rounds_ms",
                (("prefetch, default vectors", "on demand"),),
                "tpot_ms",
                options=LOSSY,
            ),
            ("residents",),
        ),
        Row(
            "Figure 8, contexts",
            "The longer the context, the more of a token it gains.",
            timed("{}/systems/{at}/gain_shares", above("768", "256", "64"), "share", ("prefetch, default vectors",)),
            ("residents",),
        ),
        Row(
            "Figure 8, executed",
            "Executing predictions is faster than fetching on demand, at every budget.",
            Ask("systems", "systems/{}/{at}/tpot_rounds_ms", (("speculating_execute", "on_demand"),), "tpot_ms"),
            ("execute",),
        ),
        Row(
            "Equation 1",
            "It gains at most what computing and copying have in common.",
            Ask(
                "lossy",
                "speculating/tpot/{at}/systems/{}/gained_over_bound",
                (("prefetch, default vectors", 1.0),),
                "share_of_token",
                options=LOSSY,
                controls="What is gained over that bound, against 1.",
            ),
            ("residents",),
        ),
        Row(
            "Figure 9",
            "The estimator's recall grows over its training tokens.",
            Ask(
                "estimator",
                "blocks/{}/{at}",
                (
                    *chain("hidden 256 16384", "hidden 256 8192", "hidden 256 1024"),
                    *chain("quasi 256 16384", "quasi 256 8192", "quasi 256 1024"),
                ),
                "recall",
                ("mean",),
                learned=True,
                controls="Input, width, tokens; the paper's range is millions of tokens, where it levels off.",
            ),
        ),
        Row(
            "Figure 10",
            "The estimator recalls more than the routers in early layers.",
            Ask(
                "estimator",
                "blocks/{}/{at}",
                (("best estimator", "default_vectors"),),
                "recall",
                ("layer 1", "layer 2"),
                learned=True,
                controls="The first two layers that have one before them.",
            ),
            ("estimator",),
        ),
    ),
)
