"""A network that predicts the next layer's routing from this layer's router input (Speculating Experts, appendix A).

Linear to a small width, plus a learned embedding of the layer, two linear layers with a SiLU between them and a
residual around them, LayerNorm, and a head as wide as there are experts. One network serves all layers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from core.policy.predict.nets.training import Progress, batches, descend, packed, seeded, unpacked

NAME = "estimator"


class Estimator(nn.Module):
    """Router logits of a layer, from the router input of the layer before. The paper feeds it the quasi-hidden state;
    here it gets h_l, which needs no default vectors."""

    def __init__(self, layers: int, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.config = {"layers": layers, "experts": experts, "hidden": hidden, "width": width}
        self.reduce = nn.Linear(hidden, width)
        self.place = nn.Embedding(layers, width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, experts)

    def forward(self, states: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        """[T, E] logits in the net's dtype, from h_{layer - 1} [T, H]; `layer` [T] or [] int64."""
        x = self.reduce(states.to(self.reduce.weight.dtype)) + self.place(layer)
        x = x + self.outer(functional.silu(self.inner(x)))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def probabilities(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """[T, E] fp32 on the states' device: the router distribution of `layer` (>= 1), from h_{layer - 1} [T, H]."""
        place = torch.tensor(layer) if states.device.type == "cpu" else torch.full((), layer, device=states.device)
        return self(states, place).float().softmax(-1)  # type: ignore[no-any-return]


def train(
    states: torch.Tensor,
    probs: torch.Tensor,
    *,
    width: int = 256,
    epochs: int = 20,
    batch: int = 256,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Progress = lambda text, share: None,
    cancel: threading.Event | None = None,
) -> Estimator | None:
    """Train on N tokens: `states` [N, L, H] = h_l, the routers' inputs, `probs` [N, L, E] = their distributions; any
    float dtype, both on the CPU. Loss: KL of the true distribution of layer l + 1 from the predicted one.

    Deterministic for the same data and seed. None when cancelled. Raises ValueError for fewer than two layers.
    """
    tokens, layers, hidden = states.shape
    if layers < 2:
        raise ValueError("an estimator needs a layer that comes before another")
    with seeded(seed) as generator:
        net = Estimator(layers, probs.shape[-1], hidden, width)
        rows = tokens * (layers - 1)
        pick = batches(rows, batch, epochs, generator)

        def loss_of(step: int) -> torch.Tensor:
            row = pick(step)
            token, layer = row // (layers - 1), row % (layers - 1)
            logits = net(states[token, layer].float(), layer + 1)
            return functional.kl_div(logits.log_softmax(-1), probs[token, layer + 1].float(), reduction="batchmean")

        done = descend(
            net,
            epochs * -(-rows // batch),
            loss_of,
            "Training the estimator",
            rate=rate,
            decay=0.01,
            progress=progress,
            cancel=cancel,
        )
    return None if done is None else net


@torch.no_grad()
def recall(net: Estimator, states: torch.Tensor, probs: torch.Tensor, top_k: int) -> torch.Tensor:
    """[L] share of each layer's true top-k experts that are among the net's k likeliest; [0] is NaN, as it has no layer
    before. `states` and `probs` as in `train`."""
    found = [float("nan")]
    for layer in range(1, states.shape[1]):
        estimated = net.probabilities(states[:, layer - 1], layer).topk(top_k).indices
        true = probs[:, layer].float().topk(top_k).indices
        found.append(float((estimated[:, :, None] == true[:, None, :]).any(1).float().mean()))
    return torch.tensor(found)


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
