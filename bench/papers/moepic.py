"""MoEpic: what it proposes, where it is here, and its tables and figures."""

from bench.papers.parts import DRAWING, Ask, Pair, Paper, Part, Row, above, chain, never
from core.system.command import COMMAND

RIVALS = ("pre_gated", "mixtral_offloading", "adapmoe", "moe_infinity")
WHOLE = "moepic_split"  # the system of the paper; the preset moepic has its cache and its prefetch alone
LITTLE = 8 / 132  # of a token's time: the paper's 8 ms (section 4.5) at a TPOT of 132 ms (table 3)
HIGH = 0.5
BUDGETS = ("25%", "50%", "75%")
SYSTEMS = ("lcp", "layer0", "residents", "tops", "guard")
LACKS = (
    "Prefetches are submitted as far as they can start in time, by the times measured so far, instead of one by one; a "
    "block is the smallest part; plans are made by a command, or while idle where that is switched on."
)


def system(name: str, figure: str = "tpot_ms", controls: str = "") -> Ask:
    """A system of bench systems against the paper's four, at every budget."""
    return Ask(
        "systems",
        f"systems/{{}}/{{at}}/{figure.removesuffix('_ms')}_rounds_ms",
        above(name, *RIVALS),
        figure,
        controls=controls,
    )


def hits(pairs: tuple[Pair, ...]) -> Ask:
    """Policies without prefetching, each layer with its even share of the slots."""
    return Ask("methods", "hit_blocks/layer/{at}/{}", pairs, "hit_rate", learned=True)


def split(pairs: tuple[Pair, ...], controls: str = "") -> Ask:
    """Configurations of bench split over each link."""
    return Ask("split", "links/{at}/rows/{}/tpot_rounds_ms", pairs, "tpot_ms", controls=controls, budget="20%")


PAPER = Paper(
    "moepic",
    "MoEpic",
    "Split every expert in a top and a bottom: keep tops by a priority of frequency and age (LCP), prefetch bottoms "
    "in the order that the next layer's router gives to this layer's state, and divide the memory among layers by "
    "measured times.",
    (
        Part(
            "LCP, which evicts the lowest priority", "core/policy/eviction/lcp.py", ("eviction=lcp", "eviction.lcp.rho")
        ),
        Part(
            "The speculative prefetch", "core/policy/predict/gate.py", ("predictor=gate", "predictor.gate.last_state")
        ),
        Part("Slots moved among layers (AdapMoE's way)", "core/policy/allocation/weights.py", ("layer_slots=adapmoe",)),
        Part("Experts in blocks, tops and the buffer", "core/cache/core.py", ("split=uniform", "buffer")),
        Part("Its configurator", "core/policy/allocation/configurator.py", ("split=moepic", "layer_slots=moepic")),
    ),
    ("moepic", "moepic_split"),
    LACKS,
    "about 1.2 for Qwen1.5-MoE (by its 57 ms a token resident, 24 layers, 4 experts of 17 MB over PCIe 4)",
    (
        Row("Figures 1, 3, 5", "How a MoE model infers, schedules of two layers, the system.", DRAWING),
        Row(
            "Figure 2a",
            "The more experts are cached, the more hits.",
            Ask(
                "methods",
                "hit_blocks/layer/{}/{at}",
                chain("75.0%", "50.0%", "37.5%", "25.0%", "12.5%"),
                "hit_rate",
                ("lru",),
                learned=True,
            ),
        ),
        Row(
            "Figure 2b",
            "The higher the hit rate, the less time a token takes: of each system, over its budgets.",
            Ask(
                "systems",
                "systems/{at}/{}/tpot_rounds_ms",
                chain("75%", "50%", "25%"),
                "tpot_ms",
                ("mixtral_offloading", "adapmoe", "moe_infinity", "promoe", "moepic", WHOLE, "finemoe", "expertflow"),
                controls="Systems that keep experts; the hits of each grow with its budget.",
            ),
            ("residents",),
        ),
        Row(
            "Figure 2c",
            "The next layer's router predicts well in most layers.",
            Ask(
                "predictors",
                "predictors/{}/blocks/{at}",
                (("gate", HIGH),),
                "recall",
                ("layer 1", "layer 2", "layer 3", "layer 4", "layer 5"),
                learned=True,
                controls=f"Well: recall@k above {HIGH:.0%}.",
            ),
        ),
        Row(
            "Figure 2d",
            "Loading an expert takes longer than computing a layer, on several GPUs.",
            never(f"It compares GPUs. Of one machine, {COMMAND} calibrate measures both times."),
        ),
        Row(
            "Figure 4a",
            "Layers differ in latency, so that they need different shares of the memory.",
            never("Time is not measured by layer; bench methods prints the hit rates of layers with as many slots."),
        ),
        Row(
            "Figure 4b",
            "A split of .4 is faster than whole experts and than none kept.",
            split(
                (*above("theta 0.50", "theta 1.00", "theta 0.00"), *above("theta 0.33", "theta 1.00", "theta 0.00")),
                "The part nearest to .4 that whole blocks have, .50 of four and .33 of three; 20% of the experts.",
            ),
            ("lcp",),
        ),
        Row(
            "Figure 6",
            "The states before the routers of neighbouring layers are alike.",
            Ask(
                "lossy",
                "speculating/cosine_blocks/{}",
                (("before", HIGH),),
                "cosine",
                learned=True,
                controls="Mean over the layers; high from .5 on.",
                options="--questions 48 --tokens 256",
            ),
        ),
        Row("Table 1, LRU", "LCP hits more than LRU.", hits((("lcp", "lru"),)), ("lcp",)),
        Row("Table 1, LFU", "LCP hits more than LFU.", hits((("lcp", "lfu"),)), ("lcp",)),
        Row("Table 1, random", "LCP hits more than random eviction.", hits((("lcp", "random"),)), ("lcp",)),
        Row("Table 2", "The models.", never("A description of their models: nothing was measured.")),
        Row("Figure 7, TPOT", "Less time per token than four other systems, at every budget.", system(WHOLE), SYSTEMS),
        Row("Figure 7, TTFT", "Less time to the first token, too.", system(WHOLE, "ttft_ms"), SYSTEMS),
        Row(
            "Figure 7, whole experts",
            "Its cache and its prefetch alone, without the split (not in the paper), against the same four.",
            system("moepic"),
            SYSTEMS,
        ),
        Row(
            "Figure 7, what splitting gains",
            "The whole system is faster than its cache and prefetch alone.",
            Ask("systems", "systems/{}/{at}/tpot_rounds_ms", ((WHOLE, "moepic"),), "tpot_ms"),
            SYSTEMS,
        ),
        Row(
            "Figure 8",
            "The least memory for a given time per token.",
            system(
                WHOLE,
                controls="Read off figure 7: time falls with memory, so what is faster at every budget needs the least "
                "memory for every time.",
            ),
            SYSTEMS,
        ),
        Row(
            "Table 3, without its prefetch",
            "Prefetching random experts instead is slower.",
            split(((WHOLE, "moepic_random_prefetch"),)),
            SYSTEMS,
        ),
        Row(
            "Table 3, without LCP",
            "Random eviction instead is slower.",
            split(((WHOLE, "moepic_random_eviction"),)),
            SYSTEMS,
        ),
        Row(
            "Table 3, without its configurator",
            "Half of every expert kept, the same everywhere, is slower.",
            split(above(WHOLE, "theta 0.50", "theta 0.67"), "Of three blocks, .67 is nearest to a half from above."),
            SYSTEMS,
        ),
        Row(
            "Figure 9a",
            "rho and omega of LCP matter little.",
            Ask(
                "methods",
                "lcp_shares/{at}/{}",
                tuple(
                    (f"rho {rho:g} omega {omega}", LITTLE)
                    for rho, omega in ((0.1, 128), (0.5, 128), (0.25, 64), (0.25, 256))
                ),
                "change",
                learned=True,
                controls=f"How far a token's simulated time is from the default, against {LITTLE:.1%}, the paper's 8 "
                "of 132 ms; its five settings are in its picture alone, these are ours around its default.",
            ),
            ("lcp",),
        ),
        Row(
            "Figure 9b",
            "A coarser zeta of the configurator is slower.",
            never(
                "bench split has what the latency model expects of each zeta, not a time: a model's number "
                "has no noise to compare it with."
            ),
        ),
    ),
)
