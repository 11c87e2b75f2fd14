"""Systems of the literature as presets, and ours."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from core.errors import SettingError
from core.settings.param import Value
from core.settings.preset import Kind, Preset
from core.system.command import COMMAND

SPECULATIVE: Mapping[str, Value] = {"predictor": "gate", "predictor.gate.last_state": True, "predictor.width": 256}
"""MoEpic's prefetching: every expert of the next layer, in the order of what its router says one layer early."""
FIRST = "auto"  # what a new user of the dashboard gets, and the head of every menu

PAPER_ESTIMATOR: Mapping[str, Value] = {"estimator_input": "quasi", "estimator_width": 0, "estimator_tokens": 4_000_000}
"""Speculating Experts section 6.2: trained on quasi-hidden states, on 4 million tokens for Qwen3-30B-A3B."""


def _published(
    name: str,
    title: str,
    line: str,
    about: str,
    source: str,
    settings: Mapping[str, Value],
    calibration: Mapping[str, Value] | None = None,
    kind: Kind = "published",
) -> Preset:
    """A system of the literature. A prefetch evicts whatever the cache policy says: no paper has a guard against it."""
    return Preset(name, title, line, about, source, {"prefetch_guard": False, **settings}, calibration or {}, kind=kind)


_control = partial(_published, kind="control")
"""What a system is compared with: a baseline, or the system without one of its parts."""


def guarded(one: Preset) -> Preset:
    """The same system, whose prefetches evict only what is less likely to be needed."""
    settings = {**one.settings, "prefetch_guard": True}
    return replace(one, name=f"{one.name}_guarded", title=f"{one.title}, guarded", settings=settings)


PRESETS: tuple[Preset, ...] = (
    _control(
        "on_demand",
        "On-demand",
        "Fetches every expert each time; keeps none",
        "Every expert is fetched each time it is needed, and nothing is kept. What all others have to beat.",
        "the baseline of all five papers",
        {"eviction": "none"},
    ),
    _published(
        "mixtral_offloading",
        "Mixtral-offloading",
        "An LRU cache per layer; the next layer's router is asked early",
        "A cache in every layer that evicts what is unused for longest, "
        "and the next layer's own router asked one layer early.",
        "Eliseev and Mazur 2023",
        {"eviction": "lru", "predictor": "gate"},
    ),
    _published(
        "adapmoe",
        "AdapMoE",
        "The same, with slots moved to the layers that gain most",
        "Mixtral-offloading with slots moved to the layers that gain most from them, by "
        "dynamic programming; layer 0's router is given the previous token's state in the last layer. The paper also "
        "skips experts of some tokens, which changes answers; here none is skipped.",
        "Zhong et al. 2024; layer 0 as in MoEpic section 3.2, which follows it",
        {"eviction": "lru", "predictor": "gate", "predictor.gate.last_state": True, "layer_slots": "adapmoe"},
    ),
    _published(
        "moe_infinity",
        "MoE-Infinity",
        "Keeps and prefetches what this chat uses most",
        "One cache for all layers that evicts what is used least, and prefetches "
        "what this prompt and its answer have used most. The paper also "
        "prefetches by what similar earlier requests used; here only the present request counts.",
        "Xue et al. 2024",
        {"eviction": "lfu", "scope": "global", "predictor": "request"},
    ),
    _published(
        "pre_gated",
        "Pre-gated MoE",
        "Fetches the next layer's experts early; keeps none",
        "The next layer's experts are fetched while this one is computed, and none is "
        "kept. The paper trains gates for this; here the model's own are asked one layer early.",
        "Hwang et al. 2023",
        {"eviction": "none", "predictor": "gate"},
    ),
    _published(
        "se_moe",
        "SE-MoE",
        "Fetches all experts of the next layer; keeps none",
        "All experts of the next layer are fetched, and none is kept.",
        "Shen et al. 2022",
        {"eviction": "none", "predictor": "all_next"},
    ),
    _published(
        "promoe",
        "ProMoE",
        "Fetches experts four layers ahead",
        "Experts are fetched a stride of four layers ahead. The paper trains a network for each "
        "layer; here the model's own routers are asked early.",
        "Song et al. 2024",
        {"eviction": "lru", "predictor": "stride"},
    ),
    _published(
        "buddymoe",
        "BuddyMoE",
        "Computes a similar expert in place of a missing one",
        "The experts used most stay, the next layer's are fetched while this one is "
        "computed, and in the place of one that is missing all the same a buddy is computed that is often active "
        "with it: for at most three experts of a token, for none whose routing is peaked, and not where nearly all of "
        "a layer's experts are missing. Changes answers.",
        "BuddyMoE sections 3 and 4, and table 2; its beta has no value there",
        {
            "eviction": "lfu",
            "predictor": "gate",
            "miss": "substitute",
            "substitute": "buddy",
            "rho": 3,
            "gate": "percentile",
            "batch_gate": "fixed",
            "beta": 0.9,
            "protect_super": False,
        },
    ),
    _published(
        "moepic",
        "MoEpic",
        "Keeps what is used often and lately; fetches a layer ahead",
        "Its LCP cache and its speculative prefetch. The paper also splits every expert in two and divides "
        "the cache among layers by measured times; here experts are whole and all layers have as many slots.",
        "MoEpic section 3",
        {"eviction": "lcp", "predictor": "gate", "predictor.gate.last_state": True},
    ),
    _published(
        "moepic_split",
        "MoEpic, split",
        "Keeps a part of each expert and fetches the rest in time",
        "The whole system: of every cached expert a part stays, as large as its configurator found best for the layer, "
        "the experts predicted for the next layer are fetched into a buffer until its routing is known, and what is "
        "resident is computed meanwhile.",
        "MoEpic section 3",
        {**SPECULATIVE, "eviction": "lcp", "split": "moepic", "layer_slots": "moepic"},
    ),
    _control(
        "moepic_half",
        "MoEpic, halves",
        "MoEpic that keeps half of every cached expert",
        "The same without its configurator: all layers have as many slots, and half of every cached expert stays.",
        "MoEpic section 4.3, uniform division",
        {**SPECULATIVE, "eviction": "lcp", "split": "uniform"},
    ),
    _control(
        "moepic_random_prefetch",
        "MoEpic, random prefetch",
        "MoEpic that fetches random experts ahead",
        "The same as MoEpic, split, with random experts fetched in place of the predicted ones.",
        "MoEpic section 4.3, without speculation",
        {"predictor": "random", "eviction": "lcp", "split": "moepic", "layer_slots": "moepic"},
    ),
    _control(
        "moepic_random_eviction",
        "MoEpic, random eviction",
        "MoEpic that evicts random experts",
        "The same as MoEpic, split, with a random expert evicted in place of the one of the lowest priority.",
        "MoEpic section 4.3, without LCP",
        {**SPECULATIVE, "eviction": "random", "split": "moepic", "layer_slots": "moepic"},
    ),
    _control(
        "moepic_none_kept",
        "MoEpic, nothing kept",
        "MoEpic that keeps no expert",
        "No expert stays: all there is of the budget beside the buffer is left unused.",
        "MoEpic section 4.3, theta = 0",
        {**SPECULATIVE, "eviction": "lcp", "split": "uniform", "split.uniform.theta": 0.0},
    ),
    _published(
        "finemoe",
        "FineMoE",
        "Searches maps of earlier tokens for what comes next",
        "Maps of what the routers said for earlier tokens are searched for what comes next, "
        "and one cache for all layers evicts what is seldom used and unlikely now, for whatever is prefetched.",
        "FineMoE section 4",
        {"eviction": "finemoe", "scope": "global", "predictor": "expert_map"},
    ),
    _published(
        "expertflow",
        "ExpertFlow",
        "A trained network predicts all layers before each token",
        "A trained network tells the experts of all layers before a pass begins, and "
        "one cache for all layers keeps what is ahead, in the place of what is passed. The paper also "
        f"regroups the tokens of a batch by the experts they need: {COMMAND} batch --scheduler similarity.",
        "ExpertFlow section 3",
        {"eviction": "plec", "scope": "global", "predictor": "routing_path"},
    ),
    _published(
        "speculating",
        "Speculating Experts",
        "Default vectors predict the next layer; keeps none",
        "The next layer's experts, told by default vectors, are fetched while this one is computed, and none is kept.",
        "Speculating Experts section 3",
        {"eviction": "none", "predictor": "default_vectors"},
    ),
    _published(
        "speculating_execute",
        "Speculating Experts, executed",
        "The same, and what was predicted is computed",
        "The same, and what was predicted is computed, "
        "right or wrong, so that nothing is fetched twice. Changes answers.",
        "Speculating Experts section 4",
        {"eviction": "none", "predictor": "default_vectors", "execute": "always"},
    ),
    _published(
        "speculating_estimator",
        "Speculating Experts, estimator",
        "A small network predicts, and that is computed",
        "A small network predicts the next layer's experts from the state that default vectors make, and what it "
        "predicts is computed, right or wrong. Changes answers.",
        "Speculating Experts section 6.3, Est-PF",
        {"eviction": "none", "predictor": "estimator", "execute": "always"},
        PAPER_ESTIMATOR,
    ),
    _published(
        "speculating_hybrid",
        "Speculating Experts, hybrid",
        "The same, only in layers that routers predict badly",
        "The same, with the network only in the layers whose routers predict badly on that state. Changes answers.",
        "Speculating Experts section 6.3, Hybrid-PF",
        {"eviction": "none", "predictor": "hybrid", "execute": "always"},
        PAPER_ESTIMATOR,
    ),
    _published(
        "llama_cpp_cache",
        "llama.cpp's expert cache",
        "One cache for all layers; keeps what is used often and lately",
        "One cache for all layers that evicts what is unused for longest, where time counts less for what was often "
        "used; nothing is prefetched. As described in its source. It can also compute a share of the misses on the "
        "processor, which the user chooses; here all wait for their copies.",
        "llama.cpp, comments of src/llama-moe-cache.cpp and .h (September 2026)",
        {"eviction": "class_lru", "scope": "global"},
    ),
    _published(
        "freetoken",
        "FreeToken",
        "One LRU cache; link and processor share the misses",
        "One cache for all layers that evicts what is unused for longest; misses are divided between link and "
        "processor by what each takes, and nothing is prefetched. As described in its README. There the processor's "
        "share follows from bandwidths measured once and enters no slot; here from what layers have taken, and it may.",
        "FreeToken, README (global LRU expert caching, bandwidth-adaptive co-execution) and issue 174",
        {"eviction": "lru", "scope": "global", "miss_placement": "measured"},
    ),
    Preset(
        "auto",
        "Auto",
        "Recommended: chooses memory, cache policy and prefetching itself",
        "Recommended, and needs no profile: in the dashboard the most memory that is safe; keeps often-used experts, "
        "by the cache policy that surely hits most on your own answers; computes missing ones where they lie, preloads "
        "likely ones, and verifies several guessed tokens at once, each where that is measured to save time.",
        "ours",
        {
            "eviction": "lfru",
            "predictor": "gate",
            "prefetch_deadline": True,
            "prefetch_auto": True,
            "drafts": "auto",
            "miss_placement": "auto",
        },
    ),
    Preset(
        "many",
        "Many answers",
        "For batches: what is used most stays",
        "Passes of batches need most experts of every layer: what is used most stays, and what the next layer's gate "
        "is sure of is fetched into slots beside the cache, so that none is evicted for it.",
        "ours",
        {"eviction": "lfu", "bypass": True, "predictor": "gate", "predictor.floor": 0.8, "prefetch_beside": True},
    ),
)


def preset(name: str) -> Preset:
    """Looks one up. Raises SettingError that lists them."""
    for one in PRESETS:
        if one.name == name:
            return one
    raise SettingError(f"There is no preset called {name!r}. Choose one of: {', '.join(p.name for p in PRESETS)}.")


def matching(settings: Mapping[str, Value]) -> Preset | None:
    """The preset whose values these settings have, or None for any other combination."""
    return next((one for one in PRESETS if all(settings[n] == v for n, v in one.values.items())), None)
