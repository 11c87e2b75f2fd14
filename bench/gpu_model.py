"""What speed to expect of a card that nobody has measured: the table of docs/gpu.md. `python -m bench.gpu_model`.

Led by the host, a token takes at least the longest of what the host, the GPU and the link do for it, if all three work
side by side, and at most the host's or the GPU's time and then the link's. As a graph, it takes what the GPU reads, a
fixed time a layer, which one H100 was measured to take, and the missing experts' way over the link: once, or twice
where their copies into slots hold up the next token. Of the requested experts, at least the share is resident that has
a slot (uniform routing), and at most what others report of LRU for Qwen3 30B-A3B.
"""

from typing import NamedTuple

import numpy as np

from core.capacity.forecast import REPORTED

HOST_US = 380  # of Python and launches for each layer: 361 to 402 where the experts' products are left out, on a CPU
GRAPH_US = (
    103  # of a graph for each layer beyond what it reads: 6.1 ms a token of 48 layers on an H100, which read 3.4 GB
)
# at 3,000 GB/s (bench/results/accept-20261127-024700.json)
SPARE = 1.0  # GB of device memory for KV cache, workspace, graphs and the display
INT4 = 4.5 / 8  # bytes a weight in groups of 64 with scales
BF16 = 2.0


class Card(NamedTuple):
    """Device memory in GB, and its speed in GB/s as its maker states it; the link's as others measured it."""

    name: str
    memory: float
    memory_gbps: float
    link_gbps: float


class Model(NamedTuple):
    """Parameters of one expert, of everything else that a token reads, and of the embedding, in millions."""

    name: str
    layers: int
    experts: int
    top_k: int
    expert: float
    dense: float
    embedding: float


CARDS = (
    Card("laptop, 8 GB, PCIe 4 x8", 8, 256, 12.5),
    Card("RTX 3060, 12 GB, PCIe 4 x16", 12, 360, 25),
    Card("RTX 4070, 12 GB, PCIe 4 x16", 12, 504, 25),
    Card("RTX 4090, 24 GB, PCIe 4 x16", 24, 1008, 25),
)
MODELS = (
    Model("OLMoE 1B-7B", 16, 64, 8, 6.3, 370, 103),
    Model("Qwen3 30B-A3B", 48, 128, 8, 4.72, 1220, 311),
    Model("Mixtral 8x7B", 32, 8, 2, 176, 1600, 131),
)


class Expected(NamedTuple):
    """Share of the experts in slots, and the least and most of the hit rate and of tokens a second: led by the host,
    and as graphs."""

    share: float
    hit: tuple[float, float]
    host: tuple[float, float]
    graph: tuple[float, float]


def expected(card: Card, model: Model) -> Expected | None:
    """With experts in int4 and the rest in bf16; None where a token's experts do not fit with the rest."""
    blob = model.expert * 1e-3 * INT4  # GB, as everything here
    dense = model.dense * 1e-3 * BF16
    slots = int((card.memory - SPARE - dense - model.embedding * 1e-3 * BF16) / blob)
    if slots < model.layers * model.top_k:
        return None
    share = min(1.0, slots / (model.layers * model.experts))
    hit = share, max(share, float(np.interp(share, REPORTED[:, 0], REPORTED[:, 1])))
    requested = model.layers * model.top_k
    host_s = model.layers * HOST_US / 1e6
    gpu_s = (dense + requested * blob) / card.memory_gbps
    slow_s, fast_s = (requested * (1 - one) * blob / card.link_gbps for one in hit)
    graph_s = gpu_s + model.layers * GRAPH_US / 1e6
    host = 1 / (max(host_s, gpu_s) + slow_s), 1 / max(host_s, gpu_s, fast_s)
    return Expected(share, hit, host, (1 / (graph_s + 2 * slow_s), 1 / (graph_s + fast_s)))


def table() -> str:
    """As Markdown."""
    lines = [
        "| Card | Model, experts in int4 | In slots | Hit rate | Tokens a second, led by the host | as graphs |",
        "|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for card in CARDS:
            found = expected(card, model)
            shown = (
                "does not fit | - | - | -"
                if found is None
                else f"{100 * found.share:.0f} % | {_range(100 * found.hit[0], 100 * found.hit[1])} % | "
                f"{_range(*found.host)} | {_range(*found.graph)}"
            )
            lines.append(f"| {card.name} | {model.name} | {shown} |")
    return "\n".join(lines)


def _range(least: float, most: float) -> str:
    return f"{least:.0f}" if f"{least:.0f}" == f"{most:.0f}" else f"{least:.0f} to {most:.0f}"


if __name__ == "__main__":
    print(table())
