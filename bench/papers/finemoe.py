"""FineMoE: what it proposes, where it is here, and its tables and figures."""

from bench.papers.parts import DRAWING, PART, Ask, Pair, Paper, Part, Row, Stated, above, chain, never
from bench.papers.verdicts import STRONG

RIVALS = ("se_moe", "mixtral_offloading", "promoe", "moe_infinity")
SEARCHED = ("live_searches", "residents")
SYSTEMS = ("finemoe_eviction", "arrival", "order", "guard", *SEARCHED)
FREE = 0.02  # of a token's time: what the paper calls negligible is 1 %
GUARANTEED = 0.99  # share of iterations: what so few as are measured can tell from all
ONLINE = "No bench lets requests arrive one after the other yet."
BATCH = "No system of bench systems answers batches, and bench batch has no FineMoE: its search follows one sequence."


def maps(blocks: str, pairs: tuple[Pair, ...], figure: str, at: tuple[str, ...] = (), controls: str = "") -> Ask:
    """Figures of recorded maps; blocks are answers."""
    return Ask("expert_maps", blocks, pairs, figure, at, learned=True, controls=controls)


def hits(*pairs: Pair) -> Ask:
    """Predictors ahead of an LRU cache, as the engine itself had them."""
    return Ask("methods", "prefetchers/{at}/{}/engine/hit_blocks", pairs, "hit_rate", learned=True)


def system(figure: str, rivals: tuple[str, ...] = RIVALS) -> Ask:
    """FineMoE against other systems at every budget; its maps are learnt."""
    where = "hit_blocks" if figure == "hit_rate" else f"{figure.removesuffix('_ms')}_rounds_ms"
    return Ask("systems", f"systems/{{}}/{{at}}/{where}", above("finemoe", *rivals), figure, learned=True)


PAPER = Paper(
    "finemoe",
    "FineMoE",
    "Store, for every token computed, the probabilities of all routers (an expert map) and what the token meant; "
    "find the most similar stored one by meaning and by the layers so far, prefetch as many of its experts as the "
    "similarity asks for, and evict by its probabilities and by use.",
    (
        Part("The store of maps, its search and its deduplication", "core/policy/predict/maps.py"),
        Part("The searches, while the model computes", "core/policy/predict/map_search.py"),
        Part(
            "Prediction from the maps found",
            "core/policy/predict/expert_map.py",
            (
                *(
                    "predictor=expert_map predictor.distance predictor.expert_map.capacity "
                    "predictor.expert_map.semantic predictor.expert_map.dynamic"
                ).split(),
            ),
        ),
        Part("Eviction by 1 / (probability x use)", "core/policy/eviction/finemoe.py", ("eviction=finemoe",)),
        Part("What predictors tell policies", "core/policy/hints.py"),
        Part("Prefetch priority: probability over distance", "core/policy/predict/expert_map.py"),
    ),
    ("finemoe", "moe_infinity", "promoe", "mixtral_offloading", "se_moe"),
    "Batches of requests, and several GPUs.",
    "not stated",
    (
        Row("Figures 1a, 2, 5-7", "Stages, the design space, the system, maps and their search.", DRAWING),
        Row("Table 1", "The models.", never("A description of their models: nothing was measured.")),
        Row(
            "Figure 3b",
            "Routing summed over a request is harder to predict (higher entropy) than of one token.",
            maps("entropy/{at}/blocks/{}", (("a token", "an answer"),), "entropy"),
        ),
        Row(
            "Figures 3a, 3c",
            "The more tokens are summed, the harder (3a draws examples).",
            maps("entropy/{at}/together_blocks/{}", chain("1", "2", "3", "5", "10", "20", "40"), "entropy"),
        ),
        Row(
            "Figure 4, distances",
            "The further ahead, the less is hit: the nearest distance above each further one.",
            maps("blocks/distance/{}", above("1", "2", "3", "4", "5", "6"), "recall", controls="Searches waited for."),
        ),
        Row(
            "Figure 4, request counts",
            "Maps name more of what comes than counts of the request, at every distance.",
            maps("blocks/distance/{}", tuple((d, "request counts") for d in "123456"), "recall"),
        ),
        Row(
            "Figures 8, 9",
            "The more similar the map found, the more of its experts are hit (Pearson).",
            maps(
                "correlation/{}/pearson_blocks",
                tuple((of, least) for of in ("semantic", "trajectory") for least in (0.0, STRONG)),
                "correlation",
                controls=f"Over pairs of iterations; against 0 and against {STRONG:g}, a quarter of the variance.",
            ),
        ),
        Row(
            "Figures 1b, 10, TPOT",
            "Less time per token than four other systems (SE-MoE stands for fetching whole layers).",
            system("tpot_ms"),
            SYSTEMS,
        ),
        Row("Figure 10, TTFT", "Less time to the first token, too.", system("ttft_ms"), SYSTEMS),
        Row("Figure 10, hit rate", "More hits than the systems that cache.", system("hit_rate", RIVALS[1:]), SYSTEMS),
        Row("Figure 11", "Latency of requests that arrive as in a recorded day.", never(ONLINE)),
        Row("Figure 12", "The same at every limit of the memory.", system("tpot_ms"), SYSTEMS),
        Row(
            "Figure 13",
            "On a faster GPU the lead is smaller.",
            never("It compares GPUs, and this asks for two of them."),
        ),
        Row(
            "Figure 14a, trajectory",
            "Search by meaning and layers hits more than by layers alone.",
            hits(("expert_map", "expert_map, trajectory alone")),
            SEARCHED,
        ),
        Row(
            "Figure 14a, selection",
            "As many experts as the similarity asks for hit more than always k.",
            hits(("expert_map", "expert_map, always k")),
            SEARCHED,
        ),
        Row(
            "Figure 14a, hit count",
            "Maps hit more than counts of the request.",
            hits(("expert_map", "request")),
            SEARCHED,
        ),
        Row(
            "Figure 14a, speculation",
            "Maps hit more than asking the next layer's gate.",
            hits(("expert_map", "gate")),
            SEARCHED,
        ),
        Row(
            "Figure 14b",
            "Its eviction hits more than LRU and LFU behind the same maps.",
            Ask(
                "methods",
                "behind/{at}/{}/hit_blocks",
                above("finemoe", "lru", "lfu"),
                "hit_rate",
                learned=True,
                controls="One pool for all layers, without the prefetch guard, replayed.",
            ),
            SYSTEMS,
        ),
        Row(
            "Figure 15",
            "There is a best prefetch distance, 3 for Mixtral: nearer hides too little, further hits too little.",
            Ask(
                "methods",
                "distance/rows/{}/tpot_blocks",
                above("3", "1", "5"),
                "simulated_ms",
                learned=True,
                controls="Behind its own eviction, replayed on searches recorded live.",
            ),
            SYSTEMS,
        ),
        Row(
            "Section 4.4, 75 %",
            "2LJ maps guarantee one that is at least 75 % similar to any new iteration.",
            maps(
                "blocks/bounds/{}",
                (("2LJ", GUARANTEED),),
                "share",
                controls=f"Share of iterations, above {GUARANTEED:.0%}.",
            ),
        ),
        Row(
            "Section 4.4, 98 %",
            "LJ ln(LJ) / 2 maps guarantee one that is at least 98 % similar.",
            maps(
                "blocks/bounds/{}",
                (("LJ ln(LJ) / 2", GUARANTEED),),
                "share",
                controls=f"Share of iterations, above {GUARANTEED:.0%}.",
            ),
        ),
        Row(
            "Figure 16a",
            "The larger the store, the more similar are the maps found (little so above 1000).",
            maps("blocks/capacity/{at}/{}", chain("1000", "300", "100", "30", "10"), "similarity"),
        ),
        Row("Figure 16b", "The lead stays with batches of up to eight.", never(BATCH)),
        Row(
            "Figure 17",
            "Searches run while the model computes and cost a token next to nothing.",
            Ask(
                "overhead",
                "predictors/{at}/shares/{}",
                (("added", FREE), ("stall", FREE)),
                "share_of_token",
                ("expert_map",),
                learned=True,
                controls=f"At most {FREE:.0%} of a token would be next to nothing; the model is small.",
            ),
            ("live_searches",),
        ),
        Row(
            "Figure 18",
            "The largest store they try, 32,000 maps, takes less than 200 MB.",
            Stated(
                PART,
                "By arithmetic: a router output takes 4 bytes in the store, so that 32,000 maps of their largest "
                "one (24 layers of 60 experts) are 184 MB, as they say; the embeddings that are searched are 262 MB "
                "more at a width of 2048.",
            ),
        ),
    ),
)
