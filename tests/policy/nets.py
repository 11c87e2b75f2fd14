"""What the networks that predict routing learn from: drawn states, distributions and passages."""

from collections.abc import Iterator

import torch

from core.policy.predict.nets.estimator import Batch
from core.policy.predict.nets.path import Passage

LAYERS, EXPERTS, K, HIDDEN = 4, 6, 2, 12
TOKENS = torch.arange(5, 45)
SIZES = {"layers": LAYERS, "experts": EXPERTS, "hidden": HIDDEN}


class Held:
    def __init__(self, states: torch.Tensor, probs: torch.Tensor) -> None:
        self.states, self.probs = states, probs
        self.count = len(states) * (states.shape[1] - 1)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        for rows in torch.randperm(self.count, generator=generator).split(size):
            token, layer = rows // (self.states.shape[1] - 1), rows % (self.states.shape[1] - 1)
            yield Batch(layer + 1, self.states[token, layer].float(), self.probs[token, layer + 1].float())


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(count, LAYERS, HIDDEN, generator=generator)
    routers = torch.randn(LAYERS, HIDDEN, EXPERTS, generator=torch.Generator().manual_seed(99))
    before = states.roll(1, 1)
    return states.half(), torch.einsum("nlh,lhe->nle", before, routers).softmax(-1).half()


def passages(count: int, length: int = 12, seed: int = 0) -> list[Passage]:
    """Each token goes its own way through the layers, by its id alone."""
    generator = torch.Generator().manual_seed(seed)
    ways = torch.rand(50, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(7)).argsort(-1)[..., :K]
    found = []
    for _ in range(count):
        ids = torch.randint(5, 45, (length,), generator=generator)
        found.append(Passage(ids[:4].tolist(), ids.tolist(), ways[ids].to(torch.uint8)))
    return found


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
