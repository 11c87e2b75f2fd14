"""ExpertFlow: what it proposes, where it is here, and its tables and figures."""

from bench.papers.parts import DRAWING, Ask, Pair, Paper, Part, Row, above, never
from core.system.command import COMMAND

PATH = ("path_predictor", "residents", "order", "guard")
NEAR = 0.02  # of a token's time: less is no time
SPEEDUP = 1.15
TRAINED = "The network is trained on answers of this model to prompts like those asked; its paper's has 30,000 runs."


def named(figure: str, at: tuple[str, ...], *pairs: Pair) -> Ask:
    """What is named before a pass, by sequences at a time; blocks are stretches of passes."""
    return Ask("path", f"accuracy/{{at}}/{{}}/blocks/{figure}", pairs, figure, at, learned=True, controls=TRAINED)


def system(rival: str, figure: str = "tpot_ms") -> Ask:
    """ExpertFlow against another system at every budget, one sequence; its network is trained."""
    where = "hit_blocks" if figure == "hit_rate" else "tpot_rounds_ms"
    return Ask("systems", f"systems/{{}}/{{at}}/{where}", (("expertflow", rival),), figure, learned=True)


PAPER = Paper(
    "expertflow",
    "ExpertFlow",
    "A small trained network tells from the tokens alone which experts all layers will need; one cache for all "
    "layers is filled in the order of use and evicts what is done with (PLEC); sequences are regrouped into batches "
    "that need few experts.",
    (
        Part("The network (T5 shape)", "core/policy/predict/nets/path.py"),
        Part("Its answers for the next token", "core/policy/predict/routing_path.py", ("predictor=routing_path",)),
        Part("PLEC", "core/policy/eviction/plec.py", ("eviction=plec", "scope=global")),
        Part("The token scheduler", "core/policy/batching/scheduler.py"),
        Part("Its two batches, and the dual-batch pipeline", "core/engine/batch_groups.py"),
        Part("Demands before prefetches", "core/cache/prefetch_queue.py"),
        Part("Temporal locality (TLP), the control", "core/policy/predict/recent.py", ("predictor=recent",)),
        Part("Spatial locality (SLP), the control", "core/policy/predict/transitions.py", ("predictor=transitions",)),
    ),
    ("expertflow", "se_moe", "pre_gated"),
    "Its tables on Switch models: they run, but cannot be calibrated, so that the network is trained for others alone.",
    "not stated",
    (
        Row("Figures 1-6", "The system, its cache, its scheduler, and its pipelines.", DRAWING),
        Row(
            "Table 1, batches of 8 to 32",
            "The network names more of what a batch needs than TLP and SLP.",
            named("accuracy", ("8", "16", "32"), *above("network", "TLP", "SLP")),
            ("path_predictor",),
        ),
        Row(
            "Table 1, one sequence",
            "The same of one sequence (not in the paper).",
            named("accuracy", ("1",), *above("network", "TLP", "SLP")),
            ("path_predictor",),
        ),
        Row(
            "Table 1, precision",
            "More of what it names is needed (not in the paper, which counts what is named in vain nowhere).",
            named("precision", ("1", "8", "16", "32"), *above("network", "TLP", "SLP")),
            ("path_predictor",),
        ),
        Row(
            "Figure 7",
            "Faster than fetching whole layers (SE-MoE), at every size of the cache; here of one sequence.",
            system("se_moe"),
            PATH,
        ),
        Row(
            "Figure 8, speed",
            "Faster than a cache in every layer with LRU (Mixtral-offloading, which prefetches, too).",
            system("mixtral_offloading"),
            PATH,
        ),
        Row("Figure 8, hit ratio", "More hits than that cache.", system("mixtral_offloading", "hit_rate"), PATH),
        Row(
            "Table 2",
            "Memory saved against everything resident.",
            never(
                "The budget is set by the user and held to the byte, so that there is nothing to find; "
                f"{COMMAND} bench systems prints the bytes of each budget."
            ),
        ),
        Row(
            "Figure 9, sizes of the cache",
            "PLEC, one pool for all layers, hits more than each layer's LRU behind the same predictions.",
            Ask(
                "methods",
                "plec/{at}/{}/hit_blocks",
                (("plec, routing_path", "lru, routing_path"),),
                "hit_rate",
                learned=True,
                controls="Predictions as they came in the engine, replayed without the prefetch guard.",
            ),
            ("live_searches", *PATH),
        ),
        Row(
            "Figure 9, its bound",
            "The same where predictions are perfect (the paper measures its own predictor alone).",
            Ask("methods", "plec/{at}/{}/hit_blocks", (("plec, oracle", "lru, oracle"),), "hit_rate", learned=True),
            ("residents",),
        ),
        Row(
            "Figure 9, sizes of batches",
            "From batches of 4 to those of 16, PLEC loses fewer hits than each layer's LRU.",
            Ask(
                "batch",
                "lost/{}",
                (("plec, network", "lru"), ("plec", "lru")),
                "lost",
                learned=True,
                controls="Half of the experts resident; PLEC alone is behind the next gate.",
            ),
            ("path_predictor",),
        ),
        Row(
            "Table 3",
            f"The token scheduler makes decoding {SPEEDUP:g} times as fast; above 1 and above that.",
            Ask(
                "batch",
                "shares/{}",
                (("speedup", 1.0), ("speedup", SPEEDUP)),
                "speedup",
                controls="Two batches of half of the prompts, half of the experts resident; sequences are expected "
                "to need their newest token's experts again.",
            ),
        ),
        Row(
            "Section 5.5, predictor",
            "Predicting while the model computes takes no extra time.",
            Ask(
                "overhead",
                "predictors/{at}/shares/{}",
                (("added", NEAR),),
                "share_of_token",
                ("routing_path",),
                controls=f"At most {NEAR:.0%} of a token would be no time; the model is small.",
            ),
            ("path_predictor",),
        ),
        Row(
            "Section 5.5, scheduler",
            "Scheduling takes no extra time.",
            Ask(
                "batch",
                "shares/{}",
                (("scheduling", NEAR),),
                "share_of_token",
                controls=f"Of two passes, between which it runs; at most {NEAR:.0%} would be no time.",
            ),
        ),
        Row(
            "Section 5.5, dual-batch pipeline",
            "Run at the same time as the other batch's pass, scheduling adds nothing to an answer.",
            Ask(
                "batch",
                "shares/{}",
                (("pipelined", NEAR),),
                "share_of_token",
                controls=f"Longer than batches of the same size that are not pipelined, at most {NEAR:.0%}.",
            ),
        ),
    ),
)
