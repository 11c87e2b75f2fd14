"""MoEpic: what it proposes, where it is here, and its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from bench.papers.over_budgets import hits_save_time, least_memory
from bench.papers.parts import HOLDS, NO, PART, Paper, Part, Row
from bench.papers.sources import DRAWING, Claims, Reading, Systems, SystemsReading, never, of
from core.system.command import COMMAND

RIVALS = ("pre_gated", "mixtral_offloading", "adapmoe", "moe_infinity")
DIFFER = 0.0555  # in hit rate, of layers with as many slots: what the paper found, with LFU
LITTLE = 8 / 132  # of a token's time: the paper's 8 ms (section 4.5) at a TPOT of 132 ms (table 3)
LACKS = (
    "Prefetches are submitted as far as they can start in time, by the times measured so far, instead of one by one; a "
    "block is the smallest part; plans are made by a command, not while the engine is idle."
)


def hits_grow(result: Mapping[str, Any]) -> tuple[str, str]:
    """LRU's hit rate over slots."""
    rates = {share: row["lru"] for share, row in result["hit_rate"]["layer"].items()}
    values = list(rates.values())
    grows = all(a < b for a, b in pairwise(values))
    text = ", ".join(f"{share} of the experts {rate:.1%}" for share, rate in rates.items())
    return HOLDS if grows else NO, f"LRU's hit rate: {text}."


def gate_by_layer(result: Mapping[str, Any]) -> tuple[str, str]:
    """Recall of the next layer's gate, by layer; the first layer has none before it."""
    recalls = result["predictors"]["gate"]["recall_by_layer"][1:]
    good = sum(rate >= 0.5 for rate in recalls)
    verdict = HOLDS if good == len(recalls) else PART if good else NO
    return verdict, "Recall@k by layer: " + ", ".join(f"{rate:.0%}" for rate in recalls) + "; high from 50 % on."


def similar(result: Mapping[str, Any]) -> tuple[str, str]:
    """Cosine of a layer's router input with the layer's before."""
    cosines = result["speculating"]["cosine"]["before"]
    good = sum(one is not None and one >= 0.5 for one in cosines)
    verdict = HOLDS if good == len(cosines) else PART if good else NO
    values = ", ".join("-" if one is None else f"{one:.2f}" for one in cosines)
    return verdict, f"Cosine with the layer before, by layer: {values}; high from .5 on."


def guessing(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """The gate's prefetching against random prefetching, with LRU."""
    rows = result["prefetchers"]
    if any("random" not in row for row in rows.values()):
        return None
    pairs = {share: (row["gate"]["tpot_ms"], row["random"]["tpot_ms"]) for share, row in rows.items()}
    holds = [a < b for a, b in pairs.values()]
    text = ", ".join(f"{share} {a:.2f} / {b:.2f} ms" for share, (a, b) in pairs.items())
    verdict = of(holds)
    return verdict, f"Simulated time per token, next gate / random experts, behind LRU: {text}."


def layers_differ(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """The spread of LFU's hit rate over layers that have as many slots each."""
    if not (sizes := result.get("hit_rate_by_layer")):
        return None
    rates = {share: row["lfu"] for share, row in sizes.items()}
    differs = [max(row) - min(row) >= DIFFER for row in rates.values()]
    text = "; ".join(
        f"{share} of the experts {', '.join(f'{rate:.1%}' for rate in row)} (spread {100 * (max(row) - min(row)):.2f})"
        for share, row in rates.items()
    )
    error = 50 / (result["tokens"] * result["top_k"]) ** 0.5
    verdict = of(differs)
    return verdict, (
        f"LFU's hit rate by layer, every layer with as many slots: {text}. Called different from a spread of "
        f"{100 * DIFFER:.2f} points on, as in the paper; standard error of a rate up to {error:.1f} points. Time is "
        "not measured by layer."
    )


def matters_little(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """The spread of LCP's simulated time per token over rho and omega."""
    if not (sizes := result.get("lcp_settings")):
        return None
    spreads = {}
    for share, rows in sizes.items():
        times = [row["tpot_ms"] for row in rows]
        default = next(row["tpot_ms"] for row in rows if row["default"])
        spreads[share] = (max(times) - min(times)) / default
    little = [spread <= LITTLE for spread in spreads.values()]
    text = "; ".join(
        f"{share} of the experts "
        + ", ".join(
            f"rho {row['rho']:g} omega {row['omega']} {row['hit_rate']:.1%} {row['tpot_ms']:.2f} ms" for row in rows
        )
        + f" (spread {spreads[share]:.1%} of the default's time)"
        for share, rows in sizes.items()
    )
    verdict = of(little)
    return verdict, (
        f"Hit rate and simulated time per token without prefetching: {text}. Little is up to {LITTLE:.1%}, the paper's "
        "8 of 132 ms; its five settings are in its picture alone, these are ours around its default."
    )


SPLIT_BUDGET = "20%"  # of the experts, in the paper's figures of splitting


def parts(result: Mapping[str, Any]) -> dict[str, dict[float, float]]:
    """Of a result of bench split: link -> time per token by the part of every expert that stays."""
    return {
        name: {
            float(row.removeprefix("theta ")): values["tpot_ms"]
            for row, values in link["rows"].items()
            if row.startswith("theta") and "tpot_ms" in values
        }
        for name, link in result["links"].items()
    }


def inner_optimum(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Whether a part between none and all is the quickest, over each link."""
    if result["budget"] != SPLIT_BUDGET:
        return None
    inner, texts = [], []
    for link, times in parts(result).items():
        best = min(times, key=times.__getitem__)
        inner.append(0 < best < 1)
        texts.append(f"{link} " + ", ".join(f"{part:.2f} {ms:.1f} ms" for part, ms in times.items()))
    verdict = of(inner)
    whole = ", ".join(f"{name} {link['rows'][link['best_plain']]['tpot_ms']:.1f}" for name, link in _links(result))
    return verdict, (
        f"Time per token by the part that stays, {result['budget']} of the experts, in blocks: {'; '.join(texts)}. The "
        f"best cache of whole experts, not in blocks: {whole} ms."
    )


def without_configurator(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """MoEpic's plan against the part nearest to a half, the same in every layer."""
    if result["budget"] != SPLIT_BUDGET:
        return None
    holds, texts = [], []
    for link, times in parts(result).items():
        part = min(times, key=lambda one: abs(one - 0.5))
        full = result["links"][link]["rows"]["moepic_split"].get("tpot_ms")
        if full is None:
            return None
        holds.append(full < times[part])
        texts.append(f"{link} {full:.1f} / {times[part]:.1f} ms (part {part:.2f})")
    verdict = of(holds)
    return verdict, f"Time per token, the plan / the same part everywhere: {'; '.join(texts)}."


def coarser(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Predicted times of plans by zeta."""
    if result["budget"] != SPLIT_BUDGET or not all("zeta" in link for _, link in _links(result)):
        return None
    holds, texts = [], []
    for name, link in _links(result):
        times = list(link["zeta"].values())
        holds.append(all(a <= b for a, b in pairwise(times)) and times[0] < times[-1])
        texts.append(f"{name} " + ", ".join(f"{zeta} {ms:.2f} ms" for zeta, ms in link["zeta"].items()))
    verdict = of(holds)
    return verdict, f"By the latency model, not measured: {'; '.join(texts)}."


def _links(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return list(result["links"].items())


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
    (
        Row("Figures 1, 3, 5", "How a MoE model infers, schedules of two layers, the system.", DRAWING),
        Row("Figure 2a", "The more experts are cached, the more hits.", Reading("methods", hits_grow)),
        Row(
            "Figure 2b",
            "The higher the hit rate, the less time a token takes.",
            SystemsReading(hits_save_time),
            ("residents",),
        ),
        Row("Figure 2c", "The next layer's router predicts well in most layers.", Reading("predictors", gate_by_layer)),
        Row(
            "Figure 2d",
            "Loading an expert takes longer than computing a layer, on several GPUs.",
            never(f"It compares GPUs. Of one machine, {COMMAND} calibrate measures both times."),
        ),
        Row(
            "Figure 4a",
            "Layers differ in latency, one reason being hit rates, so that they need different shares of the memory.",
            Reading("methods", layers_differ),
        ),
        Row(
            "Figure 4b",
            "A split of .4 is faster than whole experts and than none kept.",
            Reading("split", inner_optimum),
        ),
        Row("Figure 6", "The states before the routers of neighbouring layers are alike.", Reading("lossy", similar)),
        Row(
            "Table 1, LRU",
            "LCP hits more than LRU.",
            Claims("methods", "MoEpic table 1: LCP hits more than LRU", ("LCP", "LRU")),
            ("lcp",),
        ),
        Row(
            "Table 1, LFU",
            "LCP hits more than LFU.",
            Claims("methods", "MoEpic table 1: LCP hits more than LFU", ("LCP", "LFU")),
            ("lcp",),
        ),
        Row(
            "Table 1, random",
            "LCP hits more than random eviction.",
            Claims("methods", "MoEpic ablation: LCP hits more than random", ("LCP", "random")),
            ("lcp",),
        ),
        Row("Table 2", "The models.", never("A description of their models: nothing was measured.")),
        Row(
            "Figure 7, TPOT",
            "Less time per token than four other systems, at every budget.",
            Systems("moepic", RIVALS),
            ("lcp", "layer0", "residents"),
        ),
        Row(
            "Figure 7, TTFT",
            "Less time to the first token, too.",
            Systems("moepic", RIVALS, "ttft_ms"),
            ("lcp", "layer0", "residents"),
        ),
        Row(
            "Figure 8",
            "The least memory for a given time per token.",
            SystemsReading(lambda result: least_memory(result, "moepic", RIVALS)),
            ("lcp", "layer0", "residents"),
        ),
        Row(
            "Table 3, without its prefetch",
            "Prefetching random experts instead is slower.",
            Reading("methods", guessing),
            ("layer0", "residents"),
        ),
        Row(
            "Table 3, without LCP",
            "Random eviction instead hits less, and is slower for it.",
            Claims("methods", "MoEpic ablation: LCP hits more than random", ("LCP", "random")),
            ("lcp",),
        ),
        Row(
            "Table 3, without its configurator",
            "Half of every expert kept, the same everywhere, is slower.",
            Reading("split", without_configurator),
        ),
        Row("Figure 9a", "rho and omega of LCP matter little.", Reading("methods", matters_little), ("lcp",)),
        Row("Figure 9b", "A coarser zeta of the configurator is slower.", Reading("split", coarser)),
    ),
)
