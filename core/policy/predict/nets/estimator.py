"""A network that predicts the next layer's routing from this layer's states (Speculating Experts, appendix A).

Linear to a small width, plus a learned embedding of the layer, two linear layers with a SiLU between them and a
residual around them, LayerNorm, and a head as wide as there are experts. One network serves all layers."""

import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from core.policy.predict.nets.training import Progress, descend, packed, seeded, unpacked

NAME = "estimator"
STEPS = 20_000  # minibatches to train on, as far as the least and most epochs allow
MOST_EPOCHS = 20


class Batch(NamedTuple):
    """n training examples, on the CPU."""

    layer: torch.Tensor  # [n] integers: the layer whose routing is to be predicted, >= 1
    inputs: torch.Tensor  # [n, H] the state of the layer before
    probs: torch.Tensor  # [n, E] the layer's router distribution


class Examples(Protocol):
    """Training examples, wherever they are kept."""

    @property
    def count(self) -> int:
        """Number of examples."""

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Every example once, in a new order, float32; only the last minibatch has fewer than `size`."""


class Estimator(nn.Module):
    """Router logits of layer l + 1 from a state of layer l: the quasi-hidden state q_{l+1} if `quasi`, as in the paper,
    else the router's input h_l, which needs no default vectors. Profiles of before have the latter."""

    def __init__(self, layers: int, experts: int, hidden: int, width: int, quasi: int = 0) -> None:
        super().__init__()
        self.config = {"layers": layers, "experts": experts, "hidden": hidden, "width": width, "quasi": int(quasi)}
        self.quasi = bool(quasi)
        self.reduce = nn.Linear(hidden, width)
        self.place = nn.Embedding(layers, width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, experts)

    def forward(self, states: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        """[T, E] logits of `layer` [T] or [] int64, in the net's dtype, from the layer before's states [T, H]."""
        x = self.reduce(states.to(self.reduce.weight.dtype)) + self.place(layer)
        x = x + self.outer(functional.silu(self.inner(x)))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def probabilities(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """[T, E] fp32 on the states' device: the router distribution of `layer` (>= 1), from states [T, H]."""
        place = torch.tensor(layer) if states.device.type == "cpu" else torch.full((), layer, device=states.device)
        return self(states, place).float().softmax(-1)  # type: ignore[no-any-return]


def train(
    examples: Examples,
    *,
    layers: int,
    experts: int,
    hidden: int,
    width: int = 256,
    quasi: bool = False,
    epochs: int = 0,
    batch: int = 256,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
) -> Estimator | None:
    """Train on `examples`, whose inputs are of the kind that `quasi` says. Loss: KL of the true distribution from the
    predicted one. `epochs` = 0: as many as make STEPS steps, between 1 and MOST_EPOCHS.

    Deterministic for the same data and seed. None when cancelled. Raises ValueError when there are no examples."""
    if not examples.count:
        raise ValueError("there are no states to learn from")
    each = -(-examples.count // batch)
    epochs = epochs or max(1, min(MOST_EPOCHS, round(STEPS / each)))
    with seeded(seed) as generator:
        net = Estimator(layers, experts, hidden, width, int(quasi))
        stream = chain.from_iterable(examples.batches(batch, generator) for _ in range(epochs))

        def loss_of(step: int) -> torch.Tensor:
            layer, inputs, probs = next(stream)
            return functional.kl_div(net(inputs, layer).log_softmax(-1), probs, reduction="batchmean")

        done = descend(
            net, epochs * each, loss_of, "Training the estimator", rate=rate, progress=progress, cancel=cancel
        )
    return None if done is None else net


@torch.no_grad()
def recall(net: Estimator, examples: Examples, top_k: int) -> torch.Tensor:
    """[L] share of each layer's true top-k experts that are among the net's k likeliest; NaN where there are no
    examples, as in layer 0, which has no layer before."""
    hits, tokens = torch.zeros(net.config["layers"]), torch.zeros(net.config["layers"])
    for layer, inputs, probs in examples.batches(4096, torch.Generator().manual_seed(0)):
        estimated, true = net(inputs, layer).topk(top_k).indices, probs.topk(top_k).indices
        hits.index_add_(0, layer, (estimated[:, :, None] == true[:, None, :]).any(1).float().mean(1))
        tokens.index_add_(0, layer, torch.ones(len(layer)))
    return hits / tokens


def to_tensors(net: Estimator) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """(weights by "estimator...." names, {"estimator": configuration}), as stored in a profile."""
    return packed(NAME, net), {NAME: dict(net.config)}


def from_tensors(tensors: Mapping[str, torch.Tensor], settings: Mapping[str, object]) -> Estimator:
    """The net from a profile's `nets` and `settings`. Raises KeyError or RuntimeError when they are incomplete."""
    config = settings[NAME]
    assert isinstance(config, Mapping)
    net = Estimator(**{name: int(value) for name, value in config.items()})
    unpacked(NAME, net, tensors)
    return net
