"""What speed to expect of a card that nobody has measured: the table of docs/gpu.md. `python -m bench.gpu_model`.

Led by the host, a token takes at least the longest of what the host, the GPU and the link do for it, if all three work
side by side, and at most the host's or the GPU's time and then the link's. As a graph, it takes what the GPU reads, a
fixed time a layer, which one H100 was measured to take, and the missing experts' way over the link: once, or twice
where their copies into slots hold up the next token. In the fast arithmetic a graph has fewer kernels, each of which is
taken to cost as much as those of that graph did; missing experts are read over the link, or computed by the host beside
the residents, whichever takes longer. Of the requested experts, at least the share is resident that has a slot (uniform
routing), and at most what others report of LRU for Qwen3 30B-A3B."""

from typing import NamedTuple

import numpy as np

from core.capacity.forecast import REPORTED
from core.capacity.plan import DEFAULT_CONTEXT

HOST_US = 380  # of Python and launches for each layer: 361 to 402 where the experts' products are left out, on a CPU
GRAPH_US = 103  # of a graph for each layer beyond what it reads: 6.1 ms a token of 48 layers on an H100, which read
# 3.4 GB at 3,000 GB/s (bench/results/accept-20261127-024700.json)
GRAPH_KERNELS = 47  # of a layer of that graph, from a profile in the same file
CODED_KERNELS = 1  # more where dense layers are codes: what attention gives is prepared for a product
HOST_GBPS = 56.0  # of a host that computes experts: 80 % of 70 GB/s, two channels of DDR5-4400: assumed
HOST_WAIT_US = 15  # of a layer that has the host compute: assumed
SPARE = 1.0  # GB of device memory for workspace, graphs and the display
INT4 = 4.5 / 8  # bytes a weight in groups of 64 with scales
INT8 = 1.0
BF16 = 2.0


class Card(NamedTuple):
    """Device memory in GB, and its speed in GB/s as its maker states it; the link's as others measured it."""

    name: str
    memory: float
    memory_gbps: float
    link_gbps: float


class Model(NamedTuple):
    """Parameters of one expert, of everything else that a token reads, and of the embedding, in millions; kB of the KV
    cache for a position; kernels of a layer in the fast arithmetic, its experts included (tests/cuda/test_fast.py)."""

    name: str
    layers: int
    experts: int
    top_k: int
    expert: float
    dense: float
    embedding: float
    kv: float = 0.0
    kernels: int = 9


CARDS = (
    Card("laptop, 8 GB, PCIe 4 x8", 8, 256, 12.5),
    Card("RTX 3060, 12 GB, PCIe 4 x16", 12, 360, 25),
    Card("RTX 4060 Ti, 16 GB, PCIe 4 x8", 16, 288, 12.5),
    Card("RTX 4070, 12 GB, PCIe 4 x16", 12, 504, 25),
    Card("RTX 5070, 12 GB, PCIe 5 x16", 12, 672, 50),  # a link twice as fast as of PCIe 4: assumed
    Card("RTX 4090, 24 GB, PCIe 4 x16", 24, 1008, 25),
)
MODELS = (
    Model("OLMoE 1B-7B", 16, 64, 8, 6.3, 370, 103, 131),
    Model("gpt-oss 20B", 24, 32, 4, 24.9, 1216, 579, 49),
    Model("Qwen3 30B-A3B", 48, 128, 8, 4.72, 1220, 311, 98),
    Model("Qwen3.6 35B-A3B", 40, 256, 8, 3.15, 1935, 508, 20, 15),
    Model("Mixtral 8x7B", 32, 8, 2, 176, 1600, 131, 131),
)
PEERS = (
    "llama.cpp, all experts on the CPU (--cpu-moe), a 35B-A3B model in Q4, RTX 4070 12 GB: 34.6",
    "a fork that caches experts and computes misses on the CPU, Qwen3.6 35B-A3B, RTX 3060 12 GB: 51, with guesses 69",
    "Strata, RTX 5070 12 GB: 53 (IQ3_S) to 93 (Q2_0)",
    "FreeToken, Flash-Next in NVFP4, RTX 4090: 36",
)  # tokens a second as these projects report them; their texts, contexts and hosts differ


Range = tuple[float, float]


class Expected(NamedTuple):
    """Share of the experts in slots, and the least and most of the hit rate and of tokens a second: led by the host, as
    graphs, and in the fast arithmetic as graphs, with the dense layers in int8, and with misses that the host computes
    besides."""

    share: float
    hit: Range
    host: Range
    graph: Range
    fast: Range
    fast_int8: Range
    fast_beside: Range


def expected(card: Card, model: Model) -> Expected | None:
    """With experts in int4 and the rest in bf16; None where a token's experts do not fit with the rest."""
    blob = model.expert * 1e-3 * INT4  # GB, as everything here
    dense = model.dense * 1e-3 * BF16
    share = slots_share(card, model, BF16)
    if share is None:
        return None
    hit = hits(share)
    requested = model.layers * model.top_k
    host_s = model.layers * HOST_US / 1e6
    gpu_s = (dense + requested * blob) / card.memory_gbps
    slow_s, fast_s = (requested * (1 - one) * blob / card.link_gbps for one in hit)
    graph_s = gpu_s + model.layers * GRAPH_US / 1e6
    host = 1 / (max(host_s, gpu_s) + slow_s), 1 / max(host_s, gpu_s, fast_s)
    graph = 1 / (graph_s + 2 * slow_s), 1 / (graph_s + fast_s)
    ways = ((BF16, False), (INT8, False), (INT8, True))
    return Expected(share, hit, host, graph, *(fast(card, model, kept, beside) for kept, beside in ways))


def slots_share(card: Card, model: Model, kept: float) -> float | None:
    """Of the experts, what has a slot, with dense layers of so many bytes a weight; None where a token's do not fit."""
    rest = (model.dense * kept + model.embedding * BF16) * 1e-3 + model.kv * DEFAULT_CONTEXT * 1e-6
    slots = int((card.memory - SPARE - rest) / (model.expert * 1e-3 * INT4))
    return None if slots < model.layers * model.top_k else min(1.0, slots / (model.layers * model.experts))


def hits(share: float) -> Range:
    """Of the requested experts, how many are in slots: uniform routing, and as others report."""
    return share, max(share, float(np.interp(share, REPORTED[:, 0], REPORTED[:, 1])))


def fast(card: Card, model: Model, kept: float, beside: bool) -> Range:
    """Tokens a second as graphs in the fast arithmetic, with dense layers of so many bytes a weight; `beside`: missing
    experts are computed by the host."""
    share = slots_share(card, model, kept)
    assert share is not None
    blob, requested = model.expert * 1e-3 * INT4, model.layers * model.top_k
    kernels = model.kernels + (CODED_KERNELS if kept != BF16 else 0)
    own_s = model.dense * 1e-3 * kept / card.memory_gbps + model.layers * kernels * GRAPH_US / GRAPH_KERNELS / 1e6
    found = []
    for hit in hits(share):
        there_s, missing = requested * hit * blob / card.memory_gbps, requested * (1 - hit) * blob
        if beside and missing:
            found.append(1 / (own_s + max(there_s, missing / HOST_GBPS) + model.layers * HOST_WAIT_US / 1e6))
        else:
            found.append(1 / (own_s + there_s + missing / card.link_gbps))
    return found[0], found[1]


COLUMNS = (
    "Card",
    "Model, experts in int4",
    "In slots",
    "Hit rate",
    "Tokens a second, led by the host",
    "as graphs",
    "`fast`, as graphs",
    "and dense layers in int8",
    "and misses by the host",
)


def table() -> str:
    """As Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for model in MODELS:
        for card in CARDS:
            found = expected(card, model)
            shown = (
                ["does not fit", *["-"] * 6]
                if found is None
                else [
                    f"{100 * found.share:.0f} %",
                    f"{_range(100 * found.hit[0], 100 * found.hit[1])} %",
                    *(_range(*one) for one in found[2:]),
                ]
            )
            lines.append(f"| {card.name} | {model.name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def inputs() -> str:
    """What the table is computed from."""
    lines = [
        f"{card.name}: {card.memory:g} GB at {card.memory_gbps:g} GB/s, link {card.link_gbps:g} GB/s" for card in CARDS
    ]
    lines += [
        f"{model.name}: {model.layers} layers of {model.experts} experts of {model.expert:g} million parameters, top "
        f"{model.top_k}; {model.dense:g} million others, embedding {model.embedding:g}; {model.kv:g} kB a position; "
        f"fast: {model.kernels} kernels a layer"
        for model in MODELS
    ]
    return "\n".join(
        [
            *lines,
            f"bytes a weight: experts {INT4:g}, dense layers {BF16:g} or {INT8:g}; KV of {DEFAULT_CONTEXT} positions; "
            f"{SPARE:g} GB for everything else",
            f"us a layer: {HOST_US} led by the host, {GRAPH_US} as a graph of {GRAPH_KERNELS} kernels",
            f"fast: {CODED_KERNELS} kernel a layer more with dense layers in int8",
            f"a host that computes misses: {HOST_GBPS:g} GB/s, {HOST_WAIT_US} us a layer",
            *[f"reported by others, tokens a second: {one}" for one in PEERS],
            f"share in slots -> hit rate at most: {', '.join(f'{a:g} -> {b:g}' for a, b in REPORTED.tolist())}",
        ]
    )


def _range(least: float, most: float) -> str:
    return f"{least:.0f}" if f"{least:.0f}" == f"{most:.0f}" else f"{least:.0f} to {most:.0f}"


if __name__ == "__main__":
    print(table(), inputs(), sep="\n\n")
